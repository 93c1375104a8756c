"""A subscriber's move from one channel to a later one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import ChannelError, ShmSyncError
from .handle import Handle

if TYPE_CHECKING:
    from .subscriber import Subscriber

# What a subscriber has of a channel, but for `_end`, which belongs to the object.
_OF_A_CHANNEL = (
    *("handle", "_head", "_ctl", "_line", "_data_word", "_data", "bell"),
    *("_locks", "_pages"),
)


def opened(subscriber: Subscriber, handle: Handle) -> Subscriber:
    """A subscriber of the other channel, to which this one can move. Raises as Subscriber.reattach."""
    if handle.epoch <= subscriber.handle.epoch:
        raise ChannelError(
            f"Subscriber {subscriber.name!r} follows a later channel, that of pid {subscriber.handle.pid} (epoch "
            f"{subscriber.handle.epoch}), than the one of pid {handle.pid} (epoch {handle.epoch}); get a handle from "
            "the publisher that runs now"
        )
    _check_leases(subscriber)
    other = type(subscriber)(
        handle, worker_id=subscriber.worker_id, name=subscriber.name, listed=subscriber._line is not None
    )
    try:
        layout = other.layout
        for binding in subscriber._bindings if layout is not None else ():
            binding.check(layout)
    except BaseException:
        other.close()
        raise
    return other


def _check_leases(subscriber: Subscriber) -> None:
    """A lease belongs to the channel that it was taken on, and ends there."""
    with subscriber._locked():
        data = subscriber._data
        held = sum(data.holder.counts.values()) if data is not None else 0
        held -= sum(1 for binding in subscriber._bindings if binding.version)
    if held:
        raise ShmSyncError(
            f"Subscriber {subscriber.name!r} holds {held} lease(s); end them before it goes to another channel"
        )


def adopt(subscriber: Subscriber, other: Subscriber) -> None:
    """Give the subscriber all that the other one has of its channel; what it had before ends."""
    with subscriber._locked():
        left, bell = subscriber._line, subscriber.bell
        subscriber._end()
        other._end.detach()
        for name in _OF_A_CHANNEL:
            setattr(subscriber, name, getattr(other, name))
        subscriber._own()
        subscriber._used, subscriber._left = 0, []
        other._open = False
        other._line = other._ctl = other.bell = other._data = None
    if left is not None:
        left.left()
    if bell is not None:
        bell.stir()  # a listener goes over to the other one
