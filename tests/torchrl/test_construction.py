"""How an updater may be made and given: torchrl's five arguments, a class, an instance, before or after the workers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tensordict import TensorDict
from torchrl.collectors import Collector

from shmsync import ChannelClosed, ChannelUnreachable, PushError, RPCWeightUpdater, remote
from tests.helpers import collectors
from tests.helpers.collectors import ask, collect, fill, net_policy, push, seen_in, value_of, values, versions
from tests.helpers.trainers import Trainer


@pytest.fixture(scope="module")
def trainer(start_for_module: Callable[..., Trainer]) -> Trainer:
    """Its collector has an updater that stays silent, so that each test can make one of its own."""
    return start_for_module(updater=Silent)


class Silent:
    """No updater at all: torchrl wants something to register."""

    collector: Any = None

    def register_collector(self, collector: Any) -> None:
        self.collector = collector


def stand_alone(world: SimpleNamespace, make: str = "positional", workers: int = 2) -> Any:
    """An updater of torchrl's five arguments, for the workers that run already."""
    arguments = {
        "collector_infos": world.collector.collector_infos,
        "collector_class": Collector,
        "collector_rrefs": world.collector.collector_rrefs,
        "policy_weights": TensorDict.from_module(world.policy).data,
        "num_workers": workers,
    }
    # Each begins anew, whatever the workers have had from the ones before.
    if make == "positional":
        made = RPCWeightUpdater(*arguments.values(), first_version=1)
    else:
        made = RPCWeightUpdater(**arguments, first_version=1)
    world.updater = made
    return made


def use(world: SimpleNamespace, make: str, value: float) -> list[Any]:
    fill(world.policy, value)
    with stand_alone(world, make) as updater:
        updater.init()
        seen = [(values(world), versions(world), updater.all_worker_ids(), updater.collector)]
        push(world, value + 0.5)
        seen.append((values(world), versions(world), seen_in(next(world.batches)).versions, updater.version))
        fill(world.policy, value + 0.75)
        updater.push_weights()
        seen.append((values(world), updater.last_push.version))
    seen.append((values(world), versions(world)))
    return seen


@pytest.mark.parametrize("make", ["positional", "keyword"])
def test_torchrls_five_arguments(trainer: Trainer, make: str) -> None:
    """For workers that run already: `init` attaches them and gives them the server's weights, a push changes them,
    and after the end of the updater they keep what they had. Mutant: end the channel without a word to the
    workers."""
    assert trainer.do(use, make, 1.0) == [
        ([1.0] * 2, [1] * 2, [0, 1], None),
        ([1.5] * 2, [2] * 2, [2], 2),
        ([1.75] * 2, 3),
        ([1.75] * 2, [0] * 2),
    ]


def test_five_arguments_before_there_are_workers(start: Callable[..., Trainer]) -> None:
    """As an instance: the RRefs are taken from the collector when they are there, and the weights that it was
    given, not the policy's, are version 1. Mutant: ask for `collector_rrefs[i]` of None."""
    trainer = start(build=build_with_instance)
    first = trainer.do(collect)
    assert (first.actions, first.versions) == ([5.0], [1])
    report = trainer.do(push, 6.0)
    assert [report.workers[worker].in_use for worker in (0, 1)] == [2, 2]
    assert trainer.do(values) == [6.0] * 2


def build_with_instance(world: SimpleNamespace) -> None:
    weights = TensorDict.from_module(net_policy(value=5.0)).data
    collectors.build(world, updater=RPCWeightUpdater(None, Collector, None, weights, 2))


def test_collectors_of_collectors_that_run_already(start: Callable[..., Trainer]) -> None:
    """Their inner processes can't be reached any more, so each worker passes the versions on. Mutant: attach the outer
    process as if its inner ones were bound."""
    trainer = start(updater=Silent, kind="MultiSyncCollector", workers=1, num_workers_per_collector=2)
    assert trainer.do(collect).actions == [7.0]
    assert trainer.do(push_to_inner, [2.0, 3.0]) == [([2.0], 2), ([3.0], 3)]


def push_to_inner(world: SimpleNamespace, pushed: list[float]) -> Any:
    found = []
    with stand_alone(world, workers=1) as updater:
        updater.init()
        for value in pushed:
            report = push(world, value)
            found.append((seen_in(next(world.batches)).actions, report.workers[0].in_use))
    return found


def test_the_first_push_attaches_without_init(trainer: Trainer) -> None:
    """Mutant: send a notification to a worker that has not attached, and leave it at its error."""
    assert trainer.do(push_without_init) == ([2.0] * 2, [1] * 2)


def push_without_init(world: SimpleNamespace) -> Any:
    with stand_alone(world):
        report = push(world, 2.0)
        return values(world), [report.workers[worker].in_use for worker in (0, 1)]


