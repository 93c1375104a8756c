"""Device slots as a subscriber has them: the publisher's memory on a CUDA device, mapped here once per slot."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

from torch import Tensor

from . import device, devicering, wire
from .errors import DeviceError
from .handle import Handle
from .leases import Locks
from .mapped import MappedData
from .ringtable import Entry, RingSlots, RingTable

# All that is mapped in this process, by the channel's nonce, the ring, the memory's number there and the device.
_owners: weakref.WeakValueDictionary[tuple[bytes, int, int, int], _Held | device.Opened] = weakref.WeakValueDictionary()
_owners_lock = threading.RLock()
_open_locks: weakref.WeakSet[Locks] = weakref.WeakSet()


class View(NamedTuple):
    """A slot in one memory: a tensor per leaf, where they begin, and from and to which address they are mapped."""

    tensors: list[Tensor]
    addresses: list[int]
    span: tuple[int, int]


class _Held:
    """The publisher's own memory, used in its own process: with a lock that says so while somebody refers to this."""

    def __init__(self, index: int, memory: device.Memory, then: Callable[[], None]) -> None:
        self.address = memory.address
        end = weakref.finalize(self, _let_go, os.getpid(), index, then)
        end.atexit = False


def _let_go(pid: int, index: int, then: Callable[[], None]) -> None:
    try:
        device.give_back(pid, device.torch_side.synchronize, index)
    finally:
        then()


class Imports:
    """All device slots of one channel that this process has mapped.

    ``locks()``: another description of CTL. Contract: makes a context on a device when it first maps a slot there; a
    slot is unmapped when it was retired and is not in use, and with the last tensor over it.
    """

    def __init__(self, data: MappedData, handle: Handle, locks: Callable[[], Locks]) -> None:
        self._data, self._handle, self._locks = data, handle, locks
        self._table = RingTable(data.top)
        self._rings: dict[int, tuple[int, RingSlots]] = {}
        self._mapped: dict[tuple[int, int], tuple[int, View, RingSlots]] = {}
        self._refused: set[int] = set()

    def possible(self, index: int) -> bool:
        """Whether slots on a device can be mapped at all, as far as is known."""
        return index not in self._refused and device.reason() is None

    def view(self, index: int, slot: int, version: int) -> View | None:
        """A slot on a device, if it holds that version there. Only under a lease on it.

        None: it does not, or it can't be mapped, of which one warning says why.
        """
        ring = self._ring(index)
        if ring is None or ring[1].version(slot) != version:
            return None
        number, words = ring
        known = self._mapped.get((number, slot))
        if known is not None and known[0] == words.entry(slot).memory:
            return known[1]
        self._mapped.pop((number, slot), None)
        try:
            return self._map(index, number, words, slot)
        except DeviceError as error:
            self._refuse(index, error)
            return None

    def unmap_retired(self, leased: set[int]) -> None:
        """Let go of slots that the publisher wants to have back, and nobody here uses."""
        for (number, slot), (memory, _, words) in list(self._mapped.items()):
            entry = words.entry(slot)
            if slot not in leased and (entry.retired or entry.memory != memory):
                del self._mapped[number, slot]

    def has(self, index: int) -> bool:
        """Whether a slot on a device is mapped."""
        ring = self._rings.get(index)
        return ring is not None and any(number == ring[0] for number, _ in self._mapped)

    def count(self) -> int:
        """How many device slots are mapped."""
        return len(self._mapped)

    def abandon(self) -> None:
        """In a forked child: the mappings are the parent's."""
        self._mapped.clear()
        self._refused.update(index for index in self._rings)
        self._rings.clear()

    def _ring(self, index: int) -> tuple[int, RingSlots] | None:
        ring = self._rings.get(index)
        if ring is None and self.possible(index):
            number = self._table.find(device.uuid_of(index))
            if number is None or self._table.state(number) != wire.SERVED:
                return None
            ring = self._rings[index] = number, RingSlots(self._data.top, self._data.head, number)
        return ring

    def _map(self, index: int, number: int, words: RingSlots, slot: int) -> View | None:
        owner, memory = self._owner(index, number, words, slot)
        if owner is None:
            return None
        layout = self._data.head.layout
        tensors = device.views(owner.address, index, layout, owner)
        view = View(tensors, list(map(Tensor.data_ptr, tensors)), (owner.address, owner.address + layout.slot_nbytes))
        self._mapped[number, slot] = memory, view, words
        return view

    def _owner(self, index: int, number: int, words: RingSlots, slot: int) -> tuple[_Held | device.Opened | None, int]:
        """What keeps a slot's memory mapped, and the memory's number; None if the publisher is about to free it.

        There is one for all subscribers of a process, and as long as any tensor over it lives: a handle may not be
        opened twice.
        """
        locks = self._locks()
        with _owners_lock, ExitStack() as undo:
            undo.callback(locks.close)
            if not locks.try_mapping(number, slot) or not (entry := words.entry(slot)).memory:
                return None, 0
            key = self._data.head.nonce, number, entry.memory, index
            owner = _owners.get(key)
            if owner is None:
                owner = _owners[key] = self._open_memory(index, number, entry, locks.close)
                _open_locks.add(locks)
                undo.pop_all()
            return owner, entry.memory

    def _open_memory(self, index: int, number: int, entry: Entry, then: Callable[[], None]) -> _Held | device.Opened:
        memory = devicering.local(self._data.head.nonce, number, entry.memory)
        if memory is not None:
            return _Held(index, memory, then)
        if not any(entry.handle):
            raise DeviceError("the publisher could not export its device memory")
        return device.Opened(index, entry.handle, then)

    def _refuse(self, index: int, error: DeviceError) -> None:
        self._refused.add(index)
        self._rings.pop(index, None)
        warnings.warn(
            f"Process {os.getpid()} can't map the weights that pid {self._handle.pid} has on {device.name_of(index)}, "
            f"and copies them from the host at each version: {error}. CUDA IPC needs one pid namespace and one IPC "
            "namespace (docker: --pid=host --ipc=host) and a whole GPU (no MIG); it does not exist on WSL2",
            RuntimeWarning,
            stacklevel=2,
        )


def _in_child() -> None:
    """A child that kept them would keep the parent's memory from being freed."""
    global _owners_lock
    _owners_lock = threading.RLock()
    for locks in list(_open_locks):
        locks.close()
    _owners.clear()


os.register_at_fork(after_in_child=_in_child)
