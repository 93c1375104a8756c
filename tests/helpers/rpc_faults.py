"""Workers of plain RPC that fail, hang or die: what a trainer does then, and what it sees. Run in the trainer."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from tests.helpers.rpc_worlds import ask, bound_version, everywhere, own, pid_of, push, updater, weights_of

TIMEOUT = 2.0


def start(world: SimpleNamespace, **options: Any) -> list[int]:
    """Workers at version 1, with the value 1; their pids."""
    own(world)
    updater(world, timeout=TIMEOUT, **options)
    push(world, 1.0)
    return everywhere(world, pid_of)


def outcome(world: SimpleNamespace, value: float | None, **options: Any) -> tuple[Any, float]:
    """The error of a push, and how long the push took in seconds. value None: of `close()`."""
    begin = time.monotonic()
    error = None
    try:
        if value is None:
            world.updater.close()
        else:
            push(world, value, **options)
    except Exception as caught:
        error = caught
    return error, time.monotonic() - begin


def look(world: SimpleNamespace, worker: int) -> tuple[Any, int]:
    return ask(world, worker, weights_of), ask(world, worker, bound_version)


def report(world: SimpleNamespace) -> dict[int, Any]:
    return {w: r.in_use for w, r in world.updater.last_push.workers.items()}
