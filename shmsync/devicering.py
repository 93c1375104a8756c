"""One device ring: a channel's slots in the memory of one CUDA device, exported to other processes once each."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from . import device, segment, wire
from .errors import DeviceError
from .layout import align
from .leases import Locks
from .ringtable import Entry, RingSlots

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger("shmsync")
_NOTHING = Entry(0, False, b"")
_BLOCK_NBYTES = 2 << 20
# This process's own memory, by the channel's nonce, the ring and the memory's number there: what subscribers in it use.
# An address in shared bytes would have to be believed.
_local: weakref.WeakValueDictionary[tuple[bytes, int, int], device.Memory] = weakref.WeakValueDictionary()


def local(nonce: bytes, ring: int, memory: int) -> device.Memory | None:
    """Memory that a publisher of this process has allocated."""
    return _local.get((nonce, ring, memory))


class DeviceRing:
    """The publisher's side of a ring. ``memory``: the device's number here; ``number``: the ring's in the channel.

    ``synced``: as for the ring on the host. Contract: every slot's memory is allocated apart, and freed only under the
    lock that says that nobody has it mapped.
    """

    def __init__(
        self, number: int, head: wire.DataHead, top: segment.Mapping, locks: Locks, stream: device.Stream
    ) -> None:
        self.memory, self.number = stream.index, number
        self._head, self._locks, self._stream = head, locks, stream
        self._words = RingSlots(top, head, number)
        self._slots: dict[int, tuple[device.Memory, list[Tensor]]] = {}
        self._made, self._warned = 0, False
        self.wanted = True
        self.synced: set[int] = set()

    def ensure(self, slot: int) -> None:
        """Give the slot memory on the device. Raises DeviceError where there is none."""
        if slot in self._slots:
            self._words.retire(slot, False)
            return
        # In whole blocks of the runtime's: another process would be shown what else is in its part of one.
        memory = device.Memory(self.memory, align(max(self._head.layout.slot_nbytes, 1), _BLOCK_NBYTES))
        self._made += 1
        entry = Entry(self._made, False, self._exported(memory))
        _local[self._head.nonce, self.number, self._made] = memory
        self._slots[slot] = memory, device.views(memory.address, self.memory, self._head.layout, memory)
        self._words.describe(slot, entry)

    def _exported(self, memory: device.Memory) -> bytes:
        """Nothing, where other processes can't open it: in the publisher's own it is used as it is."""
        try:
            return memory.exported()
        except DeviceError as error:
            if not self._warned:
                self._warned = True
                _log.warning("Device memory can't be shared: %s. Other processes copy from the host", str(error))
            return b""

    def address(self, slot: int) -> int:
        """Where the slot's bytes begin, for this process."""
        return self._slots[slot][0].address

    def views(self, slot: int) -> list[Tensor]:
        """The slot's leaves."""
        return self._slots[slot][1]

    def copy_over(self, slot: int, source: int, numbers: Sequence[int]) -> None:
        """Have leaves copied from another slot of this ring."""
        leaves = [self._head.layout.leaves[number] for number in numbers]
        into, out_of = self.address(slot), self.address(source)
        self._stream.copy_batch(
            [into + leaf.offset for leaf in leaves],
            [out_of + leaf.offset for leaf in leaves],
            [leaf.nbytes for leaf in leaves],
        )

    def version(self, slot: int) -> int:
        """Whose bytes are there; 0 = none that are complete."""
        return self._words.version(slot)

    def store_version(self, slot: int, version: int, written: Iterable[int] | None = None) -> None:
        """Say so."""
        self._words.store_version(slot, version)

    def drop(self, slot: int) -> None:
        """Free the slot's memory, now or when it is not mapped any more. Under the slot's exclusive lock."""
        self.synced.discard(slot)
        if slot not in self._slots:
            return
        self._words.store_version(slot, 0)
        if not self._locks.try_free(self.number, slot):
            self._words.retire(slot, True)  # and `reclaim` tries again
            return
        try:
            self._words.describe(slot, _NOTHING)
            self._slots.pop(slot)[0].free()
        finally:
            self._locks.unlock_memory(self.number, slot)

    def reclaim(self, live: set[int]) -> None:
        """Free what nobody wishes for any more, or has been retired, but for live slots and leased ones."""
        for slot in list(self._slots):
            if slot in live or (self.wanted and not self._words.entry(slot).retired):
                continue
            self._words.retire(slot, True)
            if self._locks.try_exclusive(slot):
                try:
                    self.drop(slot)
                finally:
                    self._locks.unlock(slot)

    def nbytes(self) -> int:
        """The bytes that are allocated."""
        return sum(memory.nbytes for memory, _ in list(self._slots.values()))

    def close(self, reopen: Any) -> None:
        """Free everything that is not mapped; the rest is parked. ``reopen()``: another description of the locks."""
        for slot, (memory, _) in self._slots.items():
            self._words.store_version(slot, 0)
            self._words.describe(slot, _NOTHING)
            if self._locks.try_free(self.number, slot):
                memory.free()
            else:
                _parked.append((reopen(), self.number, slot, memory))
        self._slots.clear()


# Memory of channels that are closed, which a subscriber still has mapped: freed when it has let go.
_parked: list[tuple[Locks, int, int, device.Memory]] = []
_parked_lock = threading.RLock()


def sweep_parked() -> None:
    """Free what closed channels have left and nobody has mapped any more."""
    with _parked_lock:
        for parked in list(_parked):
            locks, ring, slot, memory = parked
            if locks.try_free(ring, slot):
                _parked.remove(parked)
                memory.free()
                locks.close()


def _in_child() -> None:
    """The parent's memory and locks are the parent's."""
    global _parked_lock
    _parked_lock = threading.RLock()
    for locks, _, _, _ in _parked:
        locks.close()
    _parked.clear()


os.register_at_fork(after_in_child=_in_child)
