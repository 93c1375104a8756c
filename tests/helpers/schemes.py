"""Collectors that get their weights by shmsync's weight-sync schemes, built in a trainer (tests.helpers.trainers)."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torchrl.collectors
import torchrl.collectors.distributed.rpc as rpc_module

import shmsync
from tests.helpers import releases
from tests.helpers.collectors import Corridor, RPCCollector, fill, free_port, net_policy


class Pusher:
    """The scheme of a world, as an updater that pushes through the collector."""

    def __init__(self, world: SimpleNamespace) -> None:
        self._world = world

    @property
    def version(self) -> int:
        return self._world.scheme.version

    def push_weights(self, weights: Any) -> None:
        self._world.collector.update_policy_weights_(weights)


def build_rpc(
    world: SimpleNamespace,
    policy: Callable[[], Any] = net_policy,
    *,
    kind: str = "Collector",
    factory: Callable[[], Any] | None = None,
    with_policy: bool = True,
    sync: bool = True,
    workers: int = 2,
    collector_kwargs: dict[str, Any] | None = None,
    num_workers_per_collector: int = 1,
    total_frames: int = 10**6,
    env: Any = Corridor,
    **options: Any,
) -> None:
    """An RPCCollector with shmsync's scheme, of those options."""
    rpc_module.time = SimpleNamespace(sleep=lambda seconds: time.sleep(seconds / 100))
    world.policy = policy()
    world.scheme = shmsync.RPCWeightSyncScheme(**options)
    world.collector = RPCCollector(
        env if isinstance(env, list) else [env] * workers,
        world.policy if with_policy else None,
        policy_factory=factory,
        collector_class=releases.named(torchrl.collectors, kind),
        weight_sync_schemes={"policy": world.scheme},
        frames_per_batch=20,
        total_frames=total_frames,
        sync=sync,
        launcher="mp",
        num_workers_per_collector=num_workers_per_collector,
        tcp_port=free_port(),
        collector_kwargs={**releases.tracking(), **(collector_kwargs or {})},
    )
    world.batches, world.updater = iter(world.collector), Pusher(world)


def build_multi(
    world: SimpleNamespace,
    policy: Callable[[], Any] = net_policy,
    *,
    kind: str,
    factory: Any = None,
    workers: int = 2,
    **options: Any,
) -> None:
    """A collector with processes of its own, with shmsync's scheme, of those options."""
    world.policy = policy()
    world.scheme = shmsync.SharedMemWeightSyncScheme(**options)
    world.collector = releases.named(torchrl.collectors, kind)(
        [Corridor] * workers,
        None if factory else world.policy,
        policy_factory=factory,
        weight_sync_schemes={"policy": world.scheme},
        frames_per_batch=20,
        total_frames=10**6,
        **releases.tracking(),
    )
    world.batches, world.updater = iter(world.collector), Pusher(world)


def push(world: SimpleNamespace, value: float, worker_ids: Any = None) -> int:
    """Give the trainer's policy a value and send it; the version."""
    fill(world.policy, value)
    world.collector.update_policy_weights_(world.policy, worker_ids=worker_ids)
    return int(world.scheme.version)


def push_the_trainers(world: SimpleNamespace, value: float) -> int:
    """The same without saying what: the collector knows its policy."""
    fill(world.policy, value)
    world.collector.update_policy_weights_()
    return int(world.scheme.version)
