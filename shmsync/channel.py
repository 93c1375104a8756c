"""The channel as its publisher has it: the two segments, and the slot protocol's operations on them."""

from __future__ import annotations

import logging
import os
import secrets
import time
from typing import Any

import numpy as np

from . import faults, places, roster, segment, slots, wire
from .bell import Bell
from .checksums import Checksums
from .copying import Filler
from .errors import OutOfSharedMemory, SlotsExhausted
from .handle import Handle
from .layout import Layout, align
from .leases import Locks
from .limits import check_end, check_file_size, check_growth
from .roster import RosterLine
from .sources import Changes, Sources

_log = logging.getLogger("shmsync")


class Control:
    """CTL and, once there are weights, DATA: the publisher's descriptors and mappings, apart so that a
    finalizer can close them."""

    def __init__(self, pid: int, subscribers: int, most_slots: int, name: str, storage: str = "memfd") -> None:
        self.head = wire.CtlHead(pid, secrets.token_bytes(wire.NONCE_NBYTES), time.time_ns(), subscribers, most_slots)
        self.name = name
        self.store: Store | None = None
        self.place = places.of(storage, self.head.nonce)
        self.locks = Locks(-1)
        self._fd = self.place.create(places.CTL, self.head.nbytes, self.head.nbytes)
        try:
            self._begin()
        except BaseException:
            self.abandon()
            raise

    def _begin(self) -> None:
        self.mapping = segment.map_shared(self._fd, 0, self.head.nbytes)
        self.bell = Bell(self.mapping)
        self.answers = roster.Answers(self.mapping, self.head.subscribers)
        raw = wire.pack_ctl(self.head)
        memoryview(self.mapping.buffer).cast("B")[: len(raw)] = raw
        self.locks = Locks(segment.reopen(self._fd, os.O_RDWR))
        self.locks.own()
        faults.at("make.ctl")
        self.place.show(places.CTL, self._fd)  # not before it is locked: without an owner it would be cleared away
        self.handle: Handle = self.place.handle(self._fd, self.head.nonce, self.head.epoch)

    def define(self, layout: Layout, timeout: float, checksum: bool) -> Store:
        """Make DATA and let CTL name it."""
        self.store = Store(layout, self, timeout, checksum)
        self.mapping.words(wire.CTL_DATA_OFFSET, 1)[0] = self.store.fd + 1
        return self.store

    def roster(self) -> list[RosterLine]:
        return roster.read(self.mapping, self.locks, self.head.subscribers)

    def abandon(self) -> None:
        """Close the descriptors and nothing else."""
        self.locks.close()
        os.close(self._fd)
        if self.store is not None:
            os.close(self.store.fd)

    def close(self, pid: int) -> None:
        """Contract: in a forked child it does nothing, the channel is the parent's."""
        if os.getpid() != pid:
            return
        faults.at("end.close")
        self.mapping.words(wire.CTL_CLOSED_OFFSET, 1)[0] = 1
        faults.at("end.closed")
        self.bell.ring()
        if self.store is None or self._hide(places.DATA, self.store.fd):
            faults.at("end.hidden_data")
            self._hide(places.CTL, self._fd)
        del self.mapping, self.bell, self.answers  # gone, even if somebody keeps the closed publisher
        if self.store is not None:
            self.store.close()
        self.locks.close()
        os.close(self._fd)

    def _hide(self, ending: str, fd: int) -> bool:
        try:
            self.place.hide(ending, fd)
        except OSError as error:
            # The end is nobody's to stop. With the owner's lock gone, the next publisher there or `gc` can try again.
            _log.warning("Channel %r has ended, but its %s file stays: %s", self.name, ending, error)
            return False
        return True


