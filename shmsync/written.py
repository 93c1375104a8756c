"""What this process wrote into mapped slots: pages of its own, which the next lease on a slot drops.

A scan for them takes milliseconds for large slots, so those are looked at when they were left, off anybody's path: what
is clean then, and not leased or reached after that, is clean at its next lease.
"""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

from .layout import Layout
from .mapped import MappedData, MappedSlot
from .pages import PrivatePages

if TYPE_CHECKING:
    from .subscriber import Subscriber

# From this size on, whether a slot has private pages is looked up after it was left; below, when it is leased again.
SWEPT_NBYTES = 1 << 20
_SHOWN = 3
# The sweeping thread's own: it may be at work while a subscriber closes its descriptor.
_swept_pages = PrivatePages()


class Written:
    """A subscriber's private pages; ``left``: the slots that its switches have left and nobody has swept yet."""

    def __init__(self) -> None:
        self.pages = PrivatePages()
        self.left: list[int] = []
        self._warned = False

    def leave(self, slot: int, data: MappedData) -> None:
        """A switch has left this slot."""
        if data.head.layout.slot_nbytes >= SWEPT_NBYTES:
            self.left.append(slot)

    def take_left(self) -> list[int]:
        """The slots to be swept; they are the caller's now."""
        left, self.left = self.left, []
        return left

    def drop(self, mapped: MappedSlot | None, layout: Layout) -> None:
        """Have a slot show again what was published there. Under a new lease, before anything points there."""
        if mapped is None or mapped.mapping is None or mapped.taken():
            return
        written = self.pages.drop(mapped.mapping)
        if written is not None and len(written) and not self._warned:
            self._warned = True
            first, page = int(written[0]), os.sysconf("SC_PAGE_SIZE")
            keys = [leaf.key for leaf in layout if leaf.overlaps((first, first + page))]
            warnings.warn(
                f"This process (pid {os.getpid()}) wrote to shared weights near {_some(keys)}. "
                "Nobody else saw that, and the published weights are back. Write to a copy, or bind with mode='copy'",
                RuntimeWarning,
                stacklevel=2,
            )


def _some(keys: list[str]) -> str:
    """The leaves of one page, which is all that can be said of where it was."""
    shown = ", ".join(f"`{key}`" for key in keys[:_SHOWN])
    return f"{shown} and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else shown


def sweep(subscriber: Subscriber, slot: int) -> None:
    """See whether a slot that was left has private pages. If something may still write there, say nothing.

    It is not leased meanwhile, so its next lease is a later one; and once nothing reaches a slot that nobody has
    leased, nothing can come to reach it.
    """
    with subscriber._locked():
        data = subscriber._data
        mapped = data.mapped.get(slot) if data is not None and slot not in data.holder.counts else None
        leases = mapped.leases if mapped is not None else 0
    if mapped is None or mapped.mapping is None or mapped.reachable():
        return
    found = _swept_pages.find(mapped.mapping)
    if found is not None and not len(found):
        with subscriber._locked():
            mapped.clean = mapped.leases == leases
