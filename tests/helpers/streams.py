"""Batches under pushes without pause, and what they show: forwards that mix versions, and stamps that are wrong.

The weights of version v are all v.
"""

from __future__ import annotations

import time
from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

from tensordict import TensorDictBase

from tests.helpers.collectors import Background, fill, net_policy

# torchrl's own, before and after the step, and the one that is asked for.
STAMPS = ("policy_version", ("next", "policy_version"), ("collector", "policy_version"))
ENOUGH_VERSIONS, ENOUGH_FRAMES = 40, 400
# 20 layers, 8 MB in all, and a moment after each layer in which another thread may do harm.
big_policy = partial(net_policy, value=1.0, layers=20, size=100_000, pause=1e-4)


def stream(
    world: SimpleNamespace,
    seconds: float,
    until: str = "",
    *,
    versions: int = ENOUGH_VERSIONS,
    frames: int = ENOUGH_FRAMES,
) -> SimpleNamespace:
    """Collect while another thread pushes, until there is enough to judge by, or something bad, or the time is over."""
    found = SimpleNamespace(
        frames=0, stamps=set(STAMPS), mixed=0, misstamped=0, backwards=0, versions=set(), workers=set(), pushes=0
    )
    last: dict[Any, float] = defaultdict(float)

    def push_next() -> None:
        fill(world.policy, world.updater.version + 1)
        world.updater.push_weights(world.policy)

    deadline = time.monotonic() + seconds
    with Background(push_next) as pushing:
        while time.monotonic() < deadline:
            judge(next(world.batches), found, last)
            enough = len(found.versions) >= versions and found.frames >= frames
            if getattr(found, until) if until else enough:
                break
    found.pushes = pushing.steps
    return found


def judge(data: TensorDictBase, found: SimpleNamespace, last: dict[Any, float]) -> None:
    """Add what a batch shows to `found`; its `stamps` are those that every batch has had."""
    low, high, process, env, count = (
        data[key].flatten().tolist() for key in ("low", "high", "process", "env", "count")
    )
    found.stamps &= set(data.keys(True))
    stamps = [data[key].flatten().tolist() for key in STAMPS if key in data.keys(True)]
    for i in sorted(range(len(low)), key=lambda i: count[i]):
        found.mixed += low[i] != high[i]
        found.misstamped += any(stamp[i] != low[i] for stamp in stamps)
        found.backwards += low[i] < last[process[i], env[i]]
        last[process[i], env[i]] = low[i]
    found.frames += len(low)
    found.versions.update(low)
    found.workers.update(process)
