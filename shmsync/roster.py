"""The roster: one line per subscriber, for people, metrics, and the answers to the bell. Safety never depends on it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import numpy as np

from . import wire
from .errors import SubscribersExhausted
from .leases import Locks
from .segment import Mapping

_FIELDS = {name: wire.offset_of(wire.ROSTER_LINE, name) // 8 for name in wire.ROSTER_LINE.names or ()}


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


class OwnLine:
    """A subscriber's own line. Contract: written by this subscriber only; stores never block."""

    def __init__(self, line: int, mapping: Mapping) -> None:
        self.line = line
        self._words = mapping.words(_offset(line), wire.ROSTER_LINE.itemsize // 8)

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
            words = mapping.words(_offset(line), wire.ROSTER_LINE.itemsize // 8)
            words[:] = memoryview(record.tobytes()).cast("Q")
            return OwnLine(line, mapping)
    raise SubscribersExhausted(
        f"All {subscribers} subscriber lines of the channel are taken; make the publisher with a larger "
        "max_subscribers="
    )


def read(mapping: Mapping, locks: Locks, subscribers: int) -> list[RosterLine]:
    """The lines of all live subscribers. Contract: `locks` on another description than any subscriber's."""
    raw = bytes(memoryview(mapping.buffer).cast("B")[wire.PAGE : wire.PAGE + subscribers * wire.ROSTER_LINE.itemsize])
    table = np.frombuffer(raw, wire.ROSTER_LINE)
    return [_line(int(n), table[n]) for n in np.flatnonzero(table["pid"]) if locks.line_alive(int(n))]


def answers(mapping: Mapping, subscribers: int) -> dict[tuple[int, int], tuple[int, int]]:
    """By worker and pid of who listens to the bell: the version in use, and the version that was answered for.

    Contract: no system call, so it may be the last answer of somebody who has died.
    """
    table = np.frombuffer(memoryview(mapping.buffer), wire.ROSTER_LINE, subscribers, wire.PAGE)
    # What was answered is read first: it is written last.
    answered = table["answered"].copy()
    listening = np.flatnonzero(answered)
    columns = (table["worker"], table["pid"], table["used"], answered)
    newest: dict[tuple[int, int], tuple[int, int]] = {}
    for worker, pid, used, version in zip(*(column[listening].tolist() for column in columns), strict=True):
        if version >= newest.get((worker, pid), (0, 0))[1]:
            newest[worker, pid] = used, version
    return newest


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
