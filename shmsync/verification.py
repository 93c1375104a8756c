"""What a subscriber has leased, compared with the checksums that were published with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import slots
from .checksums import Checksums
from .errors import ChannelCorrupt, NothingPublished, ShmSyncError
from .mapped import MappedData

if TYPE_CHECKING:
    from .subscriber import Subscriber


def verify(subscriber: Subscriber) -> list[int]:
    """See Subscriber.verify."""
    subscriber._check_open()
    data = subscriber._find_data()
    if data is not None and not data.head.checksum:
        raise ShmSyncError("The channel has no checksums; make its Publisher with checksum=True")
    newest = 0 if data is None else subscriber._run(data, slots.acquire(data.holder))
    if data is None or not newest:
        raise NothingPublished("Nothing is published on the channel yet, so there is nothing to verify; wait(1) first")
    with subscriber._locked():
        held = list(data.holder.counts)
        for slot in held:
            data.holder.counts[slot] += 1
    try:
        here = [slot for slot in held if data.on_host(slot) == data.slot_version(slot)]
        if not here:
            raise ShmSyncError("What is leased, and the newest version, are on devices only; checksums are of the host")
        return sorted(_compare(subscriber, data, slot) for slot in here)
    finally:
        for slot in [*held, slots.slot_of(newest)]:
            subscriber._run(data, slots.release(data.holder, slot))


def _compare(subscriber: Subscriber, data: MappedData, slot: int) -> int:
    mapped, version = subscriber._slot(slot), data.slot_version(slot)
    if mapped.mapping is None:
        return version
    differing = Checksums(mapped.mapping, data.head.layout.slot_nbytes).differing()
    if differing:
        private = subscriber._written.pages.find(mapped.mapping)
        ours = private is not None and any(begin <= page < end for begin, end in differing for page in private)
        keys = [f"`{leaf.key}`" for leaf in data.head.layout if any(map(leaf.overlaps, differing))]
        raise ChannelCorrupt(
            f"Version {version} in slot {slot} is not what was published, in or beside {', '.join(keys[:8])}"
            f"{' ...' if len(keys) > 8 else ''}: {_by_whom(ours)}"
        )
    return version


def _by_whom(ours: bool) -> str:
    if ours:
        return "this process wrote there; the next version brings the published weights back"
    return "another process, or a fault of the memory, has changed it; publish again"
