"""The ring that every channel has: its slots' bytes in the data segment, on the host."""

from __future__ import annotations

import logging
import os
import weakref
from array import array
from collections.abc import Iterable, Sequence

from torch import Tensor

from . import device, segment, wire
from .checksums import Checksums
from .copying import Filler
from .errors import DeviceError, OutOfSharedMemory
from .limits import check_end, check_growth
from .places import Place

_log = logging.getLogger("shmsync")
_ON_HOST = wire.offset_of(wire.SLOT_ENTRY, "on_host") // 8
_ENTRY_WORDS = wire.SLOT_ENTRY_NBYTES // 8


class HostRing:
    """The slots of the data segment, as the publisher has them.

    ``synced``: the slots whose bytes here are those that the protocol's stamps tell of.
    """

    memory = device.HOST

    def __init__(self, fd: int, head: wire.DataHead, top: segment.Mapping, place: Place, name: str) -> None:
        self._fd, self._head, self._place, self._name = fd, head, place, name
        self._entries = top.words(head.table_offset, head.slots * _ENTRY_WORDS)
        self._slots: dict[int, Filler] = {}
        self._mappings: dict[int, segment.Mapping] = {}
        self._checksums: dict[int, Checksums] = {}
        self._pins: dict[int, weakref.finalize[..., segment.Mapping]] = {}
        self._pin_for: int | None = None  # the device
        self.synced: set[int] = set()

    def ensure(self, slot: int) -> None:
        """Give the slot memory, faulted in, so that the copy that follows runs at full speed."""
        if slot in self._slots:
            return
        nbytes, offset = self._head.slot_mapped_nbytes, self._head.slot_offset(slot)
        if not self._head.layout.slot_nbytes:
            self._slots[slot] = Filler(segment.views(None, self._head.layout))
            return
        what = f"Slot {slot} of channel {self._name!r}"
        check_growth(nbytes, what)
        check_end(offset + nbytes, what)
        self._place.check_room(nbytes, what)
        try:
            segment.reserve(self._fd, offset, nbytes)
        except OSError as error:
            raise OutOfSharedMemory(f"{what} needs {nbytes} bytes of shared memory: {error.strerror}") from error
        mapping = segment.map_shared(self._fd, offset, nbytes)
        mapping.populate(segment.MADV_POPULATE_WRITE)
        self._slots[slot], self._mappings[slot] = Filler(segment.views(mapping.buffer, self._head.layout)), mapping
        if self._head.checksum:
            self._checksums[slot] = Checksums(mapping, self._head.layout.slot_nbytes)
        if self._pin_for is not None:
            self._pin(slot)

    def fill(
        self,
        slot: int,
        numbers: Sequence[int],
        sources: Sequence[Tensor],
        token: object = None,
        addresses: array[int] | None = None,
    ) -> None:
        """Copy sources into the leaves of these numbers; as Filler.fill."""
        self._slots[slot].fill(numbers, sources, token, addresses)

    def copy_over(self, slot: int, source: int, numbers: Sequence[int]) -> None:
        """Copy leaves from another slot."""
        old = self._slots[source].views
        self._slots[slot].fill(numbers, [old[number] for number in numbers])

    def address(self, slot: int) -> int:
        """Where the slot's bytes begin in this process."""
        return self._mappings[slot].address if slot in self._mappings else 0

    def version(self, slot: int) -> int:
        """Whose bytes are here; 0 = none that are complete."""
        return self._entries[slot * _ENTRY_WORDS + _ON_HOST]

    def store_version(self, slot: int, version: int, written: Iterable[int] | None = None) -> None:
        """Say so. ``written``: the leaves that have other bytes than at the version before; None = any."""
        if version and slot in self._checksums:
            leaves = self._head.layout.leaves
            changed = leaves if written is None else [leaves[number] for number in written]
            self._checksums[slot].update((leaf.offset, leaf.offset + leaf.nbytes) for leaf in changed)
        self._entries[slot * _ENTRY_WORDS + _ON_HOST] = version

    def drop(self, slot: int) -> None:
        """Give the slot's memory back. Under its exclusive lock."""
        self._unpin(slot)
        had = self._slots.pop(slot, None) is not None
        self._mappings.pop(slot, None)
        self._checksums.pop(slot, None)
        self.synced.discard(slot)
        if had and self._head.slot_mapped_nbytes:
            segment.punch(self._fd, self._head.slot_offset(slot), self._head.slot_mapped_nbytes)

    def pin(self, index: int) -> None:
        """Let devices, of which this is one in use, copy from and to the slots at full speed."""
        if self._pin_for is None:
            self._pin_for = index
            for slot in list(self._mappings):
                self._pin(slot)

    def count(self) -> int:
        """How many slots have memory here."""
        return len(self._slots)

    def close(self) -> None:
        """Let all memory go."""
        for slot in list(self._pins):
            self._unpin(slot)
        self._slots.clear()
        self._mappings.clear()
        self._checksums.clear()
        vars(self).pop("_entries", None)

    def _pin(self, slot: int) -> None:
        mapping, index = self._mappings[slot], self._pin_for
        if index is None or index < 0:
            return
        try:
            device.register(index, mapping.address, mapping.nbytes)
        except DeviceError as error:
            self._pin_for = device.HOST  # no more tries
            _log.warning(
                "%s: the slots on the host stay pageable, copies between them and devices are slower (%s). A "
                "larger limit of locked memory (ulimit -l) may help",
                self._name,
                str(error),  # and not the error, whose traceback a log may keep, and with it the mapping
            )
            return
        # Before it is unmapped, which is when its last view is gone.
        self._pins[slot] = weakref.finalize(mapping, device.unregister, os.getpid(), index, mapping.address)
        self._pins[slot].atexit = False

    def _unpin(self, slot: int) -> None:
        pin = self._pins.pop(slot, None)
        if pin is not None:
            pin()
