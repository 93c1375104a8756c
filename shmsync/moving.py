"""A subscriber's move from one channel to a later one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from . import forks
from .errors import ChannelError, ShmSyncError
from .handle import Handle

if TYPE_CHECKING:
    from .subscriber import Subscriber

_LOOKS, _PAUSE_SECONDS = 50, 0.002
# What a subscriber has of a channel, but for `_end`, which belongs to the object.
_OF_A_CHANNEL = (
    *("handle", "_head", "_ctl", "_line", "_data_word", "_data", "bell"),
    *("_locks", "_written", "_imports"),
)


def move(subscriber: Subscriber, handle: Handle) -> None:
    """As Subscriber.reattach, which holds off everybody else meanwhile."""
    if handle.epoch < subscriber.handle.epoch:
        raise ChannelError(
            f"Subscriber {subscriber.name!r} follows a later channel, that of pid {subscriber.handle.pid} (epoch "
            f"{subscriber.handle.epoch}), than the one of pid {handle.pid} (epoch {handle.epoch}); get a handle from "
            "the publisher that runs now"
        )
    if any(binding.inside() for binding in subscriber._bindings):
        raise ShmSyncError("Expected no forward and no hold() of this thread to go on; reattach after it")
    _check_leases_before(subscriber)
    other = _opened(subscriber, handle)
    subscriber._moving = True
    try:
        for binding in list(subscriber._bindings):
            binding.leave()
        _adopt(subscriber, other)
    except BaseException:
        other.close()
        raise
    finally:
        subscriber._moving = False


def _opened(subscriber: Subscriber, handle: Handle) -> Subscriber:
    """A subscriber of the other channel, which the bound modules fit."""
    with forks.making():
        other = type(subscriber)(
            handle,
            worker_id=subscriber.worker_id,
            name=subscriber.name,
            listed=subscriber._line is not None,
            counted=subscriber._counted,
        )
        forks.forget(other)  # a fork waits for the end of the move, and then there is only one
    try:
        layout = other.layout
        for binding in subscriber._bindings if layout is not None else ():
            binding.check(layout)
    except BaseException:
        other.close()
        raise
    return other


def _adopt(subscriber: Subscriber, other: Subscriber) -> None:
    """Give the subscriber all that the other one has of its channel; what it had before ends."""
    subscriber.let_pass(wait=True)
    with subscriber._locked():
        _check_leases(subscriber)
        left, bell = subscriber._line, subscriber.bell
        subscriber._end()
        other._end.detach()
        for name in _OF_A_CHANNEL:
            setattr(subscriber, name, getattr(other, name))
        subscriber._own()
        subscriber._wishing.said = other._wishing.said
        subscriber._used, subscriber._absent = 0, 0
        other._open = False
        other._line = other._ctl = other.bell = other._data = None
    if left is not None:
        left.left()
    if bell is not None:
        bell.stir()  # a listener goes over to the other one


def _check_leases_before(subscriber: Subscriber) -> None:
    """The same while the bindings hold theirs. In the middle of a switch one has two: so look more than once."""
    for _ in range(_LOOKS):
        subscriber.let_pass(wait=True)
        with subscriber._locked():
            if _held(subscriber) <= sum(bool(binding.version) for binding in subscriber._bindings):
                return
        time.sleep(_PAUSE_SECONDS)
    with subscriber._locked():
        _check_leases(subscriber, sum(bool(binding.version) for binding in subscriber._bindings))


def _held(subscriber: Subscriber) -> int:
    return sum(subscriber._data.holder.counts.values()) if subscriber._data is not None else 0


def _check_leases(subscriber: Subscriber, of_bindings: int = 0) -> None:
    """A lease belongs to the channel that it was taken on, and ends there."""
    held = _held(subscriber) - of_bindings
    if held > 0:
        raise ShmSyncError(
            f"Subscriber {subscriber.name!r} holds {held} lease(s); end them before it goes to another channel"
        )
