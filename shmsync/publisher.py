"""The publisher: the one writer of a channel."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from . import exits, files, forks, ids, leftovers, places, slots, wire
from .channel import Control, Published, Store
from .checksums import hasher
from .errors import (
    ChannelClosed,
    DeviceError,
    LayoutMismatch,
    LimitError,
    NothingPublished,
    NotThePublisher,
    ShmSyncError,
)
from .handle import Handle
from .layout import Layout, build
from .roster import RosterLine
from .serving import serve
from .weights import flatten

_log = logging.getLogger("shmsync")
_END_SECONDS = 5.0
# A version has 48 bits in a row's word; half of them are left to count.
_LAST_FIRST_VERSION = 2**47


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
    weights fix it. ``dtype``: store floating leaves as this dtype. ``storage``: "memfd", or "file" for subscribers in
    other pid namespaces of this host: files in the directory ``SHMSYNC_DIR``, else /dev/shm. ``max_subscribers``: how
    many may attach, and the bound of worker ids. ``max_slots``: None = 3 * max_subscribers + 2. ``timeout``: seconds
    that a publish waits for a slot once ``max_slots`` is reached. ``checksum``: store checksums with each version, for
    ``Subscriber.verify``. ``first_version``: the number of the first version, for one that goes on where another
    publisher has ended. ``name``: for people.

    Raises UnsupportedLeaf, LayoutError, OutOfSharedMemory; ShmSyncError for an option that can't be, ChannelError for a
    directory that can't be used.
    Contract: copies nothing at construction; the caller's tensors are never moved, shared or changed. If this process
    dies, subscribers keep the weights that they hold, and the memory goes with the last of them; files that it leaves
    go when the next publisher starts in that directory, or by ``python -m shmsync gc``.
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
        first_version: int = 1,
        name: str | None = None,
    ) -> None:
        check_options(
            dtype=dtype,
            storage=storage,
            max_subscribers=max_subscribers,
            max_slots=max_slots,
            checksum=checksum,
            first_version=first_version,
        )
        self.first_version = first_version
        self._source, self._dtype, self._timeout, self._checksum = weights, dtype, timeout, checksum
        table = None if weights is None else flatten(weights)
        layout = None if table is None else build(table, dtype)
        self.name = name or f"publisher-{os.getpid()}"
        self._mutex = threading.Lock()
        self._pid = os.getpid()
        most = 3 * max_subscribers + 2 if max_slots is None else max_slots
        if storage == "file":
            leftovers.remove(files.folder())
        self._store: Store | None = None
        self._closed_at = 0
        self._serving: threading.Thread | None = None
        self._failure: BaseException | None = None
        with forks.making():
            self._control = Control(self._pid, max_subscribers, most, self.name, storage)
            self._finalizer = weakref.finalize(self, _end, self._control, self._pid, self._mutex)
            forks.watch(self)
        if layout is not None:
            self._define(layout)

    @property
    def handle(self) -> Handle:
        """The channel's address. Contract: valid while this process lives and the publisher is open."""
        self._check_open()
        return self._control.handle

    @property
    def version(self) -> int:
        """The newest published version, also after close(); 0 = nothing yet."""
        return slots.version_of(self._store.writer.newest) if self._store else self._closed_at

    @property
    def layout(self) -> Layout | None:
        """The fixed table of leaves, or None before the first weights."""
        return self._store.head.layout if self._store else None

    @property
    def max_subscribers(self) -> int:
        """How many subscribers may attach; worker ids are 0 .. max_subscribers - 1."""
        return self._control.head.subscribers

    def publish(
        self,
        weights: Any = None,
        *,
        worker_ids: int | Iterable[int] | None = None,
        partial: bool = False,
        wait: bool = True,
    ) -> Publication:
        """Publish the next version, to everybody or to some workers only.

        ``weights`` as in the constructor; None = the ones given there. ``worker_ids``: None = everybody; the others
        keep their version. ``partial``: only some leaves are given, the rest are the newest version's. ``wait``: until
        the version shows; if not, and weights are on a CUDA device, return when their copies are queued: what the
        calling thread's stream changes after this comes after them, the version shows when they are done, and the next
        publish waits for that. What goes wrong until then, the next publish, or `wait`, raises.

        Raises LayoutMismatch, UnsupportedLeaf, TiedLeavesDiffer, WorkerIdError before anything is written,
        SlotsExhausted or OutOfSharedMemory if there is no room, DeviceError; subscribers then keep the version that
        they have.
        Contract: one copy of the given leaves and of those that the slot lacks, whatever the number of subscribers;
        waits up to ``timeout`` for a slot where all are leased; empty ``worker_ids`` publish nothing; threads take
        turns; if this process dies meanwhile, the old version stays.
        """
        try:
            return self._publish_now(weights, worker_ids, partial, wait)
        except ChannelClosed:
            exits.hold_daemons()
            raise

    def _publish_now(
        self, weights: Any, worker_ids: int | Iterable[int] | None, partial: bool, wait: bool
    ) -> Publication:
        begin = time.perf_counter()
        rows = self._rows(worker_ids)
        self._mutex.acquire()
        rest: Callable[[], int] | None = None
        try:
            self._check_open()
            self._raise_failure()
            if not rows:
                return Publication(self.version, 0, 0, 0.0)
            version, nbytes, leaves, rest = self._publish(weights, rows, partial, wait)
        finally:
            if rest is None:
                self._mutex.release()
            else:
                self._finish_later(rest)
        seconds = time.perf_counter() - begin
        if _log.isEnabledFor(logging.DEBUG):
            to = "everybody" if worker_ids is None else f"workers {[row - 1 for row in rows]}"
            _log.debug(
                "%s: version %d to %s, %d leaves, %d bytes, %.2f ms",
                self.name,
                version,
                to,
                leaves,
                nbytes,
                1e3 * seconds,
            )
        return Publication(version, nbytes, leaves, seconds)

    def wait(self) -> int:
        """Wait until what was published with ``wait=False`` shows; the newest version. Raises what went wrong."""
        with self._mutex:
            self._check_open()
            self._raise_failure()
            return self.version

    def _publish(self, weights: Any, rows: list[int], partial: bool, wait: bool) -> Published:
        source = self._source if weights is None else weights
        if source is None:
            raise NothingPublished("The publisher was made without weights, so publish() needs some")
        if partial and not self.version:
            raise LayoutMismatch(
                "A partial publish completes the newest version, but nothing is published yet; publish all of them once"
            )
        store = self._store
        if store is None:
            store = self._define(build(flatten(source), self._dtype))
        published = store.publish(rows, store.sources.changes(source, partial), wait)
        if store.rings is not None and not self._serving:
            with suppress(RuntimeError):  # there can't be another thread now: at the next publish, then
                self._serving = serve(self._control.calls, self._bring)
        return published

    def _finish_later(self, rest: Callable[[], int]) -> None:
        try:
            threading.Thread(target=self._finish, args=(rest,), name="shmsync-publish", daemon=True).start()
        except RuntimeError:  # there can't be another thread
            self._finish(rest)

    def _finish(self, rest: Callable[[], int]) -> None:
        """What is left of a publish that did not wait; its mutex is this thread's now."""
        try:
            rest()
        except BaseException as error:
            self._failure = error
        finally:
            self._mutex.release()

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise DeviceError(
                f"An earlier publish with wait=False failed, and its version does not show: {failure}. Publish again"
            ) from failure

    def _bring(self) -> bool:
        """Serve the wishes of subscribers; False when the channel has ended."""
        with self._mutex:
            if self._store is None or not self._finalizer.alive or os.getpid() != self._pid:
                return False
            self._store.bring()
            return True

    def _define(self, layout: Layout) -> Store:
        with forks.making():
            self._store = self._control.define(layout, self._timeout, self._checksum, self.first_version)
        return self._store

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

    def following(self, pids: Iterable[int]) -> set[int]:
        """Those of these processes that have a line of the roster and live. Contract: a look, not a lock."""
        self._check_open()
        return self._control.following(pids)

    def answer(self, worker_id: int, pid: int) -> tuple[int, int] | None:
        """What a worker's listener in process `pid` says: the version in use, and the version that it answered for.

        None if it never answered. Contract: a look without a system call; the last answer of one that has died stays.
        """
        self._check_open()
        return self._control.answers.of(worker_id, pid)

    def stir(self) -> None:
        """Wake all who listen to the bell, to look again, though there is nothing new: some may rest by now.

        Contract: one system call.
        """
        self._check_open()
        self._control.bell.stir()

    def stats(self) -> dict[str, int]:
        """Counters: version, slots, bytes of one of them and of all on the host, device rings and the bytes allocated
        on devices for them, launches of the gather kernel, subscribers."""
        self._check_open()
        reserved = len(self._store.writer.stamps) if self._store else 0
        slot_nbytes = self._store.head.slot_mapped_nbytes if self._store else 0
        rings = self._store.rings if self._store else None
        return {
            "version": self.version,
            "slots": reserved,
            "slot_nbytes": slot_nbytes,
            "nbytes": self._store.host.count() * slot_nbytes if self._store else 0,
            "rings": rings.count() if rings else 0,
            "device_nbytes": rings.nbytes() if rings else 0,
            "kernel_launches": rings.launches() if rings else 0,
            "subscribers": len(self.subscribers()),
        }

    def close(self) -> None:
        """End the channel; subscribers keep the weights they hold. A second call does nothing."""
        if not self._finalizer.alive:
            return  # closed, or the interpreter has come to its end
        with self._mutex:
            self._control.close(self._pid)  # interrupted, it is gone on with the next time
            self._finalizer.detach()
            self._closed_at = self.version
            self._store = None
            self._source = None
            if self._failure is not None:
                _log.warning("%s: a publish with wait=False had failed: %s", self.name, str(self._failure))
                self._failure = None
        serving, self._serving = self._serving, None
        if serving is not None:
            serving.join(_END_SECONDS)  # it has been called, and finds that all is over

    def __repr__(self) -> str:
        closed = not self._finalizer.alive
        return f"Publisher(name={self.name!r}, pid={self._pid}, version={self.version}, closed={closed})"

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

    def try_before_fork(self) -> bool:
        """No publish is in the middle of anything while the process is copied."""
        return self._mutex.acquire(timeout=forks.PATIENCE_SECONDS)

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
            raise ChannelClosed(f"Publisher {self.name!r} is closed; make another one")


