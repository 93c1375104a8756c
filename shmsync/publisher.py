"""The publisher: the one writer of a channel."""

from __future__ import annotations

import os
import secrets
import threading
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import torch

from . import forks, ids, roster, segment, slots, wire
from .bell import Bell
from .checksums import Checksums, hasher
from .copying import Filler
from .errors import (
    ChannelClosed,
    LayoutMismatch,
    LimitError,
    NothingPublished,
    NotThePublisher,
    OutOfSharedMemory,
    ShmSyncError,
    SlotsExhausted,
)
from .handle import Handle
from .layout import Layout, build
from .leases import Locks
from .limits import check_file_size, check_growth
from .roster import RosterLine
from .sources import Changes, Sources
from .weights import flatten


@dataclass(frozen=True)
class Publication:
    """What one publish did: its version, the bytes and leaves written into the slot, and the seconds it took."""

    version: int
    nbytes: int
    leaves: int
    seconds: float


class Publisher:
    """Owns a channel and publishes versions of the weights into it.

    ``weights``: an nn.Module, a TensorDict, a (possibly flat, dotted) state dict, or a dict of these, which then change
    together under one version. They fix the layout; nothing is published yet (version 0). None: the first published
    weights fix it. ``dtype``: store floating leaves as this dtype. ``max_subscribers``: how many may attach, and the
    bound of worker ids. ``max_slots``: None grows as far as ever needed. ``timeout``: seconds that a publish waits for
    a slot once ``max_slots`` is reached. ``checksum``: store checksums with each version, for ``Subscriber.verify``.
    ``name``: for people.

    Raises UnsupportedLeaf, LayoutError, OutOfSharedMemory; ShmSyncError for an option that can't be.
    Contract: copies nothing at construction; the caller's tensors are never moved, shared or changed. If this process
    dies, subscribers keep the weights that they hold, and the memory goes with the last of them.
    """

    def __init__(
        self,
        weights: Any = None,
        *,
        dtype: torch.dtype | None = None,
        storage: str = "memfd",
        max_subscribers: int = 256,
        max_slots: int | None = None,
        timeout: float = 60.0,
        checksum: bool = False,
        name: str | None = None,
    ) -> None:
        _check_options(dtype, storage, max_subscribers, max_slots, checksum)
        self._source, self._dtype, self._timeout, self._checksum = weights, dtype, timeout, checksum
        table = None if weights is None else flatten(weights)
        layout = None if table is None else build(table, dtype)
        self.name = name or f"publisher-{os.getpid()}"
        self._mutex = threading.Lock()
        self._pid = os.getpid()
        most = 3 * max_subscribers + 2 if max_slots is None else max_slots
        self._control = _Control(self._pid, max_subscribers, most, self.name)
        self._store: _Store | None = None
        self._finalizer = weakref.finalize(self, _Control.close, self._control, self._pid)
        forks.watch(self)
        if layout is not None:
            self._store = self._control.define(layout, timeout, checksum)

    @property
    def handle(self) -> Handle:
        """The channel's address. Contract: valid while this process lives and the publisher is open."""
        self._check_open()
        return self._control.handle

    @property
    def version(self) -> int:
        """The newest published version; 0 = nothing yet."""
        return slots.version_of(self._store.writer.newest) if self._store else 0

    @property
    def layout(self) -> Layout | None:
        """The fixed table of leaves, or None before the first weights."""
        return self._store.head.layout if self._store else None

    @property
    def max_subscribers(self) -> int:
        """How many subscribers may attach; worker ids are 0 .. max_subscribers - 1."""
        return self._control.head.subscribers

    def publish(
        self, weights: Any = None, *, worker_ids: int | Iterable[int] | None = None, partial: bool = False
    ) -> Publication:
        """Publish the next version, to everybody or to some workers only.

        ``weights`` as in the constructor; None = the ones given there. ``worker_ids``: None = everybody; the others
        keep their version. ``partial``: only some leaves are given, the rest are the newest version's.

        Raises LayoutMismatch, UnsupportedLeaf, TiedLeavesDiffer, WorkerIdError before anything is written,
        SlotsExhausted or OutOfSharedMemory if there is no room; subscribers then keep the version they have.
        Contract: one copy of the changed bytes, whatever the number of subscribers; blocks for that copy; threads take
        turns; if this process dies meanwhile, the old version stays.
        """
        begin = time.perf_counter()
        rows = self._rows(worker_ids)
        with self._mutex:
            self._check_open()
            if not rows:
                return Publication(self.version, 0, 0, 0.0)
            version, nbytes, leaves = self._publish(weights, rows, partial)
        return Publication(version, nbytes, leaves, time.perf_counter() - begin)

    def _publish(self, weights: Any, rows: list[int], partial: bool) -> tuple[int, int, int]:
        source = self._source if weights is None else weights
        if source is None:
            raise NothingPublished("The publisher was made without weights, so publish() needs some")
        if partial and not self.version:
            raise LayoutMismatch("A partial publish completes the newest version, but nothing is published yet")
        store = self._store
        if store is None:
            store = self._store = self._control.define(
                build(flatten(source), self._dtype), self._timeout, self._checksum
            )
        return store.publish(rows, store.sources.changes(source, partial))

    def _rows(self, worker_ids: int | Iterable[int] | None) -> list[int]:
        if worker_ids is None:
            return [slots.EVERYBODY]
        return sorted(worker + 1 for worker in ids.resolve(worker_ids, self.max_subscribers))

    def addressed(self, worker_id: int) -> int:
        """The newest version that was published to a worker, to it alone or to everybody."""
        self._check_open()
        return self._store.addressed(worker_id + 1) if self._store else 0

    def subscribers(self) -> list[RosterLine]:
        """The roster lines of all live subscribers. Contract: a look, not a lock."""
        self._check_open()
        return self._control.roster()

    def answers(self) -> dict[int, tuple[int, int]]:
        """By worker that listens to the bell: the version in use, and the version that it answered for.

        Contract: a look without a system call; the last answer of a worker that has died stays.
        """
        self._check_open()
        return self._control.answers()

    def stats(self) -> dict[str, int]:
        """Counters: version, slots with memory, bytes of one slot and of all, subscribers."""
        self._check_open()
        reserved = len(self._store.writer.stamps) if self._store else 0
        slot_nbytes = self._store.head.slot_mapped_nbytes if self._store else 0
        return {
            "version": self.version,
            "slots": reserved,
            "slot_nbytes": slot_nbytes,
            "nbytes": reserved * slot_nbytes,
            "subscribers": len(self.subscribers()),
        }

    def close(self) -> None:
        """End the channel; subscribers keep the weights they hold. A second call does nothing."""
        with self._mutex:
            self._finalizer()
            self._store = None
            self._source = None

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise NotThePublisher(
            f"A publisher stays in the process that made it (pid {self._pid}); send publisher.handle and make "
            "a Subscriber there"
        )

    def before_fork(self) -> None:
        """No publish is in the middle of anything while the process is copied."""
        self._mutex.acquire()

    def after_fork_in_parent(self) -> None:
        """Go on."""
        self._mutex.release()

    def after_fork_in_child(self) -> None:
        """The channel is the parent's: its descriptors here would keep the owner lock alive after its death."""
        self._mutex = threading.Lock()
        if self._finalizer.detach():
            self._control.abandon()

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise NotThePublisher(
                f"Process {os.getpid()} may not publish on the channel of its parent, pid {self._pid}; make a "
                "Publisher of its own"
            )
        if not self._finalizer.alive:
            raise ChannelClosed(f"Publisher {self.name!r} is closed")


