"""The channel as its publisher has it: the two segments, and the slot protocol's operations on them."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from . import device, faults, places, roster, segment, slots, wire
from .bell import Bell
from .errors import SlotsExhausted
from .handle import Handle
from .hostring import HostRing
from .layout import Layout, align
from .leases import Locks, holders
from .limits import check_file_size
from .rings import Rings
from .roster import RosterLine, Wishes
from .sources import Changes, Sources

_log = logging.getLogger("shmsync")
_ENTRY_WORDS = wire.SLOT_ENTRY_NBYTES // 8


class Control:
    """CTL and, once there are weights, DATA: the publisher's descriptors and mappings, apart so that a
    finalizer can close them."""

    def __init__(self, pid: int, subscribers: int, most_slots: int, name: str, storage: str = "memfd") -> None:
        self.head = wire.CtlHead(pid, secrets.token_bytes(wire.NONCE_NBYTES), time.time_ns(), subscribers, most_slots)
        self.name = name
        self.store: Store | None = None
        check_file_size(self.head.nbytes, "The control segment")
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
        self.calls = Bell(self.mapping, wire.CTL_WISHES_OFFSET)  # by which subscribers call the publisher
        self._heard = self.calls.count
        self.answers = roster.Answers(self.mapping, self.head.subscribers)
        raw = wire.pack_ctl(self.head)
        memoryview(self.mapping.buffer).cast("B")[: len(raw)] = raw
        self.locks = Locks(segment.reopen(self._fd, os.O_RDWR))
        self.locks.own()
        faults.at("make.ctl")
        self.place.show(places.CTL, self._fd)  # not before it is locked: without an owner it would be cleared away
        self.handle: Handle = self.place.handle(self._fd, self.head.nonce, self.head.epoch)

    def define(self, layout: Layout, timeout: float, checksum: bool, first_version: int = 1) -> Store:
        """Make DATA and let CTL name it."""
        self.store = Store(layout, self, timeout, checksum, first_version)
        self.mapping.words(wire.CTL_DATA_OFFSET, 1)[0] = self.store.fd + 1
        return self.store

    def roster(self) -> list[RosterLine]:
        return roster.read(self.mapping, self.locks, self.head.subscribers)

    def following(self, pids: Iterable[int]) -> set[int]:
        """Those of these processes that follow the channel, by its roster."""
        return roster.following(self.mapping, self.locks, self.head.subscribers, pids)

    def wished(self) -> bool:
        """Whether a subscriber has come, or has other wishes, since `wishes` was asked. Contract: a look at a word."""
        return self.calls.count != self._heard

    def wishes(self) -> Wishes:
        """What the subscribers wish for."""
        self._heard = self.calls.count
        return roster.wishes(self.mapping, self.locks, self.head.subscribers)

    def more_locks(self) -> Locks:
        """The locks by another description, which outlives this object."""
        return Locks(segment.reopen(self._fd, os.O_RDWR))

    def holders(self, versions: memoryview) -> str:
        """Who holds leases on which slots, by the kernel's account: for an error's text."""
        lines = {line.pid: line for line in self.roster()}
        texts = []
        for slot, pids in sorted(holders(self._fd).items()):
            for pid in sorted(pids):
                line = lines.get(pid)
                who = f" (worker {line.worker_id}, {line.name!r})" if line is not None else ""
                texts.append(f"pid {pid}{who} holds version {versions[slot * _ENTRY_WORDS]} in slot {slot}")
        return ", ".join(texts)

    def abandon(self) -> None:
        """Close the descriptors and nothing else."""
        self.locks.close()
        os.close(self._fd)
        if self.store is not None:
            os.close(self.store.fd)

    def close(self, pid: int) -> None:
        """Contract: in a forked child it does nothing, the channel is the parent's. If it is interrupted, the next call
        goes on with it."""
        if os.getpid() != pid:
            return
        faults.at("end.close")
        if hasattr(self, "mapping"):
            self.mapping.words(wire.CTL_CLOSED_OFFSET, 1)[0] = 1
            faults.at("end.closed")
            self.bell.ring()
            self.calls.call()  # who serves wishes waits for the mutex, and finds that all is over
        if self.store is None or self._hide(places.DATA, self.store.fd):
            faults.at("end.hidden_data")
            self._hide(places.CTL, self._fd)
        for name in ("mapping", "bell", "answers", "calls"):
            vars(self).pop(name, None)  # gone, even if somebody keeps the closed publisher
        if self.store is not None:
            self.store.close()
        self.locks.close()
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _hide(self, ending: str, fd: int) -> bool:
        if fd < 0:
            return True
        try:
            self.place.hide(ending, fd)
        except OSError as error:
            # The end is nobody's to stop. With the owner's lock gone, the next publisher there or `gc` can try again.
            _log.warning("Channel %r has ended, but its %s file stays: %s", self.name, ending, error)
            return False
        return True


class Published(NamedTuple):
    """What a publish did, or has begun: ``rest()`` does what is left, under the publisher's mutex, which must not be
    given away before."""

    version: int
    nbytes: int
    leaves: int
    rest: Callable[[], int] | None = None


class Store:
    """DATA: performs the operations of the slot protocol on real words, locks and bytes."""

    def __init__(
        self, layout: Layout, control: Control, timeout: float, checksum: bool, first_version: int = 1
    ) -> None:
        raw, self.head = wire.pack_data(layout, control.head, checksum)
        check_file_size(self.head.nbytes, "The data segment")
        self.writer = slots.Writer(len(layout), control.head.slots, version=first_version - 1)
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
        self._versions = self._top.words(self.head.table_offset, self.head.slots * _ENTRY_WORDS)
        self.host = HostRing(self.fd, self.head, self._top, self._place, self._control.name)
        self.rings: Rings | None = None
        self._warned = False
        self._given: Changes | None = None
        self._written: list[int] = []
        self._deadline = 0.0
        self._end_of_rows = 1  # no row from here on was ever stored
        faults.at("make.data")
        self._place.show(places.DATA, self.fd)

    def publish(self, rows: list[int], given: Changes, wait: bool = True) -> Published:
        """Publish. Without ``wait`` it may be that copies on devices are not done yet: then there is a rest."""
        self._look_at_devices(given)
        self._given, self._written = given, []
        self._end_of_rows = max(self._end_of_rows, rows[-1] + 1)
        self._deadline = time.monotonic() + self._timeout
        steps = slots.publish(self.writer, rows, given.array)
        if wait or self.rings is None:
            return Published(self._run_publish(steps), *self._amount(given))
        perform = faults.watched("publish", self._perform)
        try:
            paused = slots.drive(slots.pausing(steps, _completes), perform)
        except BaseException:
            self._end_publish()
            raise
        assert paused is not None  # every publish stores its version
        return Published(
            self.writer.version,
            *self._amount(given),
            rest=lambda: self._run_publish(slots.resuming(steps, paused)),
        )

    def _run_publish(self, steps: slots.Steps[int]) -> int:
        try:
            word = slots.drive(steps, faults.watched("publish", self._perform))
        finally:
            self._end_publish()
        for spare in slots.spare_slots(self.writer):
            if slots.drive(slots.give_back(self.writer, spare), faults.watched("give_back", self._perform)):
                break  # one at a time: what is spare now may be needed by the next burst
        if self.rings is not None:
            self.rings.reclaim(self._live())
        return slots.version_of(word)

    def _end_publish(self) -> None:
        self._given = None
        faults.at("publish.ring")
        self._control.bell.ring()  # also after an exception: the push may have happened

    def _amount(self, given: Changes) -> tuple[int, int]:
        """The bytes and leaves that are written: what was copied over follows what was given."""
        rest = self._written[len(given.numbers) :]
        return given.nbytes + sum(self.head.layout.leaves[i].nbytes for i in rest), len(self._written)

    def addressed(self, row: int) -> int:
        return slots.version_of(slots.follow((self._rows[slots.EVERYBODY], self._rows[row])))

    def _live(self) -> set[int]:
        """The slots that a live row points to."""
        return slots.drive(slots.live_slots(self.writer), self._perform)

    def bring(self) -> None:
        """Let subscribers have what is published in the memories that they wish for. Not during a publish."""
        if self.rings is not None:
            self.rings.look()
            if self.rings.bring({slot: self._versions[slot * _ENTRY_WORDS] for slot in self._live()}):
                self._control.bell.ring()

    def _look_at_devices(self, given: Changes) -> None:
        """Have rings on devices from when on the weights are on one, or a subscriber wishes for one."""
        if given.on_host is None:
            given.on_host = device.torch_side.all_on_host(given.tensors)
        wished = self._control.wished()
        if self.rings is None and not given.on_host:
            why = device.reason()
            if why is None:
                self.rings = self._make_rings()
            elif not self._warned:
                self._warned = True
                _log.warning(
                    "%s: weights on devices are copied to the host one by one: %s. `python -m shmsync doctor` tells "
                    "what is missing",
                    self._control.name,
                    why,
                )
        if wished or self.rings is not None:
            wishes = self._control.wishes() if wished or self.rings is None else None
            if self.rings is None and wishes is not None and wishes.devices:
                self.rings = self._make_rings()
            if self.rings is not None:
                self.rings.look(wishes)

    def _make_rings(self) -> Rings:
        return Rings(self.head, self._top, self.host, self._control, self.fd)

    def _perform(self, operation: tuple[Any, ...]) -> Any:
        return getattr(self, operation[0])(*operation[1:])

    def load_rows(self) -> list[int]:
        return self._rows[: self._end_of_rows].tolist()

    def store_row(self, row: int, word: int) -> None:
        self._rows[row] = word

    def store_slot_version(self, slot: int, version: int) -> None:
        if not version:
            self._versions[slot * _ENTRY_WORDS] = 0
            self.host.store_version(slot, 0)
            if self.rings is not None:
                self.rings.blank(slot)
            return
        if self.rings is not None:
            self.rings.complete(slot, version, self._written)
        else:
            self.host.store_version(slot, version, self._written)
            self.host.synced.add(slot)
        self._versions[slot * _ENTRY_WORDS] = version

    def try_exclusive(self, slot: int) -> bool:
        return self._locks.try_exclusive(slot)

    def unlock(self, slot: int) -> None:
        if self.rings is not None:
            self.rings.settle()
        self._locks.unlock(slot)

    def reserve(self, slot: int) -> None:
        """Give the slot memory on the host, unless devices may be enough: `Rings.fill` sees to that."""
        if self.rings is None:
            self.host.ensure(slot)

    def copy_in(self, slot: int, leaves: np.ndarray) -> None:
        given = self._given
        assert given is not None
        self._written += given.numbers
        if self.rings is not None:
            self.rings.fill(slot, given, slots.slot_of(self.writer.newest) if self.writer.newest else None)
            faults.at("publish.copied_half")
            return
        if faults.armed():
            half = len(given.numbers) // 2
            self.host.fill(slot, given.numbers[:half], given.tensors[:half])
            faults.at("publish.copied_half")
        self.host.fill(slot, given.numbers, given.tensors, given.token, given.addresses)

    def copy_over(self, slot: int, source: int, leaves: np.ndarray) -> None:
        numbers = leaves.tolist()
        self._written += numbers
        if self.rings is not None:
            self.rings.rest = numbers
            return
        self.host.copy_over(slot, source, numbers)

    def punch(self, slot: int) -> None:
        self.host.drop(slot)
        if self.rings is not None:
            self.rings.drop(slot)

    def wait(self) -> None:
        if time.monotonic() > self._deadline:
            raise SlotsExhausted(
                f"All {self.writer.max_slots} slots (max_slots) stayed leased for {self._timeout} s; "
                f"{self._control.holders(self._versions) or 'nobody seems to hold them now'}. "
                "Raise max_slots, or end the leases that are held"
            )
        time.sleep(0.001)

    def close(self) -> None:
        if self.rings is not None:
            self.rings.close()
        self.host.close()
        for name in ("_top", "_rows", "_versions"):
            vars(self).pop(name, None)
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)


def _completes(operation: tuple[Any, ...]) -> bool:
    """Whether it is the one that waits for the copies of a publish."""
    return operation[0] == "store_slot_version" and bool(operation[2])
