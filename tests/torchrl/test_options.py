"""The options of RPCCollector that call the updater or change what a worker does, and those of the updater itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from shmsync import RPCWeightUpdater, ShmSyncError
from tests.helpers.collectors import Background, collect, collect_from_each, fill, net_policy, push, seen_in, values
from tests.helpers.trainers import Trainer, wait_for

Start = Callable[..., Trainer]


def change(world: SimpleNamespace, value: float) -> None:
    """A step of the trainer that nobody pushes."""
    fill(world.policy, value)


def version(world: SimpleNamespace) -> int:
    return world.updater.version


def test_update_after_each_batch_sync(start: Start) -> None:
    """The collector pushes before every batch what the trainer holds then. Mutant: do nothing when the collector
    calls without weights."""
    trainer = start(update_after_each_batch=True)
    for value in (1.0, 2.0, 3.0):
        trainer.do(change, value)
        assert trainer.do(collect).actions == [value]
    assert trainer.do(version) == 4


def test_update_after_each_batch_async(start: Start) -> None:
    """It pushes to the worker whose batch has come, without waiting. torchrl's own class dies at the first batch.
    Mutant: refuse `wait=`, or a tuple of ids."""
    trainer = start(update_after_each_batch=True, sync=False, workers=1)
    trainer.do(collect)
    trainer.do(change, 2.0)
    assert trainer.do(collect, 3).actions == [2.0]
    trainer.do(change, 3.0)
    assert trainer.do(collect, 3).actions == [3.0]
    assert trainer.do(version) == 8


def test_update_after_each_batch_async_with_two_workers(start: Start) -> None:
    """Each push is addressed to one of them: the other keeps its version until its own turn. Mutant: the same."""
    trainer = start(update_after_each_batch=True, sync=False)
    trainer.do(change, 2.0)
    found = trainer.do(collect_from_each, 2, 4)
    # One of its batches had been begun before the change, and another one before the push that came with that.
    assert [batch.actions for batches in found.values() for batch in batches[2:4]] == [[2.0]] * 4
    assert trainer.do(version) == 1 + sum(map(len, found.values()))


@pytest.mark.parametrize("sync", [True, False])
def test_max_weight_update_interval_does_not_raise(start: Start, sync: bool) -> None:
    """torchrl addresses nobody then, so nothing is pushed; a push by the user still works. Mutant: take an empty
    list for everybody."""
    trainer = start(max_weight_update_interval=1, sync=sync, workers=1)
    trainer.do(collect, 3)
    assert trainer.do(version) == 1
    trainer.do(push, 2.0)
    assert trainer.do(collect, 2).actions == [2.0]


def test_during_random_frames_a_notification_switches_by_itself(start: Start) -> None:
    """They make no forward, so no gate would ever switch. Mutant: wait for a forward whenever `next` runs."""
    trainer = start(init_random_frames=10**5, frames=200)
    answers = trainer.do(push_while_collecting, 20)
    assert len(answers) >= 20
    assert [answer for answer in answers if answer[0] != answer[1]] == []
    assert trainer.do(values) == [answers[-1][0]] * 2


def push_while_collecting(world: SimpleNamespace, pushes: int) -> list[Any]:
    """For each worker's answer to each push: the version that was pushed, and the one that the worker then used."""
    answers: list[Any] = []

    def step() -> None:
        report = push(world, world.updater.version + 1)
        answers.extend((report.version, worker.in_use) for worker in report.workers.values())

    with Background(step) as pushing:
        deadline = time.monotonic() + 60
        while pushing.steps < pushes and time.monotonic() < deadline:
            assert seen_in(next(world.batches)).actions != [1.0]
    return answers