def _check_options(
    dtype: torch.dtype | None, storage: str, max_subscribers: int, max_slots: int | None, checksum: bool
) -> None:
    if storage != "memfd":
        raise ShmSyncError(f"Expected storage='memfd', got {storage!r}")
    if checksum:
        hasher()
    if dtype is not None and not dtype.is_floating_point:
        raise ShmSyncError(f"Expected a floating dtype=, got {dtype}: only floating leaves are cast")
    if not 1 <= max_subscribers <= wire.MAX_SUBSCRIBERS:
        raise LimitError(f"Expected max_subscribers from 1 to {wire.MAX_SUBSCRIBERS}, got {max_subscribers}")
    if max_slots is not None and not 2 <= max_slots <= wire.MAX_SLOTS:
        raise LimitError(f"Expected max_slots from 2 to {wire.MAX_SLOTS}, got {max_slots}")


class _Control:
    """CTL and, once there are weights, DATA: the publisher's descriptors and mappings, apart so that a
    finalizer can close them."""

    def __init__(self, pid: int, subscribers: int, most_slots: int, name: str) -> None:
        self.head = wire.CtlHead(pid, secrets.token_bytes(wire.NONCE_NBYTES), time.time_ns(), subscribers, most_slots)
        self.name = name
        self.store: _Store | None = None
        self._fd = segment.create("ctl", self.head.nbytes)
        self.mapping = segment.map_shared(self._fd, 0, self.head.nbytes)
        self.bell = Bell(self.mapping)
        raw = wire.pack_ctl(self.head)
        memoryview(self.mapping.buffer).cast("B")[: len(raw)] = raw
        self.locks = Locks(segment.reopen(self._fd, os.O_RDWR))
        self.locks.own()
        self.handle = Handle.here(self._fd, self.head.nonce, self.head.epoch)

    def define(self, layout: Layout, timeout: float, checksum: bool) -> _Store:
        """Make DATA and let CTL name it."""
        self.store = _Store(layout, self, timeout, checksum)
        self.mapping.words(wire.CTL_DATA_OFFSET, 1)[0] = self.store.fd + 1
        return self.store

    def roster(self) -> list[RosterLine]:
        return roster.read(self.mapping, self.locks, self.head.subscribers)

    def answers(self) -> dict[int, tuple[int, int]]:
        return roster.answers(self.mapping, self.head.subscribers)

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
        self.mapping.words(wire.CTL_CLOSED_OFFSET, 1)[0] = 1
        self.bell.ring()
        del self.mapping, self.bell  # gone, even if somebody keeps the closed publisher
        if self.store is not None:
            self.store.close()
        self.locks.close()
        os.close(self._fd)


