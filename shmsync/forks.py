"""Forks: every publisher and subscriber is told before and after one that Python makes.

Open file descriptions are shared with a child, and so are their locks: without this, a parent's leases would live as
long as any child, and a child would have none of its own.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Forkable(Protocol):
    """Something that holds kernel locks or threads' locks."""

    def try_before_fork(self) -> bool:
        """Come to a state that can be copied, and hold it; False, and nothing held, if that takes too long now."""

    def after_fork_in_parent(self) -> None:
        """Go on."""

    def after_fork_in_child(self) -> None:
        """Be another one than in the parent."""


# How long a fork waits for one lock before it lets go of all: whoever holds that one may be waiting for another.
PATIENCE_SECONDS = 0.05
_PAUSE_SECONDS = 0.001
_AFTER_SECONDS = 0.1

# While something is being made it has descriptors and locks that nobody would tell of a fork.
_making = threading.RLock()
_known: weakref.WeakSet[Forkable] = weakref.WeakSet()
_forking: list[Forkable] = []
_holding = False  # _making, for a fork
_interrupted: BaseException | None = None


@contextmanager
def making() -> Iterator[None]:
    """A block in which other threads don't fork: what is made in it is watched at its end."""
    with _making:
        yield


def watch(one: Forkable) -> None:
    """Tell `one` of forks from now on. Contract: keeps nothing alive."""
    _known.add(one)


def forget(one: Forkable) -> None:
    """Tell it of no fork any more."""
    _known.discard(one)


def _before() -> None:
    """Hold everything. An exception here would not stop the fork, only leave it without protection: so a signal
    handler's is put off."""
    global _interrupted
    held = False
    while not held:
        try:
            held = _hold_all()
            if not held:
                time.sleep(_PAUSE_SECONDS)
        except BaseException as error:
            _interrupted = error
            _let_go()
            held = False


def _hold_all() -> bool:
    global _holding
    if not _making.acquire(timeout=PATIENCE_SECONDS):
        return False
    _holding = True
    for one in list(_known):
        if not one.try_before_fork():
            _let_go()
            return False
        _forking.append(one)
    return True


def _let_go() -> None:
    global _holding
    while _forking:
        _forking.pop().after_fork_in_parent()
    if _holding:
        _holding = False
        _making.release()


def _in_parent() -> None:
    global _interrupted
    _let_go()
    error, _interrupted = _interrupted, None
    if isinstance(error, KeyboardInterrupt):
        # After the hooks of everybody else too: they would swallow it. Not by SIGINT, which may be ignored here.
        threading.Timer(_AFTER_SECONDS, _interrupt, (threading.get_ident(),)).start()
    elif error is not None:
        raise error


def _interrupt(thread: int) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(KeyboardInterrupt))


def _in_child() -> None:
    global _making, _holding, _interrupted
    _making, _holding, _interrupted = threading.RLock(), False, None
    failed: BaseException | None = None
    while _forking:
        try:
            _forking.pop().after_fork_in_child()
        except BaseException as error:  # the others are still locked
            failed = failed or error
    if failed is not None:
        raise failed


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