def test_an_updater_given_to_the_collector_while_its_workers_run(trainer: Trainer) -> None:
    """`collector.weight_updater = RPCWeightUpdater`, then `init_updater`. RRefs and weights are the collector's.
    Mutant: take RRefs from the constructor only."""
    assert trainer.do(assign_late) == ([3.0] * 2, [3.5] * 2)


def assign_late(world: SimpleNamespace) -> Any:
    collector, silent = world.collector, world.collector.weight_updater
    fill(world.policy, 3.0)
    collector.weight_updater = RPCWeightUpdater
    try:
        collector.init_updater()
        first = values(world)
        fill(world.policy, 3.5)
        collector.update_policy_weights_(world.policy)
        return first, values(world)
    finally:
        collector.weight_updater.close()
        collector.weight_updater = silent


def test_a_policy_that_moves_to_another_updater_stays_there(trainer: Trainer) -> None:
    """The end of the old one does not take the new one's gate away. Mutant: restore the collector's methods and policy
    although another attachment has taken over."""
    assert trainer.do(move_over) == ([5.0], [2], [6.0], [3])


def move_over(world: SimpleNamespace) -> Any:
    old = stand_alone(world)
    push(world, 4.0)
    with stand_alone(world) as new:
        push(world, 4.5)
        old.close()
        push(world, 5.0)
        first = seen_in(next(world.batches))
        new.notify = "memory"  # nothing but the gate can switch now
        push(world, 6.0)
        second = seen_in(next(world.batches))
    return first.actions, first.versions, second.actions, second.versions


def test_a_closed_updater_says_so(trainer: Trainer) -> None:
    """The second close does nothing; the workers keep their values and can still collect. Mutant: let a closed
    updater open another channel."""
    with pytest.raises(ChannelClosed, match="closed"):
        trainer.do(push_after_close)
    assert trainer.do(values) == [7.5] * 2
    assert trainer.do(collect).actions == [7.5]


def push_after_close(world: SimpleNamespace) -> None:
    updater = stand_alone(world)
    push(world, 7.5)
    updater.close()
    updater.close()
    push(world, 8.0)


def test_an_exception_in_the_block_comes_out(trainer: Trainer) -> None:
    """Mutant: let `__exit__` swallow it."""
    with pytest.raises(KeyError, match="real"):
        trainer.do(fail_in_block)


def fail_in_block(world: SimpleNamespace) -> None:
    with stand_alone(world):
        push(world, 9.0)
        raise KeyError("real")


def test_a_worker_that_lost_its_attachment_is_attached_again(trainer: Trainer) -> None:
    """By the push that finds it out. Mutant: give up at NotAttached."""
    assert trainer.do(push_to_forgetful) == ([12.5] * 2, [2, 2])


def push_to_forgetful(world: SimpleNamespace) -> Any:
    with stand_alone(world):
        push(world, 12.0)
        ask(world, 0, remote.forget)
        report = push(world, 12.5)
        return values(world), [report.workers[worker].in_use for worker in (0, 1)]


def pretend_another_host(collector: Any) -> str:
    import socket

    from shmsync import handle

    handle._boot_id = lambda: "11111111-2222-3333-4444-555555555555"
    return socket.gethostname()


def back_on_this_host(collector: Any) -> None:
    from pathlib import Path

    from shmsync import handle

    handle._boot_id = lambda: Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def test_a_worker_that_cannot_map_the_channel_is_named(trainer: Trainer) -> None:
    """With its host and what is needed; the other worker is up to date, and a retry for it alone works once it can.
    Mutant: do not compare the boot ids, and nothing or something wrong is mapped."""
    host = trainer.do(ask, 1, pretend_another_host)
    with pytest.raises(PushError) as caught:
        trainer.do(push_to_new_updater, 10.0)
    assert set(caught.value.errors) == {1}
    assert isinstance(caught.value.errors[1], ChannelUnreachable)
    for words in ("Worker 1", f"host {host}", "same host and the same pid namespace"):
        assert words in str(caught.value)
    assert trainer.do(ask, 0, value_of) == 10.0
    trainer.do(ask, 1, back_on_this_host)
    trainer.do(push, 11.0, worker_ids=[1])
    assert trainer.do(values) == [10.0, 11.0]
    trainer.do(close)


def push_to_new_updater(world: SimpleNamespace, value: float) -> None:
    stand_alone(world)
    push(world, value)


def close(world: SimpleNamespace) -> None:
    world.updater.close()


# --- what needs no workers


def test_from_policy_makes_an_updater_of_its_weights() -> None:
    """As torchrl's classmethod: an instance, or None if there are no weights to be had. Mutant: return None, as
    torchrl's base class does."""
    made = RPCWeightUpdater.from_policy(net_policy(value=5.0))
    assert isinstance(made, RPCWeightUpdater)
    assert made._get_server_weights() is not None
    assert RPCWeightUpdater.from_policy(lambda x: x) is None
