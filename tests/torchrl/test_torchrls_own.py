"""What torchrl's own tests of RPCCollector ask for (its test/test_distributed.py), with this updater instead of its."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torchrl.envs.utils import RandomPolicy

from tests.helpers import collectors
from tests.helpers.collectors import Corridor, collect, push
from tests.helpers.trainers import Trainer, wait_for

Start = Callable[..., Trainer]


def random_policy() -> RandomPolicy:
    return RandomPolicy(Corridor().action_spec)


def run_to_the_end(world: SimpleNamespace) -> tuple[list[int], Any]:
    sizes = []
    for data in world.batches:
        sizes.append(data.numel())
    world.collector.shutdown()
    return sizes, data.names[-1]


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize(("frames", "batches"), [(50, 20), (200, 5)])
def test_a_collector_runs_to_its_last_frame(start: Start, sync: bool, frames: int, batches: int) -> None:
    """Every batch has the frames that were asked for, and the run ends at the total, with a policy without weights.
    Mutant: refuse a policy without weights."""
    trainer = start(policy=random_policy, sync=sync, frames=frames, total_frames=1000)
    assert trainer.do(run_to_the_end) == ([frames] * batches, "time")
    assert trainer.end() == 0
    assert "Traceback" not in trainer.output()


CLASSES = ["Collector", "MultiSyncCollector", "MultiAsyncCollector"]


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("sync", [True, False])
def test_an_update_reaches_every_collector_class(start: Start, kind: str, sync: bool) -> None:
    """One worker where a batch may have begun before the update; two otherwise. Both forms of torchrl's call.
    Mutant: inject no receivers, and the first batch has no version."""
    trainer = start(kind=kind, sync=sync, workers=2 if sync else 1, frames=50)
    first = trainer.do(collect)
    assert (first.actions, first.versions) == ([7.0], [1])
    trainer.do(update_through_the_collector, 8.0, True)
    assert trainer.do(collect, 3).actions == [8.0]
    trainer.do(update_through_the_collector, 9.0, False)
    assert trainer.do(collect, 3).actions == [9.0]


def update_through_the_collector(world: SimpleNamespace, value: float, with_policy: bool) -> None:
    collectors.fill(world.policy, value)
    world.collector.update_policy_weights_(*([world.policy] if with_policy else []))


@pytest.mark.parametrize("kind", CLASSES)
def test_spawned_workers_are_updated_and_leave_nothing(start: Start, kind: str) -> None:
    """torchrl's own way of starting processes; shutdown leaves no process behind, and no complaint. Mutant: a
    receiver that does not survive pickling."""
    trainer = start("spawn", kind=kind, workers=1, frames=50)
    assert trainer.do(collect).actions == [7.0]
    trainer.do(push, 8.0)
    assert trainer.do(collect, 3).actions == [8.0]
    trainer.do(collectors.shut_down)
    assert trainer.end() == 0
    wait_for(lambda: not trainer.processes(), "the end of all processes")
    assert "Traceback" not in trainer.output()
    assert "Warning" not in trainer.output()


@pytest.mark.parametrize("sync", [True, False])
def test_next_needs_no_iterator(start: Start, sync: bool) -> None:
    """`collector.next()` without `iter()`, and an update between two of them. Mutant: wrap `next` so that it
    forgets its result."""
    trainer = start(sync=sync, workers=1)
    assert trainer.do(next_batch).actions == [7.0]
    trainer.do(push, 8.0)
    trainer.do(next_batch)
    assert trainer.do(next_batch).actions == [8.0]


def next_batch(world: SimpleNamespace) -> Any:
    return collectors.seen_in(world.collector.next())
