"""The slot protocol: pure logic over words and locks.

Every function here is a generator that yields one operation at each step that other processes or threads can see,
`("name", arguments...)`, and is sent its result. `drive` runs it for real; the explorer in tests/model runs the very
same code in all interleavings. Why it is right, in one place:

* a slot is written only under its exclusive lock, and only if no live row points to it and it is not the newest;
* its version is 0 from before the first byte changes until after the last one has;
* a subscriber that has its shared lock and then finds the version that the row promised may read until it unlocks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
Steps = Generator[tuple[Any, ...], Any, T]

EVERYBODY = 0
SLOT_BITS = 16
UNKNOWN = 0
# A spare slot goes back after so many pushes in which nobody needed it: bursts come again soon or not at all.
IDLE_PUBLISHES = 64
SPARE_SLOTS = 3


def pack(version: int, slot: int) -> int:
    """The word of a row."""
    return version << SLOT_BITS | slot


def version_of(word: int) -> int:
    """The version in a row's word."""
    return word >> SLOT_BITS


def slot_of(word: int) -> int:
    """The slot in a row's word."""
    return word & ((1 << SLOT_BITS) - 1)


def drive(steps: Steps[T], perform: Callable[[tuple[Any, ...]], Any]) -> T:
    """Run a generator of operations; what `perform` raises is raised at the step that asked for it."""
    try:
        return _drive(steps, perform, steps.send, None)
    except BaseException as error:
        if inspect.getgeneratorstate(steps) != inspect.GEN_SUSPENDED:
            raise
        # A signal handler's, between two steps: the one that was made last has to hear of it, and clean up.
        return _drive(steps, perform, steps.throw, error)


def _drive(
    steps: Steps[T],
    perform: Callable[[tuple[Any, ...]], Any],
    resume: Callable[[Any], tuple[Any, ...]],
    value: Any,
) -> T:
    while True:
        try:
            operation = resume(value)
            resume, value = steps.send, perform(operation)
        except StopIteration as stop:
            return stop.value
        except BaseException as error:
            if inspect.getgeneratorstate(steps) == inspect.GEN_CLOSED:
                raise
            resume, value = steps.throw, error


def pausing(steps: Steps[T], before: Callable[[tuple[Any, ...]], bool]) -> Steps[tuple[Any, ...] | None]:
    """`steps` up to the first operation for which `before` holds: that operation, which `resuming` goes on with."""
    resume, value = steps.send, None
    while True:
        try:
            operation = resume(value)
        except StopIteration:
            return None
        if before(operation):
            return operation
        try:
            resume, value = steps.send, (yield operation)
        except BaseException as error:
            resume, value = steps.throw, error


def resuming(steps: Steps[T], operation: tuple[Any, ...]) -> Steps[T]:
    """The rest of `steps`, from an operation on that it has come to."""
    while True:
        try:
            resume, value = steps.send, (yield operation)
        except BaseException as error:
            resume, value = steps.throw, error
        try:
            operation = resume(value)
        except StopIteration as stop:
            return stop.value


@dataclass
class Writer:
    """What only the publisher knows. `stamps[slot][leaf]`: the version that wrote the leaf there; 0 = unknown."""

    leaves: int
    max_slots: int
    version: int = 0
    newest: int = 0
    stamps: dict[int, np.ndarray] = field(default_factory=dict)
    used: dict[int, int] = field(default_factory=dict)


def publish(writer: Writer, rows: Sequence[int], changed: np.ndarray) -> Steps[int]:
    """Write the next version and move `rows` to it. `changed`: the numbers of the leaves that the caller brings.

    Returns the word. After an exception the push has happened exactly if a row shows its word.
    """
    writer.version += 1  # burned now: a number that failed is never used again, so no stamp can lie
    version = writer.version
    live = yield from live_slots(writer)
    slot = yield from pick(writer, live)
    word = pack(version, slot)
    try:
        yield from fill(writer, slot, version, changed)
        yield ("unlock", slot)
        for row in rows:
            yield ("store_row", row, word)
    except BaseException:
        yield from settle(writer, slot, rows, word)
        raise
    writer.newest = word
    writer.used[slot] = version
    return word


def live_slots(writer: Writer) -> Steps[set[int]]:
    """The slots that must not be written: those that a live row points to. The newest is always among them."""
    words = yield ("load_rows",)
    everybody = words[EVERYBODY]
    return {slot_of(word) for word in words if word and word >= everybody}


def pick(writer: Writer, live: set[int]) -> Steps[int]:
    """Lock a slot for writing: the one filled last if it is free, so that partial pushes find most leaves in place."""
    while True:
        for slot in sorted(writer.stamps, key=lambda s: -writer.used.get(s, 0)):
            if slot not in live and (yield ("try_exclusive", slot)):
                return slot
        for slot in range(writer.max_slots):
            # More than one try: a subscriber that comes late may hold one for a moment, or be stopped just then.
            if slot not in writer.stamps and (yield ("try_exclusive", slot)):
                return slot
        yield ("wait",)


