"""Serving wishes between pushes: a subscriber that comes late, or to another memory, gets what is published already.

Only a channel with device rings needs it: without them, everything is on the host.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable

from .bell import Bell

_log = logging.getLogger("shmsync")
# How often a publisher that nobody refers to any more is found out.
_LOOK_SECONDS = 1.0


def serve(calls: Bell, bring: Callable[[], bool]) -> threading.Thread:
    """Call `bring()` on a thread of its own after each call of a subscriber, until it says that all is over.

    ``bring``: a method. Contract: the thread does not keep its object alive, nor the process.
    """
    method = weakref.WeakMethod(bring)
    thread = threading.Thread(target=_serve, args=(calls, calls.count, method), name="shmsync-wishes", daemon=True)
    thread.start()
    return thread


def _serve(calls: Bell, heard: int, method: weakref.WeakMethod[Callable[[], bool]]) -> None:
    while _bring(method):
        calls.wait(heard, _LOOK_SECONDS)
        while calls.count == heard and method() is not None:
            calls.wait(heard, _LOOK_SECONDS)
        heard = calls.count


def _bring(method: weakref.WeakMethod[Callable[[], bool]]) -> bool:
    bring = method()
    if bring is None:
        return False
    try:
        return bring()
    except Exception as error:
        # There is nobody to raise it to. The subscriber stays on the version that it has, and the next push is whole.
        text = f"{type(error).__name__}: {error}"
        _log.error("What is published could not be brought to a subscriber that has come late: %s", text)
        return True