class Store:
    """DATA: performs the operations of the slot protocol on real words, locks and bytes."""

    def __init__(self, layout: Layout, control: Control, timeout: float, checksum: bool) -> None:
        raw, self.head = wire.pack_data(layout, control.head, checksum)
        check_file_size(self.head.nbytes)
        self.writer = slots.Writer(len(layout), control.head.slots)
        self.sources = Sources(layout)
        self._control, self._locks, self._timeout = control, control.locks, timeout
        self._place = control.place
        self.fd = self._place.create(places.DATA, self.head.nbytes, align(len(raw), wire.PAGE))
        try:
            self._top = segment.map_shared(self.fd, 0, self.head.slots_offset)
            self._begin(raw)
        except BaseException:
            os.close(self.fd)
            raise

    def _begin(self, raw: bytes) -> None:
        memoryview(self._top.buffer).cast("B")[: len(raw)] = raw
        self._rows = self._top.words(self.head.rows_offset, self.head.rows)
        self._versions = self._top.words(self.head.table_offset, self.head.slots * wire.SLOT_ENTRY_NBYTES // 8)
        self._slots: dict[int, Filler] = {}
        self._checksums: dict[int, Checksums] = {}
        self._given: Changes | None = None
        self._written: list[int] = []
        self._deadline = 0.0
        self._end_of_rows = 1  # no row from here on was ever stored
        faults.at("make.data")
        self._place.show(places.DATA, self.fd)

    def publish(self, rows: list[int], given: Changes) -> tuple[int, int, int]:
        """Version, bytes and leaves written."""
        self._given, self._written = given, []
        self._end_of_rows = max(self._end_of_rows, rows[-1] + 1)
        self._deadline = time.monotonic() + self._timeout
        try:
            word = slots.drive(slots.publish(self.writer, rows, given.array), faults.watched("publish", self._perform))
        finally:
            self._given = None
            faults.at("publish.ring")
            self._control.bell.ring()  # also after an exception: the push may have happened
        for spare in slots.spare_slots(self.writer):
            if slots.drive(slots.give_back(self.writer, spare), faults.watched("give_back", self._perform)):
                break  # one at a time: what is spare now may be needed by the next burst
        rest = self._written[len(given.numbers) :]  # what was copied over follows what was given
        nbytes = given.nbytes + sum(self.head.layout.leaves[i].nbytes for i in rest)
        return slots.version_of(word), nbytes, len(self._written)

    def addressed(self, row: int) -> int:
        return slots.version_of(slots.follow((self._rows[slots.EVERYBODY], self._rows[row])))

    def _perform(self, operation: tuple[Any, ...]) -> Any:
        return getattr(self, operation[0])(*operation[1:])

    def load_rows(self) -> list[int]:
        return self._rows[: self._end_of_rows].tolist()

    def store_row(self, row: int, word: int) -> None:
        self._rows[row] = word

    def store_slot_version(self, slot: int, version: int) -> None:
        if version and slot in self._checksums:
            leaves = (self.head.layout.leaves[number] for number in self._written)
            self._checksums[slot].update((leaf.offset, leaf.offset + leaf.nbytes) for leaf in leaves)
        self._versions[slot * (wire.SLOT_ENTRY_NBYTES // 8)] = version

    def try_exclusive(self, slot: int) -> bool:
        return self._locks.try_exclusive(slot)

    def unlock(self, slot: int) -> None:
        self._locks.unlock(slot)

    def reserve(self, slot: int) -> None:
        """Give the slot memory, faulted in, so that the copy that follows runs at full speed."""
        nbytes, offset = self.head.slot_mapped_nbytes, self.head.slot_offset(slot)
        if not self.head.layout.slot_nbytes:
            self._slots[slot] = Filler(segment.views(None, self.head.layout))
            return
        what = f"Slot {slot} of channel {self._control.name!r}"
        check_growth(nbytes, what)
        check_end(offset + nbytes, what)
        self._place.check_room(nbytes, what)
        try:
            segment.reserve(self.fd, offset, nbytes)
        except OSError as error:
            raise OutOfSharedMemory(f"{what} needs {nbytes} bytes of shared memory: {error.strerror}") from error
        mapping = segment.map_shared(self.fd, offset, nbytes)
        mapping.populate(segment.MADV_POPULATE_WRITE)
        self._slots[slot] = Filler(segment.views(mapping.buffer, self.head.layout))
        if self.head.checksum:
            self._checksums[slot] = Checksums(mapping, self.head.layout.slot_nbytes)

    def copy_in(self, slot: int, leaves: np.ndarray) -> None:
        given = self._given
        assert given is not None
        self._written += given.numbers
        if faults.armed():
            half = len(given.numbers) // 2
            self._slots[slot].fill(given.numbers[:half], given.tensors[:half])
            faults.at("publish.copied_half")
        self._slots[slot].fill(given.numbers, given.tensors, given.token, given.addresses)

    def copy_over(self, slot: int, source: int, leaves: np.ndarray) -> None:
        numbers, old = leaves.tolist(), self._slots[source].views
        self._written += numbers
        self._slots[slot].fill(numbers, [old[i] for i in numbers])

    def punch(self, slot: int) -> None:
        self._slots.pop(slot, None)
        self._checksums.pop(slot, None)
        if self.head.slot_mapped_nbytes:
            segment.punch(self.fd, self.head.slot_offset(slot), self.head.slot_mapped_nbytes)

    def wait(self) -> None:
        if time.monotonic() > self._deadline:
            held = ", ".join(
                f"pid {line.pid} (worker {line.worker_id}, {line.name!r}) uses version {line.used}"
                for line in self._control.roster()
            )
            raise SlotsExhausted(
                f"All {self.writer.max_slots} slots (max_slots) stayed leased for {self._timeout} s; "
                f"{held or 'nobody is on the roster'}. "
                "Raise max_slots, or end the leases that are held"
            )
        time.sleep(0.001)

    def close(self) -> None:
        self._slots.clear()
        self._checksums.clear()
        del self._top, self._rows, self._versions
        os.close(self.fd)
