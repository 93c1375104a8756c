"""What else an updater is asked for: parts of the weights, casts, limits, threads, and being forgotten."""

from __future__ import annotations

import gc
import os
import threading
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shmsync import LayoutMismatch, PushError, ShmSyncError
from tests.helpers.rpc_worlds import (
    ask,
    bound_version,
    everywhere,
    module_of,
    own,
    push,
    run_forward,
    updater,
    weights_of,
)
from tests.helpers.trainers import Trainer, segment_uses


def test_a_partial_push_changes_what_it_names(trainer: Trainer) -> None:
    """The rest stays, for everybody; only the bytes that were given are written, once all slots hold the rest. A
    key that is not there is an error. Mutant: take the rest from the trainer's module."""
    written, seen, error, version = trainer.do(push_partially, 6)
    assert written[-1] == (4 * 4, 1)
    assert seen == [(1.0, 6.0)] * 3
    assert "weights.7" in str(error)
    assert version == 7


def push_partially(world: SimpleNamespace, rounds: int) -> Any:
    own(world, sizes=(8, 4))
    written = []
    with updater(world) as one:
        push(world, 1.0)
        for value in range(1, rounds + 1):
            one.push_weights({"weights.1": torch.full((4,), float(value))}, partial=True)
            written.append((one.last_push.nbytes, one.last_push.leaves))
        with pytest.raises(LayoutMismatch) as caught:
            one.push_weights({"weights.7": torch.zeros(4)}, partial=True)
        return written, everywhere(world, run_forward), caught.value, one.version


def test_a_channel_of_another_dtype_casts_both_ways(trainer: Trainer) -> None:
    """`dtype=` asks for it: half the bytes travel, and the workers' float32 parameters have the rounded values.
    Mutant: ignore `dtype=`."""
    nbytes, seen = trainer.do(push_cast, 1 / 3)
    rounded = torch.tensor(1 / 3).bfloat16().item()
    assert nbytes == 8 * 2
    assert seen == [(rounded, "torch.float32")] * 3


def push_cast(world: SimpleNamespace, value: float) -> Any:
    own(world)
    with updater(world, dtype=torch.bfloat16):
        report = push(world, value)
        return report.nbytes, everywhere(world, first_weight)


def first_weight(owned: Any) -> tuple[float, str]:
    weight = next(module_of(owned).parameters())
    return weight[0].item(), str(weight.dtype)


def test_more_workers_than_there_is_room_for(trainer: Trainer) -> None:
    """The error names the limit to raise: at once, or for the worker that finds no room when the others are updated.
    Mutant: call the worker's number wrong."""
    error, versions = trainer.do(push_to_too_many)
    assert "max_subscribers" in error or "max_workers" in error
    assert versions in ([0, 0, 0], [1, 1, 0])


def push_to_too_many(world: SimpleNamespace) -> Any:
    own(world)
    with pytest.raises(ShmSyncError) as caught, updater(world, max_workers=2):
        push(world, 1.0)
    return str(caught.value), everywhere(world, last_version)


def last_version(owned: Any) -> int:
    """1 if it has the pushed weights."""
    return int(weights_of(owned)[0])


def test_threads_take_turns(trainer: Trainer) -> None:
    """Two threads, 100 pushes each: 200 versions, no error, and every worker uniform at the last one. Mutant: no
    mutex."""
    version, versions, seen = trainer.do(push_from_threads, 100)
    assert version == 200
    assert versions == [200] * 3
    assert [low == high and low in (1.0, 2.0) for low, high in seen] == [True] * 3