def _end(control: Control, pid: int, mutex: threading.Lock) -> None:
    """The publisher is gone, or the interpreter ends: then other threads may be publishing."""
    taken = mutex.acquire(timeout=_END_SECONDS)
    try:
        control.close(pid)
    finally:
        if taken:
            mutex.release()


def check_options(
    *,
    dtype: torch.dtype | None = None,
    storage: str = "memfd",
    max_subscribers: int = 256,
    max_slots: int | None = None,
    checksum: bool = False,
    first_version: int = 1,
) -> None:
    """Raise what a Publisher made with these would raise."""
    whole = isinstance(first_version, int) and not isinstance(first_version, bool)
    if not whole or not 1 <= first_version <= _LAST_FIRST_VERSION:
        raise ShmSyncError(f"Expected first_version from 1 to {_LAST_FIRST_VERSION}, got {first_version!r}")
    if storage not in places.STORAGES:
        raise ShmSyncError(f"Expected storage as one of {places.STORAGES}, got {storage!r}")
    if checksum:
        hasher()
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ShmSyncError(f"Expected a floating dtype=, got {dtype}: only floating leaves are cast")
    if not 1 <= max_subscribers <= wire.MAX_SUBSCRIBERS:
        raise LimitError(f"Expected max_subscribers from 1 to {wire.MAX_SUBSCRIBERS}, got {max_subscribers}")
    if max_slots is not None and not 2 <= max_slots <= wire.MAX_SLOTS:
        raise LimitError(f"Expected max_slots from 2 to {wire.MAX_SLOTS}, got {max_slots}")
