"""An operation's place and its outcome."""

from __future__ import annotations

from typing import Any, NamedTuple

from .state import Process, Shared, put
from .threads import Thread
from .words import slot_of, version_of


class Outcome(NamedTuple):
    """An operation's result and the machine after it. `note`: for the schedule."""

    result: Any
    shared: Shared
    process: Process
    note: str = ""


class Here(NamedTuple):
    """Who performs an operation, and the machine before it."""

    thread: Thread
    shared: Shared
    process: Process

    def gives(self, result: Any = None, note: str = "") -> Outcome:
        """An operation that changes nothing."""
        return Outcome(result, self.shared, self.process, note)

    def shares(self, **changes: Any) -> Outcome:
        """An operation that changes what is shared."""
        return Outcome(None, self.shared._replace(**changes), self.process)

    def keeps(self, result: Any = None, **changes: Any) -> Outcome:
        """An operation that changes its process."""
        return Outcome(result, self.shared, self.process._replace(**changes))

    def requests(self, slot: int, exclusive: bool) -> Outcome:
        """F_OFD_SETLK on a slot's byte."""
        lock = self.shared.locks[slot].taken(self.thread.process, exclusive)
        if lock is None:
            return self.gives(False, "EAGAIN")
        return self.shares(locks=put(self.shared.locks, slot, lock))._replace(result=True)

    def unlocks(self, slot: int) -> Outcome:
        """F_UNLCK; nothing happens if there is no lock."""
        lock = self.shared.locks[slot].without(self.thread.process)
        return self.shares(locks=put(self.shared.locks, slot, lock))


def text(word: int) -> str:
    """A row's word, for people."""
    return f"version {version_of(word)} in slot {slot_of(word)}"
