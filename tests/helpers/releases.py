"""The installed torchrl: which release it is, what its collectors are called, and what it must offer."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

# What shmsync promises with a release, and so what a test there may not leave out:
# "updater": weight_updater=RPCWeightUpdater; "schemes": weight_sync_schemes=, and workers that are bound before their
# first forward; "stamps": torchrl's policy version on each step; "names": schemes by the name of a backend.
OFFERED: dict[str, set[str]] = {
    "0.9": {"updater"},
    "0.10": {"updater"},
    "0.11": {"updater", "schemes"},
    "0.12": {"updater", "schemes"},
    "0.13": {"updater", "schemes", "stamps"},
    "0.14": {"updater", "schemes", "stamps", "names"},
}
# Before torchrl 0.11.
_EARLIER_NAMES = {
    "Collector": "SyncDataCollector",
    "MultiSyncCollector": "MultiSyncDataCollector",
    "MultiAsyncCollector": "MultiaSyncDataCollector",
    "RPCCollector": "RPCDataCollector",
}


def release() -> str:
    """Major and minor number."""
    return ".".join(version("torchrl").split(".")[:2])


def offered() -> set[str]:
    """What is promised with this release: nothing with one that is too old, of a newer one what the newest has."""
    number, newest = release(), max(OFFERED, key=_numbers)
    return OFFERED[newest] if _numbers(number) > _numbers(newest) else OFFERED.get(number, set())


def _numbers(name: str) -> list[int]:
    return [int(part) for part in name.split(".")]


def named(module: Any, name: str) -> Any:
    """A collector class by the name that it has today."""
    return getattr(module, name, None) or getattr(module, _EARLIER_NAMES[name])


def tracking() -> dict[str, Any]:
    """The argument of a worker's collector by which each step gets its policy version, where that works."""
    return {"track_policy_version": True} if "stamps" in offered() else {}
