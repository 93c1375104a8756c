"""The updater over plain torch.distributed.rpc: five arguments, RRefs of objects with a policy, no torchrl."""

from __future__ import annotations

import random
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shmsync import ChannelClosed, PushError, WorkerIdError
from tests.helpers.rpc_worlds import (
    Player,
    Policy,
    ask,
    bound_version,
    everywhere,
    own,
    pid_of,
    push,
    run_forward,
    updater,
    weights_of,
)
from tests.helpers.trainers import Trainer, segment_uses


def itself(policy: nn.Module) -> nn.Module:
    return policy


def test_torchrl_is_hidden_here(trainer: Trainer) -> None:
    """From the trainer and the workers alike: the proof that the tests of this folder do without it."""
    assert trainer.do(finds_torchrl) == [False] * 4


def finds_torchrl(world: SimpleNamespace) -> list[bool]:
    own(world)
    return [bool(find_spec("torchrl")), *everywhere(world, worker_finds_torchrl)]


def worker_finds_torchrl(owned: Any) -> bool:
    return bool(find_spec("torchrl"))


@pytest.mark.parametrize("make", [Player, itself], ids=["object with a policy", "module"])
def test_init_attaches_and_a_push_reaches_every_worker(trainer: Trainer, make: Any) -> None:
    """The first version are the weights that the updater was made with. Mutant: publish nothing at `init`."""
    assert trainer.do(init_and_push, make) == [
        ([(1.0, 1.0)] * 3, [1] * 3),
        ([(2.0, 2.0)] * 3, [2] * 3),
        ([(2.0, 2.0)] * 3, [0] * 3),
    ]


def init_and_push(world: SimpleNamespace, make: Any) -> Any:
    own(world, make, value=1.0)
    seen = []
    with updater(world) as one:
        one.init()
        seen.append((everywhere(world, weights_of), everywhere(world, bound_version)))
        push(world, 2.0)
        seen.append((everywhere(world, run_forward), everywhere(world, bound_version)))
    seen.append((everywhere(world, run_forward), everywhere(world, bound_version)))
    return seen


def test_a_worker_joins_late_with_its_peers_version(trainer: Trainer) -> None:
    """Three versions after the first one, attached by the push that addresses it first. Mutant: let `init` attach
    all."""
    before, after = trainer.do(join_late)
    assert before == [3, 0, 0]
    assert after == ([(4.0, 4.0)] * 3, [4, 4, 4])


def join_late(world: SimpleNamespace) -> Any:
    own(world, value=0.0)
    with updater(world):
        for value in (1.0, 2.0, 3.0):
            push(world, value, worker_ids=0)
        before = everywhere(world, bound_version)
        push(world, 4.0)
        return before, (everywhere(world, weights_of), everywhere(world, bound_version))


def test_with_notify_memory_the_next_forward_sees_the_push(trainer: Trainer) -> None:
    """And nothing before it does; nothing is confirmed. Mutant: switch only when a notification comes."""
    status, rest, forward = trainer.do(push_by_memory)
    assert status == ["not confirmed"] * 3
    assert rest == [(1.0, 1.0)] * 3
    assert forward == [(2.0, 2.0)] * 3


def push_by_memory(world: SimpleNamespace) -> Any:
    own(world)
    with updater(world, notify="memory") as one:
        push(world, 1.0)
        report = push(world, 2.0)
        assert one.last_push is report
        status = [report.workers[worker].status for worker in range(3)]
        return status, everywhere(world, weights_of), everywhere(world, run_forward)


@pytest.mark.parametrize("notify", ["rpc", "memory"])
def test_a_thousand_random_subsets_are_exact(trainer: Trainer, notify: str) -> None:
    """Exactly the addressed workers, each once, are at the new version after a push, the others where they were.
    Mutant: let a subscriber follow the newest of all rows."""
    assert trainer.do(push_to_random_subsets, notify, 1000 if notify == "memory" else 300) == []


def push_to_random_subsets(world: SimpleNamespace, notify: str, rounds: int) -> list[Any]:
    draw, wrong = random.Random(0), []
    own(world)
    with updater(world, notify=notify):
        push(world, 0.0)
        expected = [0.0] * 3
        for value in range(1, rounds + 1):
            subset = draw.sample(range(3), draw.randint(0, 3))
            push(world, float(value), worker_ids=subset)
            expected = [float(value) if worker in subset else old for worker, old in enumerate(expected)]
            found = everywhere(world, run_forward)
            if found != [(one, one) for one in expected]:
                wrong.append((value, subset, expected, found))
    return wrong


