"""The sweep: a look, off the path of any push, whether a worker wrote into a slot that it has left.

The scan for private pages touches the kernel's record of every page, 2 ms for 100 MB. Right after a switch nobody needs
its result, so it is made then, on a thread of its own, a moment later; the next lease of a slot that was found clean,
and that nothing could have written to since, needs none.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

# Long enough for the other workers of the machine to have switched too: they need the processors now.
DELAY_SECONDS = 0.01


class _Sweeper:
    def __init__(self) -> None:
        self._due: queue.SimpleQueue[tuple[float, weakref.WeakMethod[Any], int]] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, method: Callable[[int], None], slot: int) -> None:
        self._due.put((time.monotonic() + DELAY_SECONDS, weakref.WeakMethod(method), slot))
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._serve, name="shmsync-sweep", daemon=True)
                    self._thread.start()

    def _serve(self) -> None:
        while True:
            due, method, slot = self._due.get()
            time.sleep(max(0.0, due - time.monotonic()))
            _call(method, slot)


def _call(method: weakref.WeakMethod[Any], slot: int) -> None:
    sweep = method()
    if sweep is not None:
        sweep(slot)


_sweeper = _Sweeper()


def later(method: Callable[[int], None], slot: int) -> None:
    """Call `method(slot)` soon, on the process's sweeping thread. Contract: takes microseconds; does not keep the
    method's object alive; the method must not raise."""
    _sweeper.put(method, slot)


def _in_child() -> None:
    global _sweeper
    _sweeper = _Sweeper()  # the thread is the parent's


os.register_at_fork(after_in_child=_in_child)