def push_from_threads(world: SimpleNamespace, rounds: int) -> Any:
    own(world, sizes=(10_000, 10_000))
    with updater(world) as one:
        errors: list[Exception] = []

        def work(value: float) -> None:
            weights = {f"weights.{i}": torch.full((10_000,), value) for i in (0, 1)}
            try:
                for _ in range(rounds):
                    one.push_weights(weights)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(value,)) for value in (1.0, 2.0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        return one.version, everywhere(world, bound_version), everywhere(world, weights_of)


def test_an_updater_that_is_dropped_without_close_leaves_nothing_in_the_trainer(trainer: Trainer) -> None:
    """The workers keep their weights. Mutant: hold publishers in a table of the module."""
    before, after, seen = trainer.do(push_and_forget)
    assert before > 0
    assert after == 0
    assert seen == [(3.0, 3.0)] * 3


def push_and_forget(world: SimpleNamespace) -> Any:
    own(world)
    updater(world)
    push(world, 3.0)
    before = segment_uses(os.getpid())
    world.updater = None
    gc.collect()
    return before, segment_uses(os.getpid()), everywhere(world, run_forward)


def test_init_confirms_also_with_notify_memory(trainer: Trainer) -> None:
    """It is what attaches, so it is awaited. Mutant: stay silent there too."""
    assert trainer.do(init_by_memory) == [1, 1, 1]


def init_by_memory(world: SimpleNamespace) -> list[int]:
    own(world)
    with updater(world, notify="memory") as one:
        one.init()
        one.init()
        return [one.last_push.workers[worker].in_use for worker in range(3)]


def test_a_retry_may_address_a_worker_of_another_layout_once_it_fits(trainer: Trainer) -> None:
    """A worker whose policy did not fit is attached by a later push when it has one that does. Mutant: take a
    worker for attached when its attachment failed."""
    assert trainer.do(mend_and_retry) == ([1, 0, 1], [2, 2, 2])


def mend_and_retry(world: SimpleNamespace) -> Any:
    own(world)
    ask(world, 1, give_policy, 3)
    with updater(world):
        with pytest.raises(PushError):
            push(world, 1.0)
        before = everywhere(world, bound_version)
        ask(world, 1, give_policy, 8)
        push(world, 2.0)
        return before, everywhere(world, bound_version)


def give_policy(owned: Any, size: int) -> None:
    owned.policy = type(owned.policy)(sizes=(size,))


@pytest.mark.parametrize("how", ["replaced", "double"])
def test_the_policy_in_use_gets_the_update_even_if_it_was_replaced(trainer: Trainer, how: str) -> None:
    """By another module, or by other storages: either the update reaches it, or the push names the worker and says that
    what it has bound is no longer the policy's. Mutant: update what nobody uses any more, silently."""
    error, seen = trainer.do(replace_and_push, how)
    if error is None:
        assert seen == [(2.0, 2.0)] * 3
    else:
        assert "worker 1" in error
        assert "no longer" in error


def replace_and_push(world: SimpleNamespace, how: str) -> Any:
    own(world)
    with updater(world):
        push(world, 1.0)
        ask(world, 1, replace, how)
        try:
            push(world, 2.0)
        except PushError as caught:
            return str(caught), None
        return None, everywhere(world, run_forward)


def replace(owned: Any, how: str) -> None:
    if how == "double":
        owned.policy.double()
    else:
        owned.policy = deepcopy(owned.policy)


def test_more_workers_than_there_are_is_said(trainer: Trainer) -> None:
    """By name, in place of an index that is out of range. Mutant: look it up at once."""
    said = trainer.do(push_to_one_more)
    assert "Worker 3 has no RRef: num_workers=4, but 3 collector_rrefs" in said
    assert "publishes again" not in said


def push_to_one_more(world: SimpleNamespace) -> str:
    own(world, sizes=(8,))
    workers, world.workers = world.workers, 4
    try:
        with updater(world), pytest.raises(PushError) as caught:
            push(world, 1.0)
    finally:
        world.workers = workers
    return str(caught.value)


def test_two_sets_of_weights_are_one_too_many(trainer: Trainer) -> None:
    """Nothing is published. Mutants: take the first; take None for the second."""
    assert trainer.do(push_two) == [0, 3]


def push_two(world: SimpleNamespace) -> list[int]:
    own(world, sizes=(8,))
    with updater(world) as one:
        with pytest.raises(ShmSyncError, match="got both"):
            one.push_weights(world.policy, policy_or_weights=deepcopy(world.policy))
        with pytest.raises(ShmSyncError, match="got both"):
            one(world.policy, weights=deepcopy(world.policy))
        before = one.version
        one(world.policy, weights=None)
        one(world.policy, weights=world.policy)
        one.push_weights(world.policy, policy_or_weights=world.policy)
        return [before, one.version]


def test_a_timeout_of_for_ever_is_one(trainer: Trainer) -> None:
    """RPC counts milliseconds in 32 bits. Mutant: hand it on as it is."""
    assert trainer.do(push_patiently, [float("inf"), 3e6, np.float32(5)]) == [None] * 3


def push_patiently(world: SimpleNamespace, timeouts: list[Any]) -> list[Any]:
    own(world, sizes=(8,))
    errors = []
    for timeout in timeouts:
        with updater(world, timeout=timeout):
            errors.append(push(world, 1.0).workers[0].error)
    return errors
