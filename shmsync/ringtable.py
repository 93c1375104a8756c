"""What DATA tells of device rings: which there are, and for each slot whose version it holds and how to map it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import wire
from .segment import Mapping

_STATE = wire.offset_of(wire.RING, "state") // 8
_UUID = wire.offset_of(wire.RING, "uuid")
_RING_WORDS = wire.RING.itemsize // 8
_SLOT_WORDS = wire.RING_SLOT.itemsize // 8
_WORD = {name: wire.offset_of(wire.RING_SLOT, name) // 8 for name in wire.RING_SLOT.names or ()}


@dataclass(frozen=True)
class Entry:
    """How one slot of a ring is mapped: the number of its memory, among all that the ring ever had, and its IPC handle.

    ``retired``: who does not use it shall unmap it.
    """

    memory: int
    retired: bool
    handle: bytes


class RingTable:
    """All rings, by number. Contract: looks and stores only; the publisher alone stores."""

    def __init__(self, top: Mapping) -> None:
        self._words = top.words(wire.RINGS_OFFSET, wire.MAX_RINGS * _RING_WORDS)
        self._bytes = memoryview(top.buffer).cast("B")

    def state(self, ring: int) -> int:
        """NO_RING, SERVED or REFUSED."""
        return self._words[ring * _RING_WORDS + _STATE]

    def find(self, uuid: bytes) -> int | None:
        """The ring of a device."""
        for ring in range(wire.MAX_RINGS):
            if self.state(ring) != wire.NO_RING and self._uuid(ring) == uuid:
                return ring
        return None

    def add(self, uuid: bytes) -> int | None:
        """A number for another device, which is refused until `set_state`; None if there is none left."""
        for ring in range(wire.MAX_RINGS):
            if self.state(ring) == wire.NO_RING:
                begin = self._uuid_offset(ring)
                self._bytes[begin : begin + wire.UUID_NBYTES] = uuid
                self.set_state(ring, wire.REFUSED)
                return ring
        return None

    def set_state(self, ring: int, state: int) -> None:
        """SERVED: the ring's slots have memory in the segment from now on."""
        self._words[ring * _RING_WORDS + _STATE] = state

    def _uuid(self, ring: int) -> bytes:
        begin = self._uuid_offset(ring)
        return bytes(self._bytes[begin : begin + wire.UUID_NBYTES])

    def _uuid_offset(self, ring: int) -> int:
        return wire.RINGS_OFFSET + ring * wire.RING.itemsize + _UUID


class RingSlots:
    """The slots of one ring. Contract: looks and stores only; the publisher alone stores, under the slot's lock or
    while the version is another one than the slot's own."""

    def __init__(self, top: Mapping, head: wire.DataHead, ring: int) -> None:
        self._words = top.words(head.ring_offset(ring), head.slots * _SLOT_WORDS)

    def version(self, slot: int) -> int:
        """Whose bytes are there; 0 = none that are complete."""
        return self._words[slot * _SLOT_WORDS + _WORD["version"]]

    def store_version(self, slot: int, version: int) -> None:
        """Say so."""
        self._words[slot * _SLOT_WORDS + _WORD["version"]] = version

    def entry(self, slot: int) -> Entry:
        """How it is mapped. Only under a lease on the slot."""
        first = slot * _SLOT_WORDS
        raw = self._words[first : first + _SLOT_WORDS].tobytes()
        record = np.frombuffer(raw, wire.RING_SLOT)[0]
        return Entry(int(record["memory"]), bool(record["retired"]), record["handle"].tobytes())

    def describe(self, slot: int, entry: Entry) -> None:
        """Say how it is mapped; memory 0 = not at all."""
        record = np.zeros((), wire.RING_SLOT)
        record["memory"], record["retired"] = entry.memory, entry.retired
        record["handle"] = np.frombuffer(entry.handle.ljust(wire.IPC_HANDLE_NBYTES, b"\0"), np.uint8)
        first = slot * _SLOT_WORDS
        self._words[first : first + _SLOT_WORDS] = memoryview(record.tobytes()).cast("Q")

    def retire(self, slot: int, retired: bool) -> None:
        """Ask who has it mapped to unmap it, or not any more."""
        self._words[slot * _SLOT_WORDS + _WORD["retired"]] = int(retired)
