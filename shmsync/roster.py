"""The roster: one line per subscriber, for people, metrics, and the answers to the bell. Safety never depends on it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from . import wire
from .errors import SubscribersExhausted
from .leases import Locks
from .segment import Mapping

_FIELDS = {name: wire.offset_of(wire.ROSTER_LINE, name) // 8 for name in wire.ROSTER_LINE.names or ()}
_LINE_WORDS = wire.ROSTER_LINE.itemsize // 8


@dataclass(frozen=True)
class RosterLine:
    """What one live subscriber says of itself. Versions are numbers, `switched_seconds` is wall time (0 = never)."""

    line: int
    pid: int
    worker_id: int | None
    name: str
    used: int
    seen: int
    forwards: int
    switches: int
    switched_seconds: float

    @property
    def lag(self) -> int:
        """How many versions the one in use is behind what it has been offered."""
        return max(0, self.seen - self.used)


@dataclass(frozen=True)
class Wishes:
    """What all live subscribers want: bytes on the host, and rings on devices, by their UUIDs."""

    host: bool
    devices: frozenset[bytes]


class OwnLine:
    """A subscriber's own line. Contract: written by this subscriber only; stores never block."""

    def __init__(self, line: int, mapping: Mapping) -> None:
        self.line = line
        self._words = mapping.words(_offset(line), _LINE_WORDS)

    def saw(self, version: int) -> None:
        """The newest version that a row offered."""
        self._words[_FIELDS["seen"]] = version

    def switched(self, version: int) -> None:
        """The version now in use."""
        words = self._words
        words[_FIELDS["used"]] = version
        words[_FIELDS["switches"]] += 1
        words[_FIELDS["switched_ns"]] = time.time_ns()

    def answered(self, version: int) -> None:
        """The bell was heard, and this is the newest version that was seen then; what can be done about it is done."""
        self._words[_FIELDS["answered"]] = version

    def wishes(self, devices: Sequence[bytes], host: bool) -> None:
        """What this subscriber wants from now on; `Bell.call` tells the publisher to look."""
        raw = b"".join(devices).ljust(wire.MOST_WISHES * wire.UUID_NBYTES, b"\0")
        first = _FIELDS["devices"]
        self._words[first : first + len(raw) // 8] = memoryview(raw).cast("Q")
        self._words[_FIELDS["wish"]] = len(devices) | (0 if host else wire.WITHOUT_HOST)

    def left(self) -> None:
        """This subscriber is gone, even if something still keeps the line."""
        self._words[_FIELDS["answered"]] = self._words[_FIELDS["pid"]] = 0

    def ran(self, forwards: int) -> None:
        """How many forwards have begun."""
        self._words[_FIELDS["forwards"]] = forwards


def claim(mapping: Mapping, locks: Locks, subscribers: int, worker_id: int | None, name: str) -> OwnLine:
    """Take the first free line; `locks` must be on the description that `mapping` was made from.

    Raises SubscribersExhausted. Contract: the line is free again when the mapping is gone.
    """
    for line in range(subscribers):
        if locks.claim_line(line):
            record = np.zeros((), wire.ROSTER_LINE)
            record["pid"], record["worker"] = os.getpid(), -1 if worker_id is None else worker_id
            record["name"] = name.encode()[: wire.NAME_NBYTES]
            words = mapping.words(_offset(line), _LINE_WORDS)
            words[:] = memoryview(record.tobytes()).cast("Q")
            return OwnLine(line, mapping)
    raise SubscribersExhausted(
        f"All {subscribers} subscriber lines of the channel are taken; make the publisher with a larger "
        "max_subscribers=, or the updater or scheme with a larger max_workers="
    )


def read(mapping: Mapping, locks: Locks, subscribers: int) -> list[RosterLine]:
    """The lines of all live subscribers. Contract: `locks` on another description than any subscriber's."""
    raw = bytes(memoryview(mapping.buffer).cast("B")[wire.PAGE : wire.PAGE + subscribers * wire.ROSTER_LINE.itemsize])
    table = np.frombuffer(raw, wire.ROSTER_LINE)
    return [_line(int(n), table[n]) for n in np.flatnonzero(table["pid"]) if locks.line_alive(int(n))]


def following(mapping: Mapping, locks: Locks, subscribers: int, pids: Iterable[int]) -> set[int]:
    """Those of these processes that have a line and live. Contract: as `read`."""
    table = np.frombuffer(memoryview(mapping.buffer).cast("B"), wire.ROSTER_LINE, subscribers, wire.PAGE)
    return {pid for pid in pids if any(map(locks.line_alive, np.flatnonzero(table["pid"] == pid).tolist()))}


def wishes(mapping: Mapping, locks: Locks, subscribers: int) -> Wishes:
    """What the live subscribers want; who has said nothing wants the host. Contract: as `read`."""
    table = np.frombuffer(memoryview(mapping.buffer).cast("B"), wire.ROSTER_LINE, subscribers, wire.PAGE)
    host = False
    devices: set[bytes] = set()
    for number in np.flatnonzero(table["pid"]).tolist():
        if locks.line_alive(number):
            wish = int(table["wish"][number])
            host = host or not wish & wire.WITHOUT_HOST
            count = min(wish & 0xFF, wire.MOST_WISHES)
            devices.update(row.tobytes() for row in table["devices"][number][:count])
    return Wishes(host, frozenset(devices))


class Answers:
    """The answers to the bell, by worker and pid of who listens to it.

    Contract: looks, without a system call; the last answer of somebody who has died stays. Lines are remembered, since
    a trainer that waits looks every few microseconds.
    """

    def __init__(self, mapping: Mapping, subscribers: int) -> None:
        self._words = mapping.words(wire.PAGE, subscribers * _LINE_WORDS)
        self._lines: dict[tuple[int, int], int] = {}

    def of(self, worker: int, pid: int) -> tuple[int, int] | None:
        """The version in use, and the version that was answered for; None if nobody like that ever answered."""
        first = self._lines.get((worker, pid))
        if first is None or not self._is_of(first, worker, pid):
            self._find()
            first = self._lines.get((worker, pid))
            if first is None:
                return None
        # What was answered is read first: it is written last.
        answered = self._words[first + _FIELDS["answered"]]
        return self._words[first + _FIELDS["used"]], answered

    def _is_of(self, first: int, worker: int, pid: int) -> bool:
        return self._words[first + _FIELDS["pid"]] == pid and self._words[first + _FIELDS["worker"]] == worker

    def _find(self) -> None:
        """Go through all lines; of two of the same worker and process the one with the newer answer counts."""
        table = np.frombuffer(self._words, wire.ROSTER_LINE)
        answered = table["answered"].copy()
        numbers = np.flatnonzero(answered)
        order = numbers[np.argsort(answered[numbers])].tolist()
        self._lines = {(int(table["worker"][n]), int(table["pid"][n])): n * _LINE_WORDS for n in order}


def _line(number: int, record: np.void) -> RosterLine:
    worker = int(record["worker"])
    return RosterLine(
        line=number,
        pid=int(record["pid"]),
        worker_id=None if worker < 0 else worker,
        name=bytes(record["name"]).decode(errors="replace"),
        used=int(record["used"]),
        seen=int(record["seen"]),
        forwards=int(record["forwards"]),
        switches=int(record["switches"]),
        switched_seconds=int(record["switched_ns"]) / 1e9,
    )


def _offset(line: int) -> int:
    return wire.PAGE + line * wire.ROSTER_LINE.itemsize
