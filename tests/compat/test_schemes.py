"""`weight_sync_schemes=` on the installed torchrl release, with real collectors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest

from tests.compat.support import judge, short_stream, stamps, warned_of_deprecation
from tests.helpers.collectors import collect, collect_from_each, net_policy
from tests.helpers.schemes import build_multi, build_rpc, push, push_the_trainers
from tests.helpers.streams import big_policy
from tests.helpers.trainers import Trainer

Start = Callable[..., Trainer]
zeros = partial(net_policy, value=0.0)
INNER = ("MultiSyncCollector", "MultiAsyncCollector")


def shut_down(world: SimpleNamespace) -> None:
    world.collector.shutdown()
    world.scheme.shutdown()


def settled(world: SimpleNamespace, processes: int, begun: int) -> dict[int, list[float]]:
    """By process, the actions of its last batch; it has begun `begun` before now."""
    return {process: batches[-1].actions for process, batches in collect_from_each(world, processes, begun + 1).items()}


def test_rpc_collectors(start: Start) -> None:
    """From the first batch to a subset, and what a stream of pushes shows. Mutants: attach at the first push only;
    store row 0 for a subset; bind without a gate."""
    trainer = start(build=build_rpc, policy=big_policy, stamp_steps=True)
    first = trainer.do(collect)
    assert (first.actions, first.versions) == ([1.0], stamps(1))
    assert trainer.do(push, 2.0) == 2
    batch = trainer.do(collect)
    assert (batch.actions, batch.versions) == ([2.0], stamps(2))
    assert trainer.do(push_the_trainers, 3.0) == 3
    assert trainer.do(collect).actions == [3.0]
    trainer.do(push, 4.0, [1])
    assert sorted(trainer.do(settled, 2, 0).values()) == [[3.0], [4.0]]
    assert trainer.do(push, 5.0) == 5
    trainer.do(collect)
    judge(trainer.do(short_stream))
    assert trainer.do(warned_of_deprecation) == []
    trainer.do(shut_down)


@pytest.mark.parametrize(
    ("kind", "sync"), [("Collector", False), ("MultiSyncCollector", True), ("MultiAsyncCollector", False)]
)
def test_rpc_collectors_of_other_kinds(start: Start, kind: str, sync: bool) -> None:
    """Mutant: pass nothing to inner processes."""
    trainer = start(build=build_rpc, policy=big_policy, stamp_steps=True, kind=kind, sync=sync)
    first = trainer.do(collect)
    assert (first.actions, first.versions) == ([1.0], stamps(1))
    judge(trainer.do(short_stream))


def test_factory_workers_begin_with_the_weights_of_the_trainers(start: Start) -> None:
    """Of the policy that the trainer makes by the same factory, if it has none. Mutant: publish nothing at
    connect()."""
    trainer = start(build=build_rpc, factory=partial(net_policy, value=3.0), with_policy=False)
    first = trainer.do(collect)
    assert (first.actions, first.versions) == ([3.0], stamps(1))


@pytest.mark.parametrize("kind", INNER)
def test_collectors_with_processes(start: Start, kind: str) -> None:
    """Mutant: make plain tensors of what torchrl sends without values."""
    trainer = start(build=build_multi, policy=big_policy, stamp_steps=True, kind=kind)
    first = trainer.do(collect)
    assert (first.actions, first.versions) == ([1.0], stamps(1))
    judge(trainer.do(short_stream))
    assert trainer.do(push, 10.0) == trainer.do(push, 11.0, [1]) - 1
    assert sorted(trainer.do(settled, 2, 2).values()) == [[10.0], [11.0]]
    assert trainer.do(warned_of_deprecation) == []
    trainer.do(shut_down)
