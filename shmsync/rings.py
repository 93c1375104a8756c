"""Device rings: the publisher's slots on accelerators, and who gets which bytes from where.

Slot s of every ring has the row, the lock and the leases of slot s. What differs is where its bytes are, and whether
they are there: a push is copied to the memories that subscribers wish for. Each ring says for each slot whose version
it holds, and a subscriber reads there only if that is the version that it has leased. So a ring's bytes of a slot that
is leased may be written, while it says that it holds none: that is how a newcomer is served with what was published
before.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from . import device, segment, wire
from .devicering import DeviceRing, sweep_parked
from .errors import DeviceError
from .gathering import Gatherer
from .hostring import HostRing
from .layout import Layout
from .ringtable import RingTable
from .roster import Wishes
from .sources import Changes

if TYPE_CHECKING:
    from .channel import Control

_log = logging.getLogger("shmsync")
Ring = HostRing | DeviceRing
# Whoever died with a wish is found out after so many pushes.
_LOOK_EVERY = 64


class _Push:
    """One push: the rings that get it, and what is left to be copied at its end."""

    def __init__(self, slot: int, given: Changes, source: int | None) -> None:
        self.slot, self.given, self.source = slot, given, source
        self.rest: list[int] = []
        self.rings: list[Ring] = []


class Rings:
    """All rings of a channel, the host's among them. For the publisher, under its mutex.

    Contract: makes contexts on the devices that weights are on, and on those that subscribers wish for; what it gets
    from a device is freed when nobody has it mapped any more.
    """

    def __init__(self, head: wire.DataHead, top: segment.Mapping, host: HostRing, control: Control, fd: int) -> None:
        self._head, self._top, self._host, self._control, self._fd = head, top, host, control, fd
        self._layout: Layout = head.layout
        self._table = RingTable(top)
        self._devices: dict[bytes, DeviceRing] = {}
        self._said: set[bytes] = set()
        self._reached: set[tuple[int, int]] = set()
        self._crowded: set[int] = set()
        self._streams: dict[int, device.Stream] = {}
        self._areas: dict[int, _Area] = {}
        self._gatherers: dict[int, Gatherer] = {}
        self._wishes = Wishes(True, frozenset())
        self._push: _Push | None = None
        self._pushes = 0
        self.rest: list[int] = []
        sweep_parked()
        self.look()

    # --- who wants what

    def look(self, wishes: Wishes | None = None) -> None:
        """See what the subscribers wish for; now and then without being told, since some die."""
        self._pushes += 1
        if wishes is None and not (self._control.wished() or self._pushes % _LOOK_EVERY == 1):
            return
        self._wishes = wishes or self._control.wishes()
        for uuid in self._wishes.devices:
            if uuid not in self._devices:
                self._add(uuid)
        for uuid, ring in self._devices.items():
            ring.wanted = uuid in self._wishes.devices

    def _add(self, uuid: bytes) -> None:
        """A ring on a device, if this process can reach it; if not, that may be another time."""
        try:
            index, why = device.index_of(uuid), device.reason()
            stream = self._stream(index) if index is not None and not why else None
        except DeviceError as error:
            stream, why = None, str(error)
        if stream is None:
            self._refuse(uuid, why or "this process does not see it (CUDA_VISIBLE_DEVICES)")
            return
        number = self._table.find(uuid)
        number = self._table.add(uuid) if number is None else number
        if number is None:
            self._refuse(uuid, "the channel has all the rings that it can have")
            return
        segment.reserve(self._fd, self._head.ring_offset(number), wire.ring_stride(self._head.slots))
        self._devices[uuid] = DeviceRing(number, self._head, self._top, self._control.locks, stream)
        self._table.set_state(number, wire.SERVED)
        self._host.pin(stream.index)

    def _wanted(self) -> list[Ring]:
        wanted: list[Ring] = [ring for ring in self._devices.values() if ring.wanted]
        if self._wishes.host or not wanted:
            wanted.insert(0, self._host)
        return wanted

    def _all(self) -> list[Ring]:
        return [self._host, *self._devices.values()]

    # --- a push

    def fill(self, slot: int, given: Changes, source: int | None) -> None:
        """Have what is given copied to where it is wanted. ``source``: the newest slot, that has the rest."""
        push = self._push = _Push(slot, given, source)
        self.rest = []
        parts = given.parts(device.memory_of)
        push.rings = self._served(push, parts)
        for ring in self._all():
            if ring not in push.rings:
                ring.synced.discard(slot)
        gathered = {i: self._gather(push, i, places) for i, places in parts.items() if self._has_room(push, i)}
        # The others come to the host one by one, by torch, and so do those from another kind of device.
        on_host = [place for memory, places in parts.items() if memory not in gathered for place in places]
        if self._host in push.rings and on_host:
            places = sorted(on_host)
            if given.on_host:
                self._host.fill(slot, given.numbers, given.tensors, given.token, given.addresses)
            else:
                self._host.fill(slot, [given.numbers[i] for i in places], [given.tensors[i] for i in places])
        for index, area in gathered.items():
            self._spread(push, index, area, parts[index])
        if on_host:
            self._spread(push, device.HOST, self._host.address(slot), sorted(on_host))

    def _served(self, push: _Push, parts: Mapping[int, Sequence[int]]) -> list[Ring]:
        """The rings that get this push, each with memory for its slot."""
        rings = self._wanted()
        if any(memory < 0 for memory in parts) and self._host not in rings:
            rings.insert(0, self._host)  # what is on the host, or elsewhere, comes to the devices by way of it
        partial = push.source is not None and len(push.given.numbers) < len(self._layout)
        if partial and not any(self._holds(ring, push.source) for ring in rings):
            rings += [ring for ring in self._all() if self._holds(ring, push.source)][:1]
        served = [ring for ring in rings if self._ensure(ring, push.slot)]
        if len(served) < len(rings) and self._host not in served:
            self._host.ensure(push.slot)
            served.insert(0, self._host)  # for those whose ring has no room
        return served

    def _ensure(self, ring: Ring, slot: int) -> bool:
        try:
            ring.ensure(slot)
        except DeviceError as error:
            ring.synced.discard(slot)
            for uuid in [uuid for uuid, known in self._devices.items() if known is ring]:
                self._refuse(uuid, f"slot {slot} has no room there ({error})")
            return False
        return True

    def _refuse(self, uuid: bytes, why: str) -> None:
        """Say once per device why its subscribers copy from the host."""
        if uuid not in self._said:
            self._said.add(uuid)
            _log.warning("%s: no ring on device %s: %s. Subscribers there copy", self._control.name, uuid.hex(), why)

    def _holds(self, ring: Ring, slot: int | None) -> bool:
        """Whether it has the whole of what was published in a slot."""
        return slot is not None and ring.version(slot) != 0

    def _gather(self, push: _Push, index: int, places: Sequence[int]) -> int:
        """Bring a device's tensors into one piece of memory there: its ring's slot, or an area of its own. Where that
        begins."""
        ring = self._on(index, push.rings)
        stream = self._stream(index)
        if ring is not None:
            address, views = ring.address(push.slot), ring.views(push.slot)
        else:
            area = self._area(index)
            address, views = area.memory.address, area.views
        given, gatherer = push.given, self._gatherer(index)
        all_here = len(places) == len(given.numbers)
        numbers = given.numbers if all_here else [given.numbers[i] for i in places]
        tensors = given.tensors if all_here else [given.tensors[i] for i in places]
        gatherer.prepare(numbers, tensors, given.token, given.addresses if all_here else None)
        trainer = device.torch_side.stream(index)
        stream.wait(device.Event(index, trainer))  # what computes the weights may still be queued
        gatherer.run(address, views, tensors)
        device.wait(index, trainer, device.Event(index, stream.handle))  # what changes them comes after this
        return address

    def _has_room(self, push: _Push, memory: int) -> bool:
        """Whether a device's tensors can be brought together there."""
        if memory < 0 or self._on(memory, push.rings) is not None:
            return memory >= 0
        try:
            self._area(memory)
        except DeviceError as error:
            if memory not in self._crowded:
                self._crowded.add(memory)
                _log.warning(
                    "%s: %s has no room to bring the weights together (%s); they are copied to the host one by one, "
                    "which is slower",
                    self._control.name,
                    device.name_of(memory),
                    str(error),
                )
            if self._host not in push.rings:
                self._host.ensure(push.slot)
                push.rings.insert(0, self._host)
            return False
        return True

    def _on(self, index: int, rings: Sequence[Ring]) -> DeviceRing | None:
        return next((ring for ring in rings if isinstance(ring, DeviceRing) and ring.memory == index), None)

    def _spread(self, push: _Push, memory: int, base: int, places: Sequence[int]) -> None:
        """From where leaves were brought together to all other rings, in as few pieces as their places allow."""
        runs = _runs(self._layout, [push.given.numbers[i] for i in places])
        for ring in push.rings:
            if ring.memory != memory:
                self._reach(memory, ring.memory)
                into = ring.address(push.slot)
                self._stream(memory if memory >= 0 else ring.memory).copy_batch(
                    [into + begin for begin, _ in runs],
                    [base + begin for begin, _ in runs],
                    [nbytes for _, nbytes in runs],
                )

    def _reach(self, source: int, destination: int) -> None:
        """Let a device copy to another one directly, where the two can; else the driver goes by way of the host."""
        if source < 0 or destination < 0 or (source, destination) in self._reached:
            return
        self._reached.add((source, destination))
        try:
            with device.attempt(source):
                direct = device.runtime.can_access_peer(source, destination)
                if direct:
                    device.runtime.enable_peer_access(source, destination)
        except DeviceError as error:
            direct, why = False, f" ({error})"
        else:
            why = ""
        if not direct:
            _log.warning(
                "%s: %s cannot copy to %s directly%s; the driver goes by way of the host, which is slower",
                self._control.name,
                device.name_of(source),
                device.name_of(destination),
                why,
            )

    def complete(self, slot: int, version: int, written: list[int]) -> None:
        """Wait until all copies of the push are done; then the rings say what they hold."""
        push = self._push
        assert push is not None
        self._add_rest(push)
        self._synchronize()
        self._push = None
        for ring in push.rings:
            new = slot not in ring.synced
            ring.store_version(slot, version, None if new else written)
            ring.synced.add(slot)

    def _add_rest(self, push: _Push) -> None:
        """What the caller has not brought: from the newest slot, or all of it from a ring that is complete."""
        if push.source is None or len(push.given.numbers) == len(self._layout):
            return
        given = set(push.given.numbers)
        missing = [number for number in range(len(self._layout)) if number not in given]
        base: Ring | None = None
        whole: list[Ring] = []
        for ring in push.rings:
            if self._holds(ring, push.source):
                ring.copy_over(push.slot, push.source, self.rest if push.slot in ring.synced else missing)
                base = base or ring
            else:
                whole.append(ring)
        if base is not None and whole:
            self._synchronize()
            for ring in whole:
                self._copy_whole(base, ring, push.slot)
        elif whole:  # the ring that has the rest has no room for this push
            base = next((ring for ring in self._all() if self._holds(ring, push.source)), None)
            if base is None:
                raise DeviceError("No ring holds the newest version any more, so a partial push can't complete it")
            for ring in whole:
                self._copy_missing(base, push.source, ring, push.slot, missing)

    def _copy_missing(self, source: Ring, old: int, ring: Ring, slot: int, numbers: Sequence[int]) -> None:
        runs = _runs(self._layout, numbers)
        out_of, into = source.address(old), ring.address(slot)
        self._stream(max(source.memory, ring.memory)).copy_batch(
            [into + begin for begin, _ in runs], [out_of + begin for begin, _ in runs], [nbytes for _, nbytes in runs]
        )

    def _copy_whole(self, source: Ring, ring: Ring, slot: int) -> None:
        stream = self._stream(max(source.memory, ring.memory))
        stream.copy(ring.address(slot), source.address(slot), self._layout.slot_nbytes)

    def _synchronize(self) -> None:
        errors = []
        for stream in self._streams.values():
            try:
                stream.synchronize()
            except DeviceError as error:  # the others are waited for all the same
                errors.append(error)
        if errors:
            raise errors[0]

    # --- what was published before

    def bring(self, versions: Mapping[int, int]) -> bool:
        """Copy live slots to the rings that are wanted and do not hold them. Whether anything was."""
        copied = False
        for slot, version in versions.items():
            holding = [ring for ring in self._all() if version and ring.version(slot) == version]
            for ring in self._wanted() if holding else ():
                if ring not in holding and self._ensure(ring, slot):
                    try:
                        self._copy_whole(holding[0], ring, slot)
                    finally:
                        self._synchronize()
                    ring.store_version(slot, version)
                    ring.synced.add(slot)
                    copied = True
        return copied

    def settle(self) -> None:
        """After a push that failed: nothing may still be copied into its slot when that is unlocked."""
        if self._push is not None:
            self._push = None
            with suppress(DeviceError):  # the push's own error is the one to hear of
                self._synchronize()

    def blank(self, slot: int) -> None:
        """The slot is about to change: no device ring holds it any more."""
        for ring in self._devices.values():
            ring.store_version(slot, 0)

    def drop(self, slot: int) -> None:
        """The slot goes back. Under its exclusive lock."""
        for ring in self._devices.values():
            ring.drop(slot)

    def reclaim(self, live: set[int]) -> None:
        """Free what was retired and is not mapped any more."""
        for ring in self._devices.values():
            ring.reclaim(live)

    def launches(self) -> int:
        """How often our own kernel has brought a device's tensors together."""
        return sum(gatherer.launches for gatherer in self._gatherers.values())

    def nbytes(self) -> int:
        """The bytes that are allocated on devices for weights."""
        areas = sum(area.memory.nbytes for area in list(self._areas.values()))
        return areas + sum(ring.nbytes() for ring in list(self._devices.values()))

    def count(self) -> int:
        """How many device rings there are."""
        return len(self._devices)

    def close(self) -> None:
        """Let everything go; what a subscriber still has mapped is kept until it has let go, or until this process
        ends."""
        try:
            self._synchronize()
        except DeviceError as error:
            _log.warning("%s: at its end, %s", self._control.name, error)
        for ring in self._devices.values():
            ring.close(self._control.more_locks)
        for area in self._areas.values():
            area.memory.free()
        for gatherer in self._gatherers.values():
            gatherer.free()
        self._devices.clear()
        self._areas.clear()
        self._gatherers.clear()
        self._streams.clear()

    def _stream(self, index: int) -> device.Stream:
        if index not in self._streams:
            self._streams[index] = device.Stream(index)
        return self._streams[index]

    def _gatherer(self, index: int) -> Gatherer:
        if index not in self._gatherers:
            self._gatherers[index] = Gatherer(self._stream(index), self._layout)
        return self._gatherers[index]

    def _area(self, index: int) -> _Area:
        if index not in self._areas:
            self._areas[index] = _Area(index, self._layout)
            self._host.pin(index)
        return self._areas[index]


class _Area:
    """Where the tensors of a device without a ring are brought together."""

    def __init__(self, index: int, layout: Layout) -> None:
        self.memory = device.Memory(index, max(layout.slot_nbytes, 1))
        self.views = device.views(self.memory.address, index, layout, self.memory)


def _runs(layout: Layout, numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Leaves as (begin, nbytes) of the slot; neighbours together, with the padding between them."""
    runs: list[tuple[int, int]] = []
    last = -2
    for number in numbers:
        leaf = layout.leaves[number]
        if number == last + 1:
            begin = runs[-1][0]
            runs[-1] = begin, leaf.offset + leaf.nbytes - begin
        else:
            runs.append((leaf.offset, leaf.nbytes))
        last = number
    return runs
