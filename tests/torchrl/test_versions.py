"""One forward, one version, and a stamp that says which: real collectors, under pushes without pause.

The weights of version v are all v, so that a forward that mixes two versions shows it, and so does a wrong stamp.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from tensordict import TensorDictBase
from torchrl.envs import EnvBase, SerialEnv, TransformedEnv

from tests.helpers import collectors, schemes
from tests.helpers.collectors import Background, Corridor, fill, net_policy
from tests.helpers.trainers import Trainer

ENOUGH_VERSIONS, ENOUGH_FRAMES = 40, 400
# torchrl's own, before and after the step, and the one that is asked for.
STAMPS = ("policy_version", ("next", "policy_version"), ("collector", "policy_version"))
# 20 layers, 8 MB in all, and a moment after each layer in which another thread may do harm.
big_policy = partial(net_policy, value=1.0, layers=20, size=100_000, pause=1e-4)


def serial_env() -> EnvBase:
    return TransformedEnv(SerialEnv(3, Corridor))


SETUPS: dict[str, dict[str, Any]] = {
    "Collector, sync": {},
    "Collector, async": {"sync": False},
    "Collector, notify=memory": {"sync": False, "updater": "memory"},
    "Collector of a SerialEnv": {"env": serial_env, "frames": 48},
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


def stream(world: SimpleNamespace, seconds: float, until: str = "") -> SimpleNamespace:
    """Collect while another thread pushes, until there is enough to judge by, or something bad, or the time is over."""
    found = SimpleNamespace(frames=0, mixed=0, misstamped=0, backwards=0, versions=set(), workers=set(), pushes=0)
    last: dict[Any, float] = defaultdict(float)

    def push_next() -> None:
        fill(world.policy, world.updater.version + 1)
        world.updater.push_weights(world.policy)

    deadline = time.monotonic() + seconds
    with Background(push_next) as pushing:
        while time.monotonic() < deadline:
            judge(next(world.batches), found, last)
            enough = len(found.versions) >= ENOUGH_VERSIONS and found.frames >= ENOUGH_FRAMES
            if getattr(found, until) if until else enough:
                break
    found.pushes = pushing.steps
    return found


def judge(data: TensorDictBase, found: SimpleNamespace, last: dict[Any, float]) -> None:
    low, high, process, env, count = (
        data[key].flatten().tolist() for key in ("low", "high", "process", "env", "count")
    )
    stamps = zip(*(data[key].flatten().tolist() for key in STAMPS), strict=True)
    wrong = [{*stamp} != {used} for stamp, used in zip(stamps, low, strict=True)]
    for i in sorted(range(len(low)), key=lambda i: count[i]):
        found.mixed += low[i] != high[i]
        found.misstamped += wrong[i]
        found.backwards += low[i] < last[process[i], env[i]]
        last[process[i], env[i]] = low[i]
    found.frames += len(low)
    found.versions.update(low)
    found.workers.update(process)


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
