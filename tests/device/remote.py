"""What the tests of devices let other processes do. Every function takes the process's `state` first."""

from __future__ import annotations

import gc
import time
from typing import Any

import shmsync
from shmsync import device
from tests.device.support import OVERWRITTEN, Reader, fill, policy, values
from tests.fakes.torch_side import install


def begin(state: Any, options: dict[str, Any]) -> None:
    """Have the fake in this process."""
    state.side = install(**options)


def attach(state: Any, handle: str, index: int, mode: str = "auto") -> int:
    state.reader = Reader(state.side, handle, index, mode)
    return state.reader.binding.version


def forward(state: Any) -> tuple[int, set[int], str]:
    """One forward to its end: the version that it used, the bytes that it saw, and the binding's mode."""
    version = state.reader.forward()
    state.side.fake.drain()
    _, seen = state.reader.forwards.pop()
    return version, values(seen), state.reader.binding.mode


def stats(state: Any) -> dict[str, int]:
    return state.reader.subscriber.stats()


def read(state: Any, seconds: float) -> tuple[int, int, list[str]]:
    """Forwards without a pause, until told to stop: how many, of how many versions, and what was wrong."""
    end = time.monotonic() + seconds
    count, seen_versions, wrong, last = 0, set(), [], 0
    while state.told() is None and time.monotonic() < end:
        for _ in range(4):
            seen_versions.add(state.reader.forward())
        state.side.fake.drain()
        wrong += state.reader.wrong()
        versions = [version for version, _ in state.reader.forwards]
        wrong += [f"went back to {versions[0]} from {last}"] if versions[0] < last else []
        last, count = versions[-1], count + len(versions)
        state.reader.forwards.clear()
    return count, len(seen_versions), wrong[:5]


def detach(state: Any) -> tuple[dict[str, int], list[str]]:
    """Let go of the channel; what this process still has of the fake's after that, and what it did wrong."""
    state.reader.close()
    del state.reader
    gc.collect()
    state.side.fake.drain()
    state.side.forget_streams()
    counts = state.side.fake.counts()
    return {what: count for what, count in counts.items() if count and what != "contexts"}, state.side.fake.violations()


def counts(state: Any) -> dict[str, int]:
    return state.side.fake.counts()


def train(state: Any, index: int) -> str:
    """Be a trainer; the handle's text."""
    state.trainer = policy(state.side, index)
    state.publisher = shmsync.Publisher(state.trainer)
    return str(state.publisher.handle)


def publish(state: Any, version: int, wait: bool = True) -> dict[str, int]:
    fill(state.side, state.trainer, version)
    state.publisher.publish(wait=wait)
    if not wait:
        fill(state.side, state.trainer, OVERWRITTEN)
        state.publisher.wait()
    return state.publisher.stats()


def publish_until_told(state: Any, version: int) -> int:
    """Publish one version after the other; the last one."""
    while state.told() is None and version < 240:
        publish(state, version, wait=version % 2 == 0)
        version += 1
    return version - 1


def end_training(state: Any) -> tuple[dict[str, int], list[str]]:
    state.publisher.close()
    del state.publisher, state.trainer
    gc.collect()
    shmsync.rings.sweep_parked()
    state.side.fake.drain()
    state.side.forget_streams()
    counts = state.side.fake.counts()
    return {what: count for what, count in counts.items() if count and what != "contexts"}, state.side.fake.violations()


def give_back(state: Any) -> None:
    """Have the publisher try to free all of its device memory but the live slots."""
    store = state.publisher._store
    for ring in store.rings._devices.values():
        ring.wanted = False
        ring.reclaim(store._live())


def break_rule(state: Any, rule: str) -> None:
    """A mutant: a guard of this process is off from now on."""
    from shmsync import imports, leases

    if rule == "a slot is opened once":
        view = imports.Imports.view

        def again(self: Any, *args: Any) -> Any:
            state.kept = [*getattr(state, "kept", []), *self._mapped.values()]
            self._mapped.clear()
            imports._owners.clear()
            return view(self, *args)

        imports.Imports.view = again  # type: ignore[method-assign]
    elif rule == "mapped memory is not freed":
        leases.Locks.try_free = lambda self, ring, slot: True  # type: ignore[method-assign]
    else:
        raise ValueError(rule)


def host_context(state: Any) -> tuple[int, bool]:
    """How many contexts this process has, and whether it ever looked for a runtime."""
    return state.side.fake.count("contexts"), device.reason() is None