class _Store:
    """DATA: performs the operations of the slot protocol on real words, locks and bytes."""

    def __init__(self, layout: Layout, control: _Control, timeout: float, checksum: bool) -> None:
        raw, self.head = wire.pack_data(layout, control.head, checksum)
        check_file_size(self.head.nbytes)
        self.writer = slots.Writer(len(layout), control.head.slots)
        self.sources = Sources(layout)
        self._control, self._locks, self._timeout = control, control.locks, timeout
        self.fd = segment.create("data", self.head.nbytes)
        self._top = segment.map_shared(self.fd, 0, self.head.slots_offset)
        memoryview(self._top.buffer).cast("B")[: len(raw)] = raw
        self._rows = self._top.words(self.head.rows_offset, self.head.rows)
        self._versions = self._top.words(self.head.table_offset, self.head.slots * wire.SLOT_ENTRY_NBYTES // 8)
        self._slots: dict[int, Filler] = {}
        self._checksums: dict[int, Checksums] = {}
        self._given: Changes | None = None
        self._written: list[int] = []
        self._deadline = 0.0

    def publish(self, rows: list[int], given: Changes) -> tuple[int, int, int]:
        """Version, bytes and leaves written."""
        self._given, self._written = given, []
        self._deadline = time.monotonic() + self._timeout
        try:
            changed = np.array(given.numbers, np.int64)
            word = slots.drive(slots.publish(self.writer, rows, changed), self._perform)
        finally:
            self._given = None
            self._control.bell.ring()  # also after an exception: the push may have happened
        for spare in slots.spare_slots(self.writer):
            if slots.drive(slots.give_back(self.writer, spare), self._perform):
                break  # one at a time: what is spare now may be needed by the next burst
        rest = self._written[len(given.numbers) :]  # what was copied over follows what was given
        nbytes = given.nbytes + sum(self.head.layout.leaves[i].nbytes for i in rest)
        return slots.version_of(word), nbytes, len(self._written)

    def addressed(self, row: int) -> int:
        return slots.version_of(slots.follow((self._rows[slots.EVERYBODY], self._rows[row])))

    def _perform(self, operation: tuple[Any, ...]) -> Any:
        return getattr(self, operation[0])(*operation[1:])

    def load_rows(self) -> list[int]:
        return self._rows.tolist()

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
        check_growth(nbytes, f"Slot {slot} of channel {self._control.name!r}")
        try:
            segment.reserve(self.fd, offset, nbytes)
        except OSError as error:
            raise OutOfSharedMemory(f"Slot {slot} needs {nbytes} bytes of shared memory: {error.strerror}") from error
        mapping = segment.map_shared(self.fd, offset, nbytes)
        mapping.populate(segment.MADV_POPULATE_WRITE)
        self._slots[slot] = Filler(segment.views(mapping.buffer, self.head.layout))
        if self.head.checksum:
            self._checksums[slot] = Checksums(mapping, self.head.layout.slot_nbytes)

    def copy_in(self, slot: int, leaves: np.ndarray) -> None:
        given = self._given
        assert given is not None
        self._written += given.numbers
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
