"""Leases on slots that were left, but are still read: by what readers have queued on a device's streams."""

from __future__ import annotations

from dataclasses import dataclass

from .device import Event
from .errors import DeviceError


@dataclass
class Reader:
    """A lease on a slot that was left: it ends when events have come; None = they are not known yet."""

    slot: int
    events: list[Event] | None = None

    def has_passed(self, wait: bool) -> bool:
        """Whether all events have come, or are waited for."""
        return self.events is not None and all(_has_come(event, wait) for event in self.events)


class Passing:
    """The leases that end with their readers' streams. Contract: for who has the lease mutex; truth without it."""

    def __init__(self) -> None:
        self._readers: list[Reader] = []

    def __bool__(self) -> bool:
        return bool(self._readers)

    def add(self, slot: int) -> Reader:
        """One more, whose events are still to be told."""
        reader = Reader(slot)
        self._readers.append(reader)
        return reader

    def passed(self, wait: bool) -> list[int]:
        """The slots, one for each lease that is over now; with ``wait`` it waits for the events that are known."""
        readers, self._readers = self._readers, []
        over = []
        for reader in readers:
            if reader.has_passed(wait):
                over.append(reader.slot)
            else:
                self._readers.append(reader)
        return over

    def give_up(self) -> list[int]:
        """All of them, as if their streams had come to their ends."""
        readers, self._readers = self._readers, []
        return [reader.slot for reader in readers]


def _has_come(event: Event, wait: bool) -> bool:
    """If the device has failed, nothing reads there any more."""
    try:
        if wait:
            event.synchronize()
        return wait or event.done()
    except DeviceError:
        return True
