"""One forward, one version, and a stamp that says which: real collectors, under pushes without pause.

The weights of version v are all v, so that a forward that mixes two versions shows it, and so does a wrong stamp.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from torchrl.envs import EnvBase, SerialEnv, TransformedEnv

from tests.helpers import collectors, schemes
from tests.helpers.collectors import Corridor
from tests.helpers.streams import ENOUGH_FRAMES, ENOUGH_VERSIONS, STAMPS, big_policy, stream
from tests.helpers.trainers import Trainer


def serial_env() -> EnvBase:
    return TransformedEnv(SerialEnv(3, Corridor))


SETUPS: dict[str, dict[str, Any]] = {
    "Collector, sync": {},
    "Collector, async": {"sync": False},
    "Collector, notify=memory": {"sync": False, "updater": "memory"},
    "Collector of a SerialEnv": {"env": serial_env, "frames": 48},
    # torchrl's tracker is copied into another transform then.
    "Collector, max_frames_per_traj": {"max_frames_per_traj": 7},
    "MultiSyncCollector": {"kind": "MultiSyncCollector", "workers": 1, "num_workers_per_collector": 2},
    "MultiAsyncCollector": {"kind": "MultiAsyncCollector", "workers": 1, "num_workers_per_collector": 2, "sync": False},
    "RPCWeightSyncScheme": {"scheme": "rpc"},
    "RPCWeightSyncScheme, async": {"scheme": "rpc", "sync": False},
    "RPCWeightSyncScheme, MultiSyncCollector": {
        **{"scheme": "rpc", "kind": "MultiSyncCollector", "workers": 1, "num_workers_per_collector": 2},
    },
    "SharedMemWeightSyncScheme, MultiSyncCollector": {"scheme": "shared", "kind": "MultiSyncCollector"},
    "SharedMemWeightSyncScheme, MultiAsyncCollector": {"scheme": "shared", "kind": "MultiAsyncCollector"},
}


def build(
    world: SimpleNamespace, updater: str = "rpc", pause: float = 1e-4, scheme: str | None = None, **options: Any
) -> None:
    import shmsync

    policy = partial(big_policy, pause=pause)
    if scheme is not None:
        make = schemes.build_rpc if scheme == "rpc" else schemes.build_multi
        make(world, policy, stamp_steps=True, **options)
        return
    collectors.build(world, policy, updater=shmsync.RPCWeightUpdater(notify=updater, stamp_steps=True), **options)


@pytest.fixture
def start(start: Callable[..., Trainer]) -> Callable[..., Trainer]:
    return partial(start, build=build)


@pytest.mark.parametrize("setup", SETUPS)
def test_no_forward_mixes_versions_and_each_step_has_the_stamp_of_its_forward(start: Any, setup: str) -> None:
    """Versions never go back in an environment's steps. The mutants are the two tests below."""
    found = start(**SETUPS[setup]).do(stream, 60.0)
    assert found.frames >= ENOUGH_FRAMES
    assert len(found.versions) >= ENOUGH_VERSIONS
    assert len(found.workers) == 2
    assert found.stamps == set(STAMPS)
    assert (found.mixed, found.misstamped, found.backwards) == (0, 0, 0)


def env_without_leases() -> EnvBase:
    """In the worker: a lease is believed, but no lock is taken."""
    from shmsync.leases import Locks

    Locks.try_shared = lambda self, slot: True
    return Corridor()


def env_without_gate() -> EnvBase:
    """In the worker: a notification switches at once, whatever is going on."""
    from shmsync.gate import Gate
    from shmsync.torchrl.collector import CollectorAttachment

    def notified(self: Any) -> tuple[int, int]:
        self._binding.refresh()
        return self._binding.version, self._subscriber.seen

    CollectorAttachment.notified = notified
    Gate.enter, Gate.leave = lambda self: True, lambda self, depth: None
    return Corridor()


def env_stamped_at_the_switch() -> EnvBase:
    """In the worker: the stamp is set by the notification, not by the forward."""
    from shmsync.torchrl.collector import CollectorAttachment

    notified = CollectorAttachment.notified

    def stamping(self: Any) -> tuple[int, int]:
        self._stamps.set(self._subscriber.seen)
        return notified(self)

    CollectorAttachment.notified = stamping
    return Corridor()


@pytest.mark.parametrize("env", [env_without_leases, env_without_gate])
def test_with_the_guard_off_forwards_do_mix(start: Any, env: Callable[[], EnvBase]) -> None:
    """So the test above can fail: without the lock behind a lease, or with switches in the middle of a forward."""
    # A forward that takes as long as several pushes: a slot is written again only at the second push after its own.
    assert start(env=env, pause=1e-2).do(stream, 60.0, "mixed").mixed > 0


def test_a_stamp_that_is_set_at_the_switch_is_wrong(start: Any) -> None:
    """So the stamps above can fail: they are set at the entry of the forward, and nowhere else."""
    found = start(env=env_stamped_at_the_switch).do(stream, 30.0, "misstamped")
    assert found.misstamped > 0
    assert found.mixed == 0