@pytest.mark.parametrize(
    ("worker_ids", "addressed"),
    [
        *((None, {0, 1, 2}), (0, {0}), ([1], {1}), ([2, 0], {0, 2}), ([], set()), ((1,), {1}), ([1, 1], {1})),
        *((torch.device("cpu"), {0, 1, 2}), ((torch.device("cpu"),), {0, 1, 2})),
    ],
    ids=str,
)
def test_ids_address_exactly_these_workers(trainer: Trainer, worker_ids: Any, addressed: set[int]) -> None:
    """[] does nothing at all. Mutant: take an empty list for None."""
    versions, reported = trainer.do(push_to, worker_ids)
    assert versions == [2 if worker in addressed else 1 for worker in range(3)]
    assert reported == (addressed or {0, 1, 2})


def push_to(world: SimpleNamespace, worker_ids: Any) -> Any:
    own(world)
    with updater(world) as one:
        one.init()
        push(world, 1.0, worker_ids=worker_ids)
        everywhere(world, run_forward)  # takes all that is addressed to it
        return everywhere(world, bound_version), set(one.last_push.workers)


@pytest.mark.parametrize("worker_ids", [-1, 3, "0", [0, 3], torch.device("meta")], ids=str)
def test_bad_ids_are_refused_before_anything_is_sent(trainer: Trainer, worker_ids: Any) -> None:
    """Mutant: send to the good ones first."""
    text, versions = trainer.do(push_to_bad_ids, worker_ids)
    assert "0 to 2" in text or "'cpu'" in text
    assert versions == [1, 1, 1, 1]


def push_to_bad_ids(world: SimpleNamespace, worker_ids: Any) -> Any:
    own(world)
    with updater(world) as one:
        one.init()
        with pytest.raises(WorkerIdError) as caught:
            push(world, 1.0, worker_ids=worker_ids)
        everywhere(world, run_forward)
        return str(caught.value), [one.version, *everywhere(world, bound_version)]


def test_an_object_without_a_policy_is_named_and_the_others_are_updated(trainer: Trainer) -> None:
    """Mutant: stop at the first worker that fails."""
    error, versions = trainer.do(push_to_one_that, Player(None))
    assert "worker 1" in error
    assert "BindingError" in error
    assert "nn.Module" in error
    assert versions == [1, 1]


def test_a_policy_of_another_shape_is_named_with_both_shapes(trainer: Trainer) -> None:
    """It is the worker's policy that does not fit; the others are updated. Mutant: let the first error end the push."""
    error, versions = trainer.do(push_to_one_that, Player(Policy(sizes=(3,))))
    for words in ("worker 1", "LayoutMismatch", "weights.0", "(8,)", "(3,)"):
        assert words in error
    assert versions == [1, 1]


def push_to_one_that(world: SimpleNamespace, owned: Any) -> Any:
    from torch.distributed import rpc

    own(world)
    world.rrefs[1] = rpc.remote(world.names[1], itself, args=(owned,))
    with updater(world):
        with pytest.raises(PushError) as caught:
            push(world, 1.0)
        assert set(caught.value.errors) == {1}
        return str(caught.value), [ask(world, worker, bound_version) for worker in (0, 2)]


def test_two_channels_serve_two_objects_of_the_same_workers(trainer: Trainer) -> None:
    """A second updater for other objects takes nothing from the first. Mutant: know attachments by the worker's number
    alone."""
    assert trainer.do(serve_two_objects) == ([(3.0, 3.0)] * 3, [(2.0, 2.0)] * 3)


def serve_two_objects(world: SimpleNamespace) -> Any:
    own(world)
    first_policy, first_rrefs = world.policy, world.rrefs
    with updater(world, notify="memory") as first:  # no message would attach them again
        push(world, 1.0)
        own(world)
        with updater(world):
            push(world, 2.0)
            world.policy, world.rrefs, second_rrefs = first_policy, first_rrefs, world.rrefs
            world.updater = first
            push(world, 3.0)
            seen = everywhere(world, run_forward)
            world.rrefs = second_rrefs
            return seen, everywhere(world, run_forward)


def test_an_exception_in_the_block_comes_out_and_push_after_it_says_closed(trainer: Trainer) -> None:
    """A second close does nothing. Mutant: let `__exit__` swallow it."""
    with pytest.raises(KeyError, match="real"):
        trainer.do(fail_in_block)
    with pytest.raises(ChannelClosed, match="closed"):
        trainer.do(close_and_push)


def fail_in_block(world: SimpleNamespace) -> None:
    own(world)
    with updater(world):
        push(world, 1.0)
        raise KeyError("real")


def close_and_push(world: SimpleNamespace) -> None:
    world.updater.close()
    push(world, 2.0)


def test_nothing_of_a_closed_channel_is_left(trainer: Trainer) -> None:
    """No descriptor and no mapping of its segments, neither in the trainer nor in a worker, after ten updaters.
    Mutant: leave the subscriber of an attachment that failed open."""
    assert trainer.do(come_and_go, 10) == 0


def come_and_go(world: SimpleNamespace, rounds: int) -> int:
    own(world)
    for value in range(rounds):
        with updater(world):
            push(world, float(value))
    pids = [pid_of(world), *everywhere(world, pid_of)]
    return sum(segment_uses(pid) for pid in pids)