def fill(writer: Writer, slot: int, version: int, changed: np.ndarray) -> Steps[None]:
    """Bring a locked slot to the new version: the caller's leaves, and from the newest slot what is not there yet."""
    if slot not in writer.stamps:
        yield ("reserve", slot)
        writer.stamps[slot] = np.full(writer.leaves, UNKNOWN, np.int64)
    yield ("store_slot_version", slot, 0)
    stamps = writer.stamps[slot]
    stale, wanted, rest = outdated(writer, stamps, version, changed)
    stamps[stale] = UNKNOWN
    yield ("copy_in", slot, changed)
    if len(rest):
        yield ("copy_over", slot, slot_of(writer.newest), rest)
    yield ("store_slot_version", slot, version)
    stamps[stale] = wanted  # last: on devices, storing the version waits for the copies, which may fail


def outdated(
    writer: Writer, stamps: np.ndarray, version: int, changed: np.ndarray
) -> tuple[slice | np.ndarray, int | np.ndarray, np.ndarray]:
    """Which leaves of a slot get new bytes, the stamps that they get, and those of them that the caller does not
    bring."""
    if len(changed) == writer.leaves:  # he brings all: the usual push, and no need to look
        return slice(None), version, changed[:0]
    if writer.newest:
        wanted = writer.stamps[slot_of(writer.newest)].copy()
    else:
        wanted = np.full(writer.leaves, UNKNOWN, np.int64)
    wanted[changed] = version
    stale = np.flatnonzero(stamps != wanted)
    return stale, wanted[stale], stale[wanted[stale] != version]


def settle(writer: Writer, slot: int, rows: Sequence[int], word: int) -> Steps[None]:
    """After an exception: finish the push if it has begun to show, else leave the old version in place."""
    words = yield ("load_rows",)
    if any(words[row] == word for row in rows):
        for row in rows:
            yield ("store_row", row, word)
        writer.newest = word
        writer.used[slot] = version_of(word)
    yield ("unlock", slot)


def spare_slots(writer: Writer) -> list[int]:
    """The slots that no push has needed for long, if there are more than the usual few; the longest unused first."""
    if len(writer.stamps) <= SPARE_SLOTS:
        return []
    idle = [slot for slot in writer.stamps if writer.version - writer.used.get(slot, 0) >= IDLE_PUBLISHES]
    return sorted(idle, key=lambda slot: writer.used.get(slot, 0))


def give_back(writer: Writer, slot: int) -> Steps[bool]:
    """Return a slot's memory. False if it is live or leased."""
    live = yield from live_slots(writer)
    if slot in live or not (yield ("try_exclusive", slot)):
        return False
    try:
        yield ("store_slot_version", slot, 0)
        writer.stamps.pop(slot, None)
        yield ("punch", slot)
    finally:
        yield ("unlock", slot)
    return True


@dataclass
class Holder:
    """What one subscriber holds: how many leases on each slot. OFD locks are not counted, hence the counts."""

    rows: tuple[int, ...]
    counts: dict[int, int] = field(default_factory=dict)


def follow(words: Iterable[int]) -> int:
    """The newest of the words that a subscriber follows. Versions are unique, so words order as versions do."""
    return max(words)


def acquire(holder: Holder) -> Steps[int]:
    """Lease the newest slot that this subscriber's rows point to; its word, or 0 while nothing is published.

    Rows never go back, and this runs under the lease mutex: so the words of successive calls never go back either.
    """
    yield ("enter",)
    try:
        while True:
            words = []
            for row in holder.rows:
                words.append((yield ("load_row", row)))
            word = follow(words)
            if not word:
                return 0
            slot = slot_of(word)
            if (yield ("try_shared", slot)) and (yield from _leased(holder, slot, version_of(word))):
                return word
            yield ("again", word)
    finally:
        yield ("leave",)


def _leased(holder: Holder, slot: int, version: int) -> Steps[bool]:
    """With the shared lock: count a lease if the slot still holds the version that the row promised."""
    try:
        if (yield ("load_slot_version", slot)) != version:
            yield ("unlock", slot)  # nobody here can have a lease on it: then its version could not have changed
            return False
        if not holder.counts.get(slot):
            # Under the new lease, before anything points there. Earlier, a late write through an old alias could still
            # make a private page; later, the forward would read it.
            yield ("drop_private", slot)
    except BaseException:
        if not holder.counts.get(slot):
            yield ("unlock", slot)
        raise
    holder.counts[slot] = holder.counts.get(slot, 0) + 1
    return True


def release(holder: Holder, slot: int) -> Steps[None]:
    """End one lease; the lock goes with the last one."""
    yield ("enter",)
    try:
        holder.counts[slot] -= 1
        if not holder.counts[slot]:
            del holder.counts[slot]
            yield ("unlock", slot)
    finally:
        yield ("leave",)


@dataclass
class Bound:
    """The word that a binding's parameters alias; 0 while they are the module's own."""

    word: int = 0


def switch(holder: Holder, bound: Bound) -> Steps[int]:
    """Point a binding's parameters at the newest slot: all of them, or none if that raises.

    The old lease ends only after they have left it.
    """
    word = yield from acquire(holder)
    if word == 0:
        return 0
    if word == bound.word:
        yield from release(holder, slot_of(word))
        return word
    try:
        yield ("point", word)
    except BaseException:
        yield from release(holder, slot_of(word))
        raise
    old, bound.word = bound.word, word
    if old:
        yield from release(holder, slot_of(old))
    return word
