"""The end of the interpreter. Daemon threads go on then, for a while, and whatever they raise is printed."""

from __future__ import annotations

import atexit
import threading
import weakref

_over = False


class _Anchor:
    pass


def _note() -> None:
    global _over
    _over = True


# The first finalizer of a process registers all of them to be run at the end. What is registered later runs before.
_anchor = _Anchor()
weakref.finalize(_anchor, _note).atexit = False
atexit.register(_note)


def hold_daemons() -> None:
    """At the end of the interpreter, never return to a daemon thread: it has nobody to tell that something is closed.

    Contract: the caller holds no lock.
    """
    if _over and threading.current_thread().daemon:
        threading.Event().wait()
