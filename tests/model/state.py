"""The simulated machine: immutable words, locks and memory, so that a state can be hashed and gone back to.

`Shared` is what several processes see. `Owner` and `Worker` are what one process keeps besides its suspended
generators. Fields marked *ghost* exist for the checks only, no program sees them; so do `armed`, it may have a fault
now, and `stopped`, it has got SIGSTOP for good and keeps its locks.
"""

from __future__ import annotations

from typing import NamedTuple

FREE = -1
# What a worker's own write leaves in a leaf: minus the version that it was made on, or this if the slot was not leased.
LATE_WRITE = -1000

Values = tuple[int, ...]


class Violation(Exception):
    """An invariant does not hold."""


class Fault(Exception):
    """An operation fails, or is interrupted after its effect."""


class Lock(NamedTuple):
    """One byte of CTL: the description that has it exclusively, or FREE; and a bit for each that has it shared."""

    exclusive: int = FREE
    shared: int = 0

    def locked(self, description: int) -> bool:
        return self.exclusive == description or bool(self.shared >> description & 1)

    def taken(self, description: int, exclusive: bool) -> Lock | None:
        """The lock after a request, or None for EAGAIN. A description's own lock is converted, not counted."""
        others = self.without(description)
        if others.exclusive != FREE or (exclusive and others.shared):
            return None
        return Lock(description, 0) if exclusive else Lock(FREE, others.shared | 1 << description)

    def without(self, description: int) -> Lock:
        return Lock(FREE if self.exclusive == description else self.exclusive, self.shared & ~(1 << description))


class Truth(NamedTuple):
    """Ghost: what a complete version is, and whether it was published to everybody."""

    version: int
    values: Values
    everybody: bool


class Shared(NamedTuple):
    """Both segments, and what is left of the explorer's own budget.

    `memory[slot]`: one small number per leaf, the number of the publish that wrote it; None = no memory behind it.
    """

    rows: tuple[int, ...]
    versions: tuple[int, ...]
    memory: tuple[Values | None, ...]
    locks: tuple[Lock, ...]
    truths: tuple[Truth, ...] = ()
    kills: int = 0
    stops: int = 0
    faults: int = 0

    def truth(self, version: int) -> Truth:
        for truth in self.truths:
            if truth.version == version:
                return truth
        raise Violation(f"version {version} is used, but no slot holds it any more")

    def holds(self, description: int) -> set[int]:
        """The slots on which a description has a lock."""
        return {slot for slot, lock in enumerate(self.locks) if lock.locked(description)}

    def without_locks_of(self, description: int) -> Shared:
        """What the kernel does at the end of a process."""
        return self._replace(locks=tuple(lock.without(description) for lock in self.locks))


class Owner(NamedTuple):
    """The publisher's process. All of it is ghost: what the publisher knows lies in its generators.

    `attempt`: the number of the publish, which is also what it writes. `goal`: all values once it is complete. `full`:
    those of the newest version.
    """

    attempt: int = 0
    everybody: bool = False
    goal: Values = ()
    full: Values = ()
    armed: bool = False
    stopped: bool = False


class Gate(NamedTuple):
    """A binding's gate: the thread that has its lock, or FREE; and a bit for each thread inside a forward."""

    owner: int = FREE
    inside: int = 0


class Worker(NamedTuple):
    """A subscriber's process.

    `counts` and `words` are the contents of its `Holder` and of its bindings' `Bound`s. `aliases`: the word whose slot
    a binding's parameters alias. `leases`: the words of user leases. `pages[slot]`: the values of the slot's private
    pages, None = none. `queue`: slots of leases that ended while the mutex was taken. `newest` is a ghost: the newest
    word that an acquire has returned.
    """

    counts: tuple[tuple[int, int], ...]
    words: tuple[int, ...]
    aliases: tuple[int, ...]
    gates: tuple[Gate, ...]
    pages: tuple[Values | None, ...]
    mutex: int = FREE
    leases: tuple[int, ...] = ()
    queue: tuple[int, ...] = ()
    newest: int = 0
    armed: bool = True
    stopped: bool = False


DEAD = None
Process = Owner | Worker | None


def put(items: tuple, index: int, item: object) -> tuple:
    """A tuple with one item changed."""
    return items[:index] + (item,) + items[index + 1 :]