def test_after_random_frames_the_first_forward_uses_the_newest_version(start: Start) -> None:
    """Pushed while there was no forward. Mutant: let the gate sleep until the next notification."""
    trainer = start(init_random_frames=40, frames=40)
    assert 7.0 not in trainer.do(collect).actions
    report = trainer.do(push, 5.0)
    batch = trainer.do(collect)
    assert (batch.actions, batch.versions) == ([5.0], [report.version])


def by_memory() -> RPCWeightUpdater:
    return RPCWeightUpdater(notify="memory")


def test_with_notify_memory_values_arrive_and_nothing_is_confirmed(start: Start) -> None:
    """The next batch has them, stamped. Mutant: say that the workers have confirmed."""
    trainer = start(updater=by_memory)
    assert trainer.do(collect).actions == [7.0]
    trainer.do(push, 1.0)  # may still attach
    report = trainer.do(push, 2.0)
    assert {w: r.status for w, r in report.workers.items()} == {0: "not confirmed", 1: "not confirmed"}
    assert report.notification_nbytes == 0
    batch = trainer.do(collect)
    assert (batch.actions, batch.versions) == ([2.0], [report.version])
    assert trainer.do(push, 3.0, worker_ids=[1]).workers[1].status == "not confirmed"
    assert trainer.do(collect).actions == [2.0, 3.0]


def test_the_lag_counts_versions_that_a_worker_has_not_taken(start: Start) -> None:
    """Of what is addressed to it. Mutant: count from the newest version of all."""
    trainer = start(updater=by_memory)
    trainer.do(push, 1.0)
    trainer.do(collect)
    assert trainer.do(lag) == ({0: 0, 1: 0}, 0, 0.0, 0)
    trainer.do(push, 2.0)
    trainer.do(push, 3.0, worker_ids=[1])
    assert trainer.do(lag) == ({0: 1, 1: 2}, 1, 1.5, 2)
    trainer.do(collect)
    assert trainer.do(lag) == ({0: 0, 1: 0}, 0, 0.0, 0)


def lag(world: SimpleNamespace) -> Any:
    now = world.updater.lag()
    return now.workers, now.min, now.mean, now.max


def bounded() -> RPCWeightUpdater:
    return RPCWeightUpdater(max_lag=1, notify="memory")


def test_the_lag_stays_within_its_bound_while_batches_are_made(start: Start) -> None:
    """Of every worker after every push, though forwards take longer than pushes. Mutant: no look after the push."""
    trainer = start(updater=bounded, sync=False, policy=partial(net_policy, pause=0.05))
    assert max(trainer.do(lags_while_collecting, 20)) == 1


def lags_while_collecting(world: SimpleNamespace, pushes: int) -> list[int]:
    """The largest lag after each push."""
    lags: list[int] = []

    def step() -> None:
        push(world)
        lags.append(world.updater.lag().max)

    with Background(step) as pushing:
        while pushing.steps < pushes:
            collect(world)
    return lags


def test_a_push_while_a_batch_is_made_is_used_by_the_rest_of_it(start: Start) -> None:
    """A batch may span versions, in order, each step with its own stamp. Mutant: switch between batches only."""
    trainer = start(policy=partial(net_policy, value=1.0), sync=False, workers=1, frames=500)
    spanning = wait_for(lambda: (batch := trainer.do(push_into_a_batch)) and len(batch.versions) > 1 and batch, "span")
    assert spanning.actions == [float(version) for version in spanning.versions]


def push_into_a_batch(world: SimpleNamespace) -> Any:
    push(world, world.updater.version + 1)
    return collect(world)


@pytest.mark.parametrize(
    "options",
    [{"notify": "carrier pigeon"}, *({"timeout": wrong} for wrong in (0, -1.0, None, "1", True, 10**400))],
    ids=str,
)
def test_bad_options_are_named(options: dict[str, Any]) -> None:
    """Mutant: take them as they come."""
    ((name, value),) = options.items()
    with pytest.raises(ShmSyncError, match=name) as caught:
        RPCWeightUpdater(**options)
    assert repr(value) in str(caught.value)
