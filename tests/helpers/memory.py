"""A channel in this process's memory: words and locks that the protocol's generators can be driven over."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shmsync import slots

LEAVES = 3


class Memory:
    """Rows, slots and locks; performs the operations of one publisher. `fail` raises in the named operation."""

    def __init__(self, rows: int = 3) -> None:
        self.rows = [0] * rows
        self.versions: dict[int, int] = {}
        self.leaves: dict[int, list[int]] = {}
        self.exclusive: set[int] = set()
        self.shared: dict[int, set[object]] = {}
        self.log: list[str] = []
        self.fail: dict[str, BaseException] = {}
        self.value = 0

    def perform(self, operation: tuple) -> object:
        name, *arguments = operation
        self.log.append(name)
        if name in self.fail:
            raise self.fail.pop(name)
        return getattr(self, name)(*arguments)

    def load_rows(self) -> list[int]:
        return list(self.rows)

    def store_row(self, row: int, word: int) -> None:
        assert self.versions[slots.slot_of(word)] == slots.version_of(word), "a row points to an incomplete slot"
        self.rows[row] = word

    def try_exclusive(self, slot: int) -> bool:
        if slot in self.exclusive or self.shared.get(slot):
            return False
        self.exclusive.add(slot)
        return True

    def unlock(self, slot: int) -> None:
        self.exclusive.discard(slot)

    def reserve(self, slot: int) -> None:
        self.leaves[slot] = [0] * LEAVES

    def punch(self, slot: int) -> None:
        assert slot in self.exclusive
        del self.leaves[slot]

    def store_slot_version(self, slot: int, version: int) -> None:
        assert slot in self.exclusive, "written without its lock"
        self.versions[slot] = version

    def copy_in(self, slot: int, changed: np.ndarray) -> None:
        assert self.versions[slot] == 0, "written while it shows a version"
        for leaf in changed:
            self.leaves[slot][leaf] = self.value

    def copy_over(self, slot: int, source: int, rest: np.ndarray) -> None:
        assert self.versions[slot] == 0
        for leaf in rest:
            self.leaves[slot][leaf] = self.leaves[source][leaf]

    def wait(self) -> None:
        raise TimeoutError("all slots are leased")


class Reader:
    """One subscriber of a Memory: a holder, its lock, and what its parameters point to."""

    def __init__(self, memory: Memory, *rows: int) -> None:
        self.memory, self.holder, self.bound = memory, slots.Holder(rows=rows or (0,)), slots.Bound()
        self.pointed = 0
        self.log: list[str] = []
        self.between: dict[str, Callable[[], None]] = {}
        self.fail: dict[str, BaseException] = {}
        self.patience = 5

    def perform(self, operation: tuple) -> object:
        name, *arguments = operation
        self.log.append(name)
        if name in self.between:
            self.between.pop(name)()
        if name in self.fail:
            raise self.fail.pop(name)
        return getattr(self, name)(*arguments)

    def enter(self) -> None:
        assert self.log.count("enter") == self.log.count("leave") + 1

    def leave(self) -> None:
        pass

    def load_row(self, row: int) -> int:
        return self.memory.rows[row]

    def try_shared(self, slot: int) -> bool:
        if slot in self.memory.exclusive:
            return False
        self.memory.shared.setdefault(slot, set()).add(self)
        return True

    def unlock(self, slot: int) -> None:
        self.memory.shared[slot].discard(self)

    def load_slot_version(self, slot: int) -> int:
        return self.memory.versions[slot]

    def drop_private(self, slot: int) -> None:
        assert self in self.memory.shared[slot], "dropped before it is leased"
        assert not self.pointed or slots.slot_of(self.pointed) != slot

    def point(self, word: int) -> None:
        assert self in self.memory.shared[slots.slot_of(word)], "parameters point to a slot that is not leased"
        self.pointed = word

    def again(self, word: int) -> None:
        self.patience -= 1
        if not self.patience:
            raise TimeoutError(f"slot {slots.slot_of(word)}")

    def switch(self) -> int:
        return slots.drive(slots.switch(self.holder, self.bound), self.perform)

    def acquire(self) -> int:
        return slots.drive(slots.acquire(self.holder), self.perform)

    def held(self) -> set[int]:
        return {slot for slot, who in self.memory.shared.items() if self in who}

    def values(self) -> list[int]:
        return self.memory.leaves[slots.slot_of(self.pointed)]


class Trainer:
    def __init__(self, memory: Memory, max_slots: int = 6) -> None:
        self.memory, self.writer = memory, slots.Writer(LEAVES, max_slots)

    def publish(self, value: int, rows: tuple[int, ...] = (0,), leaves: tuple[int, ...] = (0, 1, 2)) -> int:
        self.memory.value = value
        steps = slots.publish(self.writer, rows, np.array(leaves, dtype=np.int64))
        return slots.version_of(slots.drive(steps, self.memory.perform))

    def give_back(self, slot: int) -> bool:
        return slots.drive(slots.give_back(self.writer, slot), self.memory.perform)
