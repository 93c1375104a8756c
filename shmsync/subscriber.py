"""The subscriber: a reader of a channel."""

from __future__ import annotations

import collections
import os
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import nn

from . import faults, forks, ids, inheriting, moving, places, roster, segment, slots, sweep, verification, wire, written
from .bell import Bell
from .errors import (
    ChannelClosed,
    ChannelUnreachable,
    NothingPublished,
    PublisherGone,
    ShmSyncError,
    WaitTimeout,
)
from .handle import Handle
from .imports import Imports
from .layout import Layout
from .lease import Lease
from .leases import Locks
from .mapped import MappedData, MappedSlot
from .pages import PrivatePages
from .passing import Passing
from .performer import Performer
from .roster import RosterLine
from .switching import LOOK_SECONDS, acquire_on_host, has_come
from .wishing import Wishing
from .written import Written

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .binding import Binding

_NO_DATA = memoryview(bytes(8)).cast("Q")


class Subscriber:
    """Follows a channel: takes leases, and binds modules so that their parameters alias the newest weights.

    ``handle``: a Handle or its text. ``worker_id``: also follow what is published to this worker alone. ``name``: for
    people.
    ``listed``: take a line in the roster; False for one that only watches others. ``counted``: the line says that this
    is the worker; False for a process that only belongs to it, and whose lag is nobody's concern.

    Raises ChannelUnreachable, PublisherGone, ChannelCorrupt, SubscribersExhausted, WorkerIdError.
    Contract: copies nothing; never blocks the publisher or another subscriber; may be used from several threads; if
    this process dies, the kernel ends its leases.
    """

    def __init__(
        self,
        handle: Handle | str,
        *,
        worker_id: int | None = None,
        name: str | None = None,
        listed: bool = True,
        counted: bool = True,
    ) -> None:
        self.handle = Handle.parse(handle) if isinstance(handle, str) else handle
        self.worker_id = worker_id
        self.name = name or f"subscriber-{os.getpid()}"
        self.handle.check_reachable()
        self._pid = os.getpid()
        self._counted = counted
        with forks.making():
            self._start(listed)
            forks.watch(self)

    def _start(self, listed: bool) -> None:
        self._mutex: Any = threading.RLock()
        # Held by who binds, takes a lease, moves to another channel, closes or forks: one of them at a time.
        self._life = threading.RLock()
        self._released: collections.deque[int] = collections.deque()
        self._data: MappedData | None = None
        self._written = Written()
        self._bindings: list[Any] = []
        self._used = 0
        self._forwards = 0
        self._moving = False  # to another channel: no switch now
        self._fork = inheriting.Fork()
        self._absent = 0  # the word of a version whose bytes are still to come to the memory where they are needed
        self._passing = Passing()
        self._pass_due = False
        self._imports: Imports | None = None
        self._wishing = Wishing()
        self._warned_moved = False
        self._locks = Locks(places.open_ctl(self.handle, os.O_RDONLY))
        self._open, self._listed = True, listed
        self._own()
        try:
            self._join(listed)
        except BaseException:
            self._end()
            raise

    def _join(self, listed: bool) -> None:
        faults.at("attach.open")
        try:
            fd = segment.reopen(self._locks.fd, os.O_RDWR)
        except OSError as error:
            raise ChannelUnreachable(
                f"Process {os.getpid()} may read, but not write the channel of pid {self.handle.pid} "
                f"({self.handle.path or 'in memory'}): {error.strerror}. Subscribers write a line of the roster: mount "
                "the directory writable"
            ) from None
        try:
            size = os.fstat(fd).st_size
            self._head = wire.parse_ctl(os.pread(fd, wire.PAGE, 0), size)
            if self._head.nonce.hex() != self.handle.nonce:
                raise PublisherGone(
                    f"The channel of pid {self.handle.pid} has ended; another one lives in its place: "
                    "get a handle from the publisher that runs now"
                )
            if self.worker_id is not None:
                (self.worker_id,) = ids.resolve([self.worker_id], self._head.subscribers)
            self._ctl: segment.Mapping | None = segment.Mapping(
                fd, 0, size, prot=segment.PROT_READ | segment.PROT_WRITE, flags=segment.MAP_SHARED
            )
            faults.at("attach.claim")
            # The mapping keeps the description, and with it the claim on the line, after the descriptor is closed.
            self._line = (
                roster.claim(
                    self._ctl, Locks(fd), self._head.subscribers, self.worker_id if self._counted else None, self.name
                )
                if listed
                else None
            )
        finally:
            os.close(fd)
        faults.at("attach.claimed")
        self._data_word = self._ctl.words(wire.CTL_DATA_OFFSET, 1)
        self.bell: Bell | None = Bell(self._ctl)
        if listed:
            Bell(self._ctl, wire.CTL_WISHES_OFFSET).call()  # a publisher with rings on devices sees who needs the host

    # --- what there is to see

    @property
    def version(self) -> int:
        """The version in use: of the bound modules, or of the newest lease; 0 = none yet."""
        return self._used

    @property
    def seen(self) -> int:
        """The newest version that is addressed to this subscriber.

        Contract: after the first call two memory reads and a store to the roster, no system call.
        """
        version = self.offered()
        if version and self._line is not None:
            self._line.saw(version)
        return version

    def offered(self) -> int:
        """As `seen`, but of no use here, and so it is not said on the roster."""
        self._check_open()
        data = self._look_for_data()
        return slots.version_of(data.newest()) if data is not None else 0

    @property
    def lag(self) -> int:
        """How many versions the one in use is behind the newest addressed to this subscriber."""
        return max(0, self.seen - self._used)

    @property
    def layout(self) -> Layout | None:
        """The channel's table of leaves, or None before the publisher has weights."""
        self._check_open()
        data = self._look_for_data()
        return data.head.layout if data else None

    def publisher_alive(self) -> bool:
        """Whether the channel's owner still lives and has not closed it."""
        with self._locked():  # or close() might close the descriptor between the check and the look
            self._check_open()
            assert self._ctl is not None
            return self._locks.owner_alive() and not self._ctl.words(wire.CTL_CLOSED_OFFSET, 1)[0]

    def peers(self) -> list[RosterLine]:
        """The roster lines of all live subscribers of the channel."""
        with self._locked():
            self._check_open()
            assert self._ctl is not None
            return roster.read(self._ctl, self._locks, self._head.subscribers)

    def stats(self) -> dict[str, int]:
        """Counters: version, seen, lag, forwards, mapped slots (on the host, on devices), leases held."""
        held = len(self._data.holder.counts) if self._data else 0
        mapped = len(self._data.mapped) if self._data else 0
        return {
            "version": self._used,
            "seen": self.seen,
            "lag": self.lag,
            "forwards": self._forwards,
            "slots_mapped": mapped,
            "slots_leased": held,
            "device_slots_mapped": self._imports.count() if self._imports is not None else 0,
        }

    # --- using the weights

    def bind(self, modules: nn.Module | Mapping[str, nn.Module], mode: str = "auto") -> Binding:
        """Let the parameters of a module follow the channel. Several models: a dict by their names in the channel.

        ``mode``: "map" (parameters alias the shared slot), "copy" (they keep their storage; cast and copied between two
        forwards), "auto" (map wherever device and dtype allow it). A module that is bound already is moved.
        Raises LayoutMismatch or BindingError; at version 0 the module keeps its own weights.
        Contract: Parameter objects keep their identity, flags, hooks and ties; copies no mapped bytes; a forward that
        other threads have begun before this is not known, and would see its parameters change.
        """
        from .binding import bind  # binding stands above this module: it knows subscribers, not the other way round

        with self._life:
            self._check_open()
            return bind(self, modules, mode)

    def lease(self) -> Lease:
        """A hold on the newest weights, on the host. Raises NothingPublished at version 0; where they were published on
        devices only, WaitTimeout if the publisher does not bring them within 10 s."""
        with self._life:
            self._check_open()
            word = acquire_on_host(self)
            if not word:
                raise NothingPublished("Nothing is published on the channel yet; wait(1) waits for the first version")
            if not self._bindings:
                self._uses(slots.version_of(word))
            return Lease(self, word)

    def wait(self, version: int, timeout: float | None = None) -> int:
        """Wait until `version` or a newer one is addressed to this subscriber; returns which.

        ``timeout`` in seconds, None = for ever. Raises WaitTimeout, or PublisherGone if the publisher ends meanwhile.
        """
        self._check_open()
        deadline = None if timeout is None else time.monotonic() + timeout
        bell = self.bell
        if bell is None:
            raise ChannelClosed(f"Subscriber {self.name!r} is closed; make another one")
        while True:
            count = bell.count  # before the look at the rows
            if (seen := self.seen) >= version:
                return seen
            if not self.publisher_alive() and self.seen < version:
                raise PublisherGone(
                    f"The publisher, pid {self.handle.pid}, has ended at version {self.seen}; version "
                    f"{version} will not come"
                )
            if deadline is not None and time.monotonic() > deadline:
                raise WaitTimeout(f"Expected version {version} within {timeout} s, got version {seen}")
            left = LOOK_SECONDS if deadline is None else min(LOOK_SECONDS, deadline - time.monotonic())
            bell.wait(count, max(0.0, left))

    def refresh(self) -> int:
        """Let all bindings switch now, between two forwards; the version in use afterwards.

        Contract: waits at most 100 ms per binding for running forwards; if they go on, they switch at their next entry.
        """
        self._check_open()
        for binding in list(self._bindings):
            binding.refresh()
        return self._used

    def reattach(self, handle: Handle | str) -> int:
        """Follow a later channel from now on: that of a trainer which was started anew, say. The version in use then.

        With the handle of its own channel it only refreshes.
        Bound modules come along, on their newest weights there, or with the values that they have if there are none.
        Raises what the constructor raises, ChannelError for a channel that is older than this one's, LayoutMismatch or
        BindingError if a bound module does not fit, ShmSyncError while leases are held or in the middle of a forward,
        WaitTimeout if another thread's forward does not end within 10 s: then nothing has changed.
        Contract: copies the mapped weights; bind(), lease(), close() and forks of other threads wait for its end.
        """
        handle = Handle.parse(handle) if isinstance(handle, str) else handle
        with self._life:
            self._check_open()
            if handle.nonce != self.handle.nonce:
                moving.move(self, handle)
            return self.refresh()

    def verify(self) -> list[int]:
        """Compare the weights that are leased here, and the newest, with the checksums that were published with them.

        The versions that were compared. Raises ChannelCorrupt, naming the leaves that differ, NothingPublished, or
        ShmSyncError if the publisher was made without ``checksum=True``.
        Contract: reads every byte as forwards here see it; holds leases meanwhile; blocks nobody.
        """
        with self._life:
            return verification.verify(self)

    def close(self) -> None:
        """Unbind all modules (they keep their values) and let go of the channel. A second call does nothing.

        A lease that is still held keeps its slot until it ends.
        Contract: waits up to 10 s per binding for other threads' forwards; copies the mapped weights.
        """
        with self._life:
            self._close()

    def _close(self) -> None:
        faults.at("close.unbind")
        for binding in list(self._bindings):
            binding.unbind()
        faults.at("close.let_go")
        self.let_pass(wait=True)
        self._enter()
        self._open = False
        self._imports = None  # each mapping ends with the last tensor over it
        bell, line = self.bell, self._line
        calls = Bell(self._ctl, wire.CTL_WISHES_OFFSET) if self._ctl is not None and line is not None else None
        self._forget_ctl()
        self._leave()
        if line is not None:
            line.left()
        if calls is not None:
            calls.call()  # nobody wishes for that any more
        if bell is not None:
            bell.stir()  # who waits in this process finds it closed

    def __repr__(self) -> str:
        followed = f"name={self.name!r}, worker_id={self.worker_id}, publisher_pid={self.handle.pid}"
        return f"Subscriber({followed}, version={self.version}, closed={not self._open})"

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise ShmSyncError("A subscriber belongs to its process; send its .handle and make another Subscriber there")

    # --- for bindings and leases of this package

    def has_news(self, word: int) -> bool:
        """Whether the rows point to something newer than `word`. The hot path: no system call, no lock."""
        data = self._data or self._look_for_data()
        if data is None or self._moving:
            return False
        newest = data.newest()
        return newest > word and (newest != self._absent or has_come(data, newest))

    def wish(self) -> None:
        """Tell the publisher on which devices this subscriber's modules are, and whether it needs the host."""
        self._wishing.tell(self)

    def let_pass(self, wait: bool = False) -> None:
        """End the leases whose readers' streams have come to their ends, or wait for that. What the publisher wants
        back, and nobody here uses any more, is unmapped."""
        with self._locked():
            self._released.extend(self._passing.passed(wait))
        self.unmap_retired()

    def unmap_retired(self) -> None:
        """Give mappings back that the publisher wants to have back."""
        if self._imports is not None and self._data is not None:
            self._imports.unmap_retired(set(self._data.holder.counts))

    def _pass_later(self) -> None:
        """Have somebody look again soon: one entry in the sweep's queue, however many ask for it."""
        if self._passing and not self._pass_due:
            self._pass_due = True
            sweep.later(self._let_pass_now, 0)

    def _let_pass_now(self, _: int) -> None:
        self._pass_due = False
        self.let_pass()
        self._pass_later()

    def release(self, bound: slots.Bound) -> None:
        """End a binding's lease, after its parameters have left the slot."""
        if bound.word and self._data is not None:
            slot, bound.word = slots.slot_of(bound.word), 0
            self._run(self._data, slots.release(self._data.holder, slot))

    def answer(self, version: int) -> None:
        """Tell the publisher, without a message, that `version` was seen and all is done about it."""
        line = self._line
        if line is not None:
            line.answered(version)
        self.sweep_left()

    def sweep_left(self) -> None:
        """Have the slots swept that switches have left. It wakes a thread; nobody should have to wait for that."""
        if self._written.left:
            for slot in self._written.take_left():
                sweep.later(self.sweep, slot)
        if self._passing:
            self.let_pass()
            self._pass_later()

    def sweep(self, slot: int) -> None:
        """See whether a slot that was left has private pages."""
        written.sweep(self, slot)

    def ran(self) -> None:
        """Count a forward."""
        self._forwards += 1
        if self._line is not None:
            self._line.ran(self._forwards)
        self.sweep_left()

    def try_before_fork(self) -> bool:
        """Lock the leased slots on a fresh description too: the child's."""
        return inheriting.try_before_fork(self)

    def after_fork_in_parent(self) -> None:
        """Go on."""
        inheriting.in_parent(self)

    def after_fork_in_child(self) -> None:
        """Go on as a subscriber of its own, with the same leases and a line of its own."""
        inheriting.in_child(self)

    def _forget_ctl(self) -> None:
        """Let go of the roster, whose mapping holds the claim on the line."""
        self._line = self._ctl = self.bell = None
        self._data_word = _NO_DATA

    def _own(self) -> None:
        """Its descriptors go with this object."""
        self._end = weakref.finalize(self, _close, self._locks, self._written.pages)
        # At the interpreter's end other threads may still be in a forward, which needs its lease: the process's end
        # ends it.
        self._end.atexit = False

    def _uses(self, version: int) -> None:
        self._used = version
        if self._line is not None:
            self._line.saw(version)
            self._line.switched(version)  # last: who waits for a worker looks at this

    def _layout(self) -> Layout:
        return self._data_now().head.layout

    def _data_now(self) -> MappedData:
        data = self._find_data()
        if data is None:
            raise ChannelClosed("The subscriber is closed")
        return data

    def _look_for_data(self) -> MappedData | None:
        """As `_find_data`, but a publisher that has ended before its first weights were mapped is no news."""
        try:
            return self._find_data()
        except PublisherGone:
            return None

    def _enter(self) -> None:
        """Take the mutex. Its uses are never nested: what this thread has already, an interrupt has left to it."""
        if not self._mutex._is_owned():
            self._mutex.acquire()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def _find_data(self) -> MappedData | None:
        if self._data is None and self._open and self._data_word[0]:
            with self._locked():
                if self._data is None:
                    faults.at("attach.data")
                    fd = places.open_data(self.handle, self._data_word[0], os.O_RDONLY)
                    self._data = MappedData(fd, self._head, self.worker_id)
        return self._data

    def _slot(self, slot: int) -> MappedSlot:
        """The slot in this process's memory. Only under a lease: reading a slot without memory would give it some."""
        mapped = self._data_now().map(slot)
        if mapped.moved():
            if not self._warned_moved:
                self._warned_moved = True
                warnings.warn(
                    "Mapped weights were moved out of the channel, by share_memory() or by sending them through "
                    "torch.multiprocessing; they are mapped again. Send clones instead",
                    RuntimeWarning,
                    stacklevel=2,
                )
            mapped.rebuild(self._layout())
        return mapped

    def _run(self, data: MappedData, steps: slots.Steps[Any], point: Callable[[int], None] | None = None) -> Any:
        return slots.drive(steps, faults.watched("subscribe", Performer(self, data, point).perform))

    def _release_later(self, slot: int, mapped: MappedSlot) -> None:
        """Called when the last tensor of a lease dies, which may be in the middle of anything, the mutex held."""
        self._released.append(slot)
        if not self._mutex._is_owned() and self._mutex.acquire(blocking=False):
            self._leave()

    def _leave(self) -> None:
        """Let go of the mutex, but for what has come in meanwhile: leases whose last tensor died while it was held."""
        while self._mutex._is_owned():
            try:
                self._settle()
            finally:
                self._mutex.release()
            if not self._released or not self._mutex.acquire(blocking=False):
                return

    def _settle(self) -> None:
        """With the mutex held: end the leases that are over, and after close(), with the last of them, everything."""
        data = self._data
        while self._released and data is not None:
            slot = self._released.popleft()
            data.holder.counts[slot] -= 1
            if not data.holder.counts[slot]:
                del data.holder.counts[slot]
                self._locks.unlock(slot)
        if not self._open and (data is None or not data.holder.counts):
            self._end()
            self._data = None

    def _drop_private(self, slot: int) -> None:
        data = self._data
        if data is not None:
            self._written.drop(data.mapped.get(slot), data.head.layout)

    def _check_open(self) -> None:
        if not self._open:
            raise ChannelClosed(f"Subscriber {self.name!r} is closed; make another one")
        if os.getpid() != self._pid:
            raise ShmSyncError(
                f"Subscriber {self.name!r} belongs to process {self._pid}; make another one in process {os.getpid()}"
            )


def _close(locks: Locks, pages: PrivatePages) -> None:
    locks.close()
    pages.close()
