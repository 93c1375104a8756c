"""`fallback="rpc"`: worker 1 of three cannot map the channel and gets the weights by RPC; the others map it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from shmsync import ChannelUnreachable, PushError, PushTimeout, RPCWeightUpdater, ShmSyncError
from shmsync.torchrl.fallback import Taking
from tests.helpers.rpc_worlds import (
    ask,
    bound_version,
    everywhere,
    find_the_way,
    lose_the_way,
    messages,
    own,
    push,
    updater,
    watch_messages,
    weights_of,
)
from tests.helpers.trainers import Trainer, wait_for


@pytest.fixture(autouse=True)
def one_world_for_all(trainer: Trainer) -> Iterator[None]:
    """What a test does to a worker ends with it."""
    yield
    trainer.do(end)


def end(world: SimpleNamespace) -> None:
    ask(world, 1, find_the_way)
    world.updater.close()


def start(world: SimpleNamespace, fallback: str | None = "rpc", within: float = 20.0, **options: Any) -> None:
    """Workers that nobody has attached yet; what the updater logs and sends is kept."""
    own(world, sizes=(8, 4))
    ask(world, 1, lose_the_way)
    world.log = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: world.log.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shmsync").handlers = [handler]
    watch_messages(world)
    updater(world, fallback=fallback, timeout=within, **options)


def told(world: SimpleNamespace) -> list[str]:
    return world.log


def values(world: SimpleNamespace) -> list[tuple[float, float]]:
    return everywhere(world, weights_of)


def pushed(world: SimpleNamespace, value: float, **options: Any) -> Any:
    """The report of a push, without its errors."""
    report = push(world, value, **options)
    return report.version, {w: (r.via, r.in_use, r.seen, r.error) for w, r in report.workers.items()}, report.rpc_nbytes


@pytest.mark.parametrize("notify", ["rpc", "memory"])
def test_who_cannot_map_gets_every_version_by_rpc(trainer: Trainer, notify: str) -> None:
    """With one warning, and the report says who got it how; the messages to the others stay small. Mutants: warn at
    each push; send the weights to all; forget them when nobody is notified."""
    trainer.do(start, notify=notify)
    for version in range(1, 5):
        number, workers, nbytes = trainer.do(pushed, float(version))
        assert (number, nbytes) == (version, 12 * 4)
        assert workers[1] == ("rpc", version, version, None)
        assert [workers[w][0] for w in (0, 2)] == ["map", "map"]
        assert trainer.do(values)[1] == (version, version)
    (line,) = trainer.do(told)
    assert "Worker 1 " in line
    assert "another-host" in line or "another host" in line
    assert trainer.do(everywhere, bound_version)[1] == 0
    assert trainer.do(lag) == {0: 0, 1: 0, 2: 0} if notify == "rpc" else {1: 0}.items() <= trainer.do(lag).items()
    sent = trainer.do(messages)
    assert [size for name, size, _ in sent if name != "take" and size >= 512] == []
    assert len([name for name, _, _ in sent if name == "take"]) == 4
    assert [tensors for name, _, tensors in sent if name != "take" and tensors] == []


def lag(world: SimpleNamespace) -> dict[int, int]:
    return world.updater.lag().workers


def test_by_default_it_is_an_error_that_names_the_worker(trainer: Trainer) -> None:
    """And the others are up to date. Mutant: fall back whatever the option says."""
    trainer.do(start, None)
    with pytest.raises(PushError, match="Worker 1 on host") as caught:
        trainer.do(pushed, 1.0)
    assert {w: type(e) for w, e in caught.value.errors.items()} == {1: ChannelUnreachable}
    assert trainer.do(values) == [(1, 1), (0, 0), (1, 1)]


def test_subsets_and_partial_pushes_are_exact(trainer: Trainer) -> None:
    """It gets what is addressed to it, all of it. Mutants: lease what everybody is addressed; send what was given."""
    trainer.do(start)
    trainer.do(pushed, 1.0)
    trainer.do(pushed, 2.0, worker_ids=[0, 2])
    assert trainer.do(values) == [(2, 2), (1, 1), (2, 2)]
    assert trainer.do(pushed, 3.0, worker_ids=[1])[1] == {1: ("rpc", 3, 3, None)}
    assert trainer.do(values) == [(2, 2), (3, 3), (2, 2)]
    trainer.do(push_a_part)
    assert trainer.do(values) == [(3, 9)] * 3


def push_a_part(world: SimpleNamespace) -> None:
    world.updater.push_weights({"weights.1": torch.full((4,), 9.0)}, partial=True)


def test_without_waiting_it_gets_there_too(trainer: Trainer) -> None:
    """In order, however fast they follow one another. Mutant: find out at the next look."""
    trainer.do(start)
    trainer.do(push_fast, 30)
    wait_for(lambda: trainer.do(values) == [(30, 30)] * 3, "the last version")
    wait_for(lambda: trainer.do(answers) == [30, 30, 30], "the answers")


def push_fast(world: SimpleNamespace, count: int) -> None:
    for value in range(1, count + 1):
        push(world, float(value), wait=False)


def answers(world: SimpleNamespace) -> list[Any]:
    return [world.updater.last_push.workers[w].in_use for w in range(3)]


def test_one_version_at_a_time_is_on_its_way(trainer: Trainer) -> None:
    """So a slow worker does not fill the memory with versions that it will never use. Mutant: do not wait for the one
    before."""
    trainer.do(start)
    trainer.do(pushed, 1.0)
    trainer.do(ask, 1, slow_down, 0.3)
    begin = time.monotonic()
    trainer.do(push_fast, 5)
    assert time.monotonic() - begin > 4 * 0.3
    trainer.do(ask, 1, slow_down, 0.0)
    wait_for(lambda: trainer.do(values) == [(5, 5)] * 3, "the last version")


def test_a_version_that_comes_late_is_not_taken() -> None:
    """A message may overtake another. Mutant: take whatever comes."""
    module = nn.Linear(2, 1, bias=False)
    taking = Taking(module, lambda **options: pytest.fail("nothing to subscribe to"))
    for version in (1, 3, 2):
        taking.take(version, TensorDict({"weight": torch.full((1, 2), float(version))}))
    assert module.weight.tolist() == [[3.0, 3.0]]
    assert taking.notified() == (3, 3)


def test_a_failure_names_the_worker_and_a_retry_works(trainer: Trainer) -> None:
    """The others are up to date, and it still needs no second warning. Mutant: let it attach again."""
    trainer.do(start)
    trainer.do(pushed, 1.0)
    trainer.do(ask, 1, exchange_policy, 5)
    with pytest.raises(PushError) as caught:
        trainer.do(pushed, 2.0)
    assert set(caught.value.errors) == {1}
    assert trainer.do(lag)[1] == 1
    trainer.do(ask, 1, exchange_policy, 8)
    assert trainer.do(pushed, 3.0, worker_ids=[1])[1] == {1: ("rpc", 3, 3, None)}
    assert trainer.do(values) == [(2, 2), (3, 3), (2, 2)]
    assert len(trainer.do(told)) == 1


def exchange_policy(owned: Any, size: int) -> None:
    owned.policy.weights[0] = nn.Parameter(torch.zeros(size))


def test_a_slow_worker_delays_a_push_by_the_timeout(trainer: Trainer) -> None:
    """And is named; when it is quick again, it takes the next version. Mutant: no timeout on what is sent."""
    trainer.do(start, within=1.0)
    trainer.do(pushed, 1.0)
    trainer.do(ask, 1, slow_down, 3.0)
    begin = time.monotonic()
    with pytest.raises(PushTimeout) as caught:
        trainer.do(pushed, 2.0)
    assert time.monotonic() - begin < 2.5
    assert set(caught.value.errors) == {1}
    assert trainer.do(values)[0] == (2, 2)
    trainer.do(ask, 1, slow_down, 0.0)
    time.sleep(2.5)
    assert trainer.do(pushed, 3.0)[1][1] == ("rpc", 3, 3, None)
    assert trainer.do(values) == [(3, 3)] * 3


def slow_down(owned: Any, seconds: float) -> None:
    """Run in a worker: writing weights takes so long from now on."""
    from shmsync.torchrl import fallback

    write = getattr(fallback._write, "real", fallback._write)

    def slowly(target: Any, weights: Any) -> None:
        time.sleep(seconds)
        write(target, weights)

    slowly.real = write  # type: ignore[attr-defined]
    fallback._write = slowly


def test_another_object_is_asked_anew(trainer: Trainer) -> None:
    """A worker that was started again may be able to map the channel. Mutant: remember the worker for ever."""
    trainer.do(start)
    trainer.do(pushed, 1.0)
    trainer.do(own_anew)
    workers = trainer.do(pushed, 2.0)[1]
    assert {w: one[0] for w, one in workers.items()} == {0: "map", 1: "map", 2: "map"}
    assert trainer.do(everywhere, bound_version) == [2, 2, 2]


def own_anew(world: SimpleNamespace) -> None:
    ask(world, 1, find_the_way)
    own(world, sizes=(8, 4))
    world.updater.collector_rrefs = world.rrefs


def test_a_bound_on_the_lag_counts_its_answers(trainer: Trainer) -> None:
    """Mutant: take what the trainer has read for it for what it uses."""
    trainer.do(start, max_lag=0)
    trainer.do(pushed, 1.0)
    trainer.do(ask, 1, slow_down, 0.5)
    begin = time.monotonic()
    trainer.do(pushed, 2.0, wait=False)
    assert time.monotonic() - begin > 0.4
    assert trainer.do(values) == [(2, 2)] * 3
    trainer.do(ask, 1, slow_down, 0.0)


def test_bad_fallbacks_are_named() -> None:
    with pytest.raises(ShmSyncError, match="fallback.*'pigeon'"):
        RPCWeightUpdater(fallback="pigeon")
