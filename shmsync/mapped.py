"""What a subscriber has of a channel in its memory: rows and slot table, and the slots that it has met."""

from __future__ import annotations

import os
import sys
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import faults, segment, slots, wire
from .errors import ChannelCorrupt
from .layout import Layout

_ON_HOST = wire.offset_of(wire.SLOT_ENTRY, "on_host") // 8
# Not public, but torch's CUDA graph trees stand on it. Without it no slot is ever known to be clean.
_storage_users: Any = getattr(torch._C, "_storage_Use_Count", None)


class MappedSlot:
    """A slot in this process's memory: private, copy on write, with one tensor per leaf.

    ``clean``: it is known to have no private page. ``leases``: how often it was taken into use.
    """

    def __init__(self, mapping: segment.Mapping | None, layout: Layout) -> None:
        self.mapping = mapping
        self.clean, self.leases = False, 0
        self.rebuild(layout)
        # Python's own object of each storage is kept, so that whoever has one has this one, and is counted.
        self._storages = [tensor.untyped_storage() for tensor in self.tensors]
        self._users: list[int] | None = self._count_users()

    def rebuild(self, layout: Layout) -> None:
        self.tensors = segment.views(self.mapping.buffer if self.mapping else None, layout)
        self.addresses = [tensor.data_ptr() for tensor in self.tensors]
        self._storages, self._users = [], None  # the old ones may still be written through, uncounted

    def taken(self) -> bool:
        """It is taken into use now, by the first in this process. Whether it is clean; from here on it need not be."""
        clean, self.clean = self.clean, False
        self.leases += 1
        return clean

    def reachable(self) -> bool:
        """Whether anything but this object has a tensor over its memory: a parameter, an alias of one, an array."""
        return self._users is None or self._count_users() != self._users

    def _count_users(self) -> list[int] | None:
        if _storage_users is None:
            return None
        users = [_storage_users(storage._cdata) for storage in self._storages]
        return users + list(map(sys.getrefcount, self._storages))

    @property
    def span(self) -> tuple[int, int]:
        """From and to which address it is mapped."""
        return (self.mapping.address, self.mapping.address + self.mapping.nbytes) if self.mapping else (0, 0)

    def moved(self) -> bool:
        """Whether some tensor's storage has been moved out of the mapping (share_memory() does that in place)."""
        return list(map(Tensor.data_ptr, self.tensors)) != self.addresses

    def fresh_views(self, layout: Layout) -> tuple[Any, list[Tensor]]:
        if self.mapping is None:
            buffer: Any = np.zeros(1, np.uint8)  # an empty layout: nothing to keep alive but the lease itself
            return buffer, segment.views(None, layout)
        buffer = type(self.mapping.buffer).from_address(self.mapping.address)
        return buffer, segment.views(buffer, layout)


class MappedData:
    """DATA as a subscriber sees it: rows and slot table shared and read-only, slots mapped when first met."""

    def __init__(self, fd: int, ctl: wire.CtlHead, worker_id: int | None) -> None:
        self.fd = fd  # which is this object's from now on
        self._end = weakref.finalize(self, os.close, self.fd)
        self._end.atexit = False  # other threads may still need it then
        size = os.fstat(self.fd).st_size
        first = os.pread(self.fd, wire.PAGE, 0)
        self.head = wire.parse_data(os.pread(self.fd, wire.head_nbytes(first), 0), size)
        if (self.head.nonce, self.head.slots, self.head.rows) != (ctl.nonce, ctl.slots, ctl.subscribers + 1):
            raise ChannelCorrupt("The data segment is not the one that the control segment names")
        self.top = segment.map_readonly(self.fd, 0, self.head.slots_offset)
        self.rows = self.top.words(self.head.rows_offset, self.head.rows)
        self._versions = self.top.words(self.head.table_offset, self.head.slots * wire.SLOT_ENTRY_NBYTES // 8)
        own = slots.EVERYBODY if worker_id is None else worker_id + 1
        self._own = own
        self.holder = slots.Holder(rows=(slots.EVERYBODY,) if own == slots.EVERYBODY else (slots.EVERYBODY, own))
        self.mapped: dict[int, MappedSlot] = {}

    def newest(self) -> int:
        """The word that this subscriber follows."""
        everybody, own = self.rows[0], self.rows[self._own]
        return everybody if everybody > own else own

    def slot_version(self, slot: int) -> int:
        if slot >= self.head.slots:
            raise ChannelCorrupt(f"A row points to slot {slot}, but the channel has {self.head.slots}")
        return self._versions[slot * (wire.SLOT_ENTRY_NBYTES // 8)]

    def on_host(self, slot: int) -> int:
        """The version whose bytes the slot has on the host."""
        return self._versions[slot * (wire.SLOT_ENTRY_NBYTES // 8) + _ON_HOST]

    def map(self, slot: int) -> MappedSlot:
        mapped = self.mapped.get(slot)
        if mapped is None:
            faults.at("attach.slot")
            mapping = None
            if self.head.layout.slot_nbytes:
                mapping = segment.map_private(self.fd, self.head.slot_offset(slot), self.head.slot_mapped_nbytes)
                mapping.populate(segment.MADV_POPULATE_READ)
            mapped = self.mapped[slot] = MappedSlot(mapping, self.head.layout)
        return mapped
