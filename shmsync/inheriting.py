"""A fork in a subscriber's life: the child goes on as a subscriber of its own, with the same leases.

It is not the worker that its parent may be: nobody waits for it, and what it uses is no worker's lag. Who forks, an
environment that starts a simulator, say, seldom knows of any weights.
"""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

from . import forks, segment
from .errors import SubscribersExhausted
from .leases import Locks
from .pages import PrivatePages

if TYPE_CHECKING:
    from .binding import Binding
    from .subscriber import Subscriber


class Fork:
    """What a fork holds of one subscriber: its locks, those of its bindings, and the child's leases.

    ``locks``: another description of CTL on which the leased slots are locked too: the child's, and gone in the parent
    when both have let go of it. None if the subscriber has ended.
    """

    def __init__(self) -> None:
        self.bindings: list[Binding] = []
        self.locks: Locks | None = None


def try_before_fork(subscriber: Subscriber) -> bool:
    """As forks.Forkable.try_before_fork."""
    seconds = forks.PATIENCE_SECONDS
    with ExitStack() as held:
        if not subscriber._life.acquire(timeout=seconds):
            return False
        held.callback(subscriber._life.release)
        fork = subscriber._fork = Fork()
        # No switch is going on anywhere: it would have a lease that nobody in the child could end.
        fork.bindings = list(subscriber._bindings)
        for binding in fork.bindings:
            if not binding.try_before_fork(seconds):
                return False
            held.callback(binding.after_fork_in_parent)
        if not subscriber._mutex._is_owned() and not subscriber._mutex.acquire(timeout=seconds):
            return False
        held.callback(subscriber._leave)
        if subscriber._end.alive:
            fork.locks = Locks(segment.reopen(subscriber._locks.fd, os.O_RDONLY))
            held.callback(fork.locks.close)
            for slot in subscriber._data.holder.counts if subscriber._data else ():
                fork.locks.try_shared(slot)
        held.pop_all()
        return True


def in_parent(subscriber: Subscriber) -> None:
    """The child has the description, so it is closed here."""
    fork, subscriber._fork = subscriber._fork, Fork()
    if fork.locks is not None:
        fork.locks.close()
    subscriber._leave()
    for binding in fork.bindings:
        binding.after_fork_in_parent()
    subscriber._life.release()


def in_child(subscriber: Subscriber) -> None:
    """Go on as a subscriber of its own, with the same leases and a line of its own."""
    fork, subscriber._fork = subscriber._fork, Fork()
    subscriber._mutex, subscriber._life, subscriber._pid = threading.RLock(), threading.RLock(), os.getpid()
    for binding in fork.bindings:
        binding.after_fork_in_child()
    if subscriber._ctl is not None:
        subscriber._ctl.leave_to_parent()  # it would keep the parent's line after the parent's death
    if fork.locks is None:
        return
    subscriber._end.detach()
    subscriber._locks.close()
    subscriber._locks, subscriber._written.pages = fork.locks, PrivatePages()
    subscriber._own()
    subscriber._forget_ctl()
    subscriber._counted = False
    if subscriber._imports is not None:
        subscriber._imports.abandon()  # a child has no use of its parent's devices
    with subscriber._locked():  # the parent's streams are nobody's here
        subscriber._released.extend(subscriber._passing.give_up())
        subscriber._pass_due = False
    if subscriber._open:
        try:
            subscriber._join(subscriber._listed)
        except SubscribersExhausted:  # a line more or less: it has its leases
            subscriber._listed = False
            subscriber._join(listed=False)
        if subscriber._line is not None and subscriber._used:
            subscriber._line.switched(subscriber._used)  # for whoever looks who holds a slot
