"""Forks: every publisher and subscriber is told before and after one that Python makes.

Open file descriptions are shared with a child, and so are their locks: without this, a parent's leases would live as
long as any child, and a child would have none of its own.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forkable(Protocol):
    """Something that holds kernel locks or threads' locks."""

    def before_fork(self) -> None:
        """Come to a state that can be copied, and hold it."""

    def after_fork_in_parent(self) -> None:
        """Go on."""

    def after_fork_in_child(self) -> None:
        """Be another one than in the parent."""


_known: weakref.WeakSet[Forkable] = weakref.WeakSet()
_forking: list[Forkable] = []


def watch(one: Forkable) -> None:
    """Tell `one` of forks from now on. Contract: keeps nothing alive."""
    _known.add(one)


def _before() -> None:
    _forking[:] = list(_known)
    for one in _forking:
        one.before_fork()


def _in_parent() -> None:
    while _forking:
        _forking.pop().after_fork_in_parent()


def _in_child() -> None:
    while _forking:
        _forking.pop().after_fork_in_child()


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
