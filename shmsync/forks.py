"""Forks: every publisher and subscriber is told before and after one that Python makes.

Open file descriptions are shared with a child, and so are their locks: without this, a parent's leases would live as
long as any child, and a child would have none of its own.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Forkable(Protocol):
    """Something that holds kernel locks or threads' locks."""

    def before_fork(self) -> None:
        """Come to a state that can be copied, and hold it."""

    def after_fork_in_parent(self) -> None:
        """Go on."""

    def after_fork_in_child(self) -> None:
        """Be another one than in the parent."""


# While something is being made it has descriptors and locks that nobody would tell of a fork.
_making = threading.RLock()
_known: weakref.WeakSet[Forkable] = weakref.WeakSet()
_forking: list[Forkable] = []


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
    _making.acquire()
    _forking[:] = list(_known)
    for one in _forking:
        one.before_fork()


def _in_parent() -> None:
    while _forking:
        _forking.pop().after_fork_in_parent()
    _making.release()


def _in_child() -> None:
    global _making
    _making = threading.RLock()
    while _forking:
        _forking.pop().after_fork_in_child()


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
