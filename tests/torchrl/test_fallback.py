"""`fallback="rpc"` with real collectors: worker 1 of two takes itself to be on another host from the beginning."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from shmsync import RPCWeightSyncScheme, RPCWeightUpdater, ShmSyncError
from tests.helpers.collectors import Corridor, ask, collect_from_each, fill, net_policy, push, version_of
from tests.helpers.trainers import Trainer

Start = Callable[..., Trainer]


class Elsewhere:
    """Makes environments; the process to which it is sent takes itself to be on another host."""

    def __init__(self) -> None:
        self.home = os.getpid()

    def __call__(self) -> Corridor:
        return Corridor()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if os.getpid() != self.home:
            from shmsync import handle

            handle._boot_id = lambda: "another-host"


def updater() -> RPCWeightUpdater:
    return RPCWeightUpdater(fallback="rpc", timeout=30.0)


def start_apart(world: SimpleNamespace, **options: Any) -> None:
    """As `build`, with its second worker on another host."""
    from tests.helpers.collectors import build

    build(world, env=[Corridor, Elsewhere()], updater=updater, frames=40, **options)


def bound_versions(world: SimpleNamespace) -> list[int]:
    return [ask(world, worker, version_of) for worker in range(2)]


def ways(world: SimpleNamespace, value: float) -> Any:
    report = push(world, value)
    return {w: (r.via, r.in_use, r.error) for w, r in report.workers.items()}


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("factory", [None, net_policy])
def test_a_collector_on_another_host_is_updated(start: Start, sync: bool, factory: Any) -> None:
    """It starts, though it can't map what the others start with, and every push reaches it, with its version on the
    steps. Mutants: let its construction fail; leave the version to torchrl's counter."""
    trainer = start(build=start_apart, sync=sync, factory=factory)
    assert {action for one in trainer.do(collect_from_each, 2, 1).values() for b in one for action in b.actions} == {7}
    for value in (2.0, 3.0):
        found = trainer.do(ways, value)  # worker 0 may be in the middle of a forward then
        version = found[1][1]
        assert [(way, error) for way, _, error in found.values()] == [("map", None), ("rpc", None)]
        found = trainer.do(collect_from_each, 2, 3)
        assert [(batches[-1].actions, batches[-1].versions) for batches in found.values()] == [([value], [version])] * 2
    assert trainer.do(bound_versions) == [version, 0]
    assert trainer.output().count("can't map the channel") == 1


@pytest.mark.parametrize("factory", [None, net_policy])
def test_inner_processes_on_another_host_are_updated(start: Start, factory: Any) -> None:
    """By torchrl's own way from their collector on; those of the other worker map. Mutant: a receiver there."""
    trainer = start(build=start_apart, kind="MultiSyncCollector", factory=factory)
    trainer.do(collect_from_each, 2, 1)
    for value in (2.0, 3.0):
        ways_now = trainer.do(ways, value)
        assert [(way, error) for way, _, error in ways_now.values()] == [("map", None), ("rpc", None)]
        found = trainer.do(collect_from_each, 2, 3)
        assert [batches[-1].actions for batches in found.values()] == [[value]] * 2


def start_scheme_apart(world: SimpleNamespace, **options: Any) -> None:
    """As `start_apart`, with the scheme of that name."""
    from tests.helpers.schemes import build_rpc

    build_rpc(world, env=[Corridor, Elsewhere()], fallback="rpc", timeout=30.0, **options)
    world.updater = world.scheme


def scheme_ways(world: SimpleNamespace, value: float) -> Any:
    fill(world.policy, value)
    world.collector.update_policy_weights_(world.policy)
    return {w: (r.via, r.error) for w, r in world.scheme.last_push.workers.items()}


@pytest.mark.parametrize("kind", ["Collector", "MultiSyncCollector"])
def test_the_scheme_reaches_them_too(start: Start, kind: str) -> None:
    """Mutant: a receiver that maps, or fails, in each process."""
    trainer = start(build=start_scheme_apart, kind=kind)
    trainer.do(collect_from_each, 2, 1)
    for value in (2.0, 3.0):
        assert trainer.do(scheme_ways, value) == {0: ("map", None), 1: ("rpc", None)}
        found = trainer.do(collect_from_each, 2, 3)
        assert [batches[-1].actions for batches in found.values()] == [[value]] * 2


def test_models_together_can_not_fall_back() -> None:
    with pytest.raises(ShmSyncError, match="must map it: leave fallback="):
        RPCWeightSyncScheme.together("policy", "env.value_net", fallback="rpc")
