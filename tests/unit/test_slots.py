"""The slot protocol's generators over words and locks that live in this test: one guard after the other.

tests/model runs the same generators in all interleavings; here each test is one schedule that a user would meet.
Mutants: pick a slot that a live row points to; store the version before the copy; leave stamps after a failed copy;
release the old lease before the parameters have left it; compare no version after locking.
"""

from collections.abc import Callable

import numpy as np
import pytest

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


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def trainer(memory) -> Trainer:
    return Trainer(memory)


def test_a_word_holds_version_and_slot() -> None:
    word = slots.pack((1 << 40) + 3, 65535)
    assert (slots.version_of(word), slots.slot_of(word)) == ((1 << 40) + 3, 65535)
    assert slots.follow([slots.pack(2, 9), slots.pack(3, 0), 0]) == slots.pack(3, 0)


def test_nothing_published_is_word_zero_and_no_lease(memory) -> None:
    reader = Reader(memory)
    assert reader.switch() == reader.acquire() == 0
    assert reader.held() == set()
    assert reader.log.count("enter") == reader.log.count("leave") == 2


def test_pushes_alternate_and_readers_keep_what_they_hold(memory, trainer) -> None:
    reader = Reader(memory)
    for value in range(1, 9):
        assert trainer.publish(value) == value
        before = reader.pointed
        assert before == 0 or reader.values() == [value - 1] * 3
        reader.switch()
        assert reader.values() == [value] * 3
        assert reader.held() == {slots.slot_of(reader.pointed)}, "the old lease has ended"
    assert len(memory.leaves) <= 3


def test_a_slow_reader_costs_a_slot_and_blocks_nobody(memory, trainer) -> None:
    slow, fast = Reader(memory), Reader(memory)
    trainer.publish(1)
    slow.switch()
    for value in range(2, 20):
        trainer.publish(value)
        fast.switch()
        assert (slow.values(), fast.values()) == ([1] * 3, [value] * 3)
    assert len(memory.leaves) <= 4


def test_the_slot_a_live_row_points_to_is_not_written_though_nobody_holds_it(memory, trainer) -> None:
    late = Reader(memory, 0, 1)
    trainer.publish(1, rows=(1,))
    for value in range(2, 8):
        trainer.publish(value, rows=(2,))
    late.switch()
    assert late.values() == [1] * 3


def test_a_row_older_than_everybodys_frees_its_slot(memory, trainer) -> None:
    trainer.publish(1, rows=(1,))
    for value in range(2, 9):
        trainer.publish(value)
    assert len(memory.leaves) == 2
    reader = Reader(memory, 0, 1)
    reader.switch()
    assert reader.values() == [8] * 3


def test_a_partial_push_completes_the_newest_even_if_it_went_to_another(memory, trainer) -> None:
    trainer.publish(1)
    trainer.publish(2, rows=(1,))
    trainer.publish(3, rows=(2,), leaves=(0,))
    reader = Reader(memory, 0, 2)
    reader.switch()
    assert reader.values() == [3, 2, 2]


def test_a_partial_push_copies_over_only_what_is_not_there_yet(memory, trainer) -> None:
    trainer.publish(1)
    trainer.publish(2, leaves=(0,))
    trainer.publish(3, leaves=(0,))
    memory.log.clear()
    trainer.publish(4, leaves=(0,))
    assert memory.log.count("copy_in") == 1
    assert "copy_over" not in memory.log, "leaves 1 and 2 are in both slots"
    reader = Reader(memory)
    reader.switch()
    assert reader.values() == [4, 1, 1]


FAILURES = ["try_exclusive", "reserve", "store_slot_version", "copy_in", "copy_over", "load_rows"]


@pytest.mark.parametrize("operation", FAILURES)
def test_a_failed_push_shows_nothing_and_the_next_one_is_whole(memory, trainer, operation) -> None:
    reader = Reader(memory)
    trainer.publish(1)
    trainer.publish(2, leaves=(1,))
    reader.switch()
    Reader(memory).acquire()  # so that the next one needs a fresh slot
    memory.fail[operation] = RuntimeError(operation)
    if operation == "reserve":
        Reader(memory).acquire()
        for slot in memory.leaves:
            memory.shared.setdefault(slot, set()).add(object())
    with pytest.raises(RuntimeError, match=operation):
        trainer.publish(3, leaves=(0,))
    assert reader.switch() == reader.pointed == memory.rows[0]
    assert reader.values() == [1, 2, 1]
    assert memory.exclusive == set(), "the slot stays usable"
    assert trainer.publish(4, leaves=(2,)) == 4, "the number of the failed push is not used again"
    reader.switch()
    assert reader.values() == [1, 2, 4]


def test_a_push_that_fails_after_its_row_moved_has_happened(memory, trainer) -> None:
    """A second row is moved as well, and the slot is not written again."""
    trainer.publish(1)

    def moved_then_fails(row: int, word: int) -> None:
        memory.rows[row] = word
        memory.store_row = lambda row, word: Memory.store_row(memory, row, word)
        raise KeyboardInterrupt

    memory.store_row = moved_then_fails
    with pytest.raises(KeyboardInterrupt):
        trainer.publish(2, rows=(1, 2))
    assert memory.rows[1] == memory.rows[2]
    assert slots.version_of(memory.rows[1]) == 2
    trainer.publish(3)
    reader = Reader(memory, 2)
    reader.switch()
    assert reader.values() == [2] * 3


def test_all_slots_leased_waits_and_then_says_so(memory) -> None:
    trainer = Trainer(memory, max_slots=2)
    reader = Reader(memory)
    trainer.publish(1)
    reader.switch()
    trainer.publish(2)
    with pytest.raises(TimeoutError):
        trainer.publish(3)
    assert memory.exclusive == set()
    reader.switch()
    assert trainer.publish(4) == 4


def test_a_slot_that_is_being_written_is_tried_again(memory, trainer) -> None:
    """The row moves on meanwhile; the number under the lock decides, not the row read before."""
    reader = Reader(memory)
    trainer.publish(1)
    reader.between["try_shared"] = lambda: (trainer.publish(2), trainer.publish(3))
    assert slots.version_of(reader.acquire()) == 3
    assert reader.log.count("try_shared") == 2
    assert reader.held() == {slots.slot_of(memory.rows[0])}


def test_a_row_that_never_comes_right_ends_in_an_error_and_no_lease(memory, trainer) -> None:
    trainer.publish(1)
    memory.versions[slots.slot_of(memory.rows[0])] = 77
    reader = Reader(memory)
    with pytest.raises(TimeoutError, match="slot 0"):
        reader.acquire()
    assert reader.held() == set()
    assert reader.log[-1] == "leave"


@pytest.mark.parametrize("operation", ["drop_private", "point"])
def test_a_switch_that_fails_keeps_the_old_lease(memory, trainer, operation) -> None:
    reader = Reader(memory)
    trainer.publish(1)
    reader.switch()
    old = reader.held()
    trainer.publish(2)
    reader.fail[operation] = OSError("locked pages")
    with pytest.raises(OSError, match="locked pages"):
        reader.switch()
    assert reader.held() == old == {slots.slot_of(reader.bound.word)}
    assert reader.values() == [1] * 3
    reader.switch()
    assert reader.values() == [2] * 3


def test_leases_on_one_slot_are_counted(memory, trainer) -> None:
    reader = Reader(memory)
    trainer.publish(1)
    words = {reader.acquire(), reader.acquire(), reader.switch()}
    (word,) = words
    slot = slots.slot_of(word)
    assert reader.log.count("drop_private") == 1, "by the first holder only"
    for _ in range(2):
        slots.drive(slots.release(reader.holder, slot), reader.perform)
        assert reader.held() == {slot}
    slots.drive(slots.release(reader.holder, slot), reader.perform)
    assert reader.held() == set()
    assert reader.holder.counts == {}


def test_a_switch_without_news_ends_its_own_lease_and_keeps_the_binding(memory, trainer) -> None:
    reader = Reader(memory)
    trainer.publish(1)
    word = reader.switch()
    assert reader.switch() == word
    assert reader.holder.counts == {slots.slot_of(word): 1}
    assert reader.log.count("point") == 1


def test_only_spare_slots_are_given_back(memory, trainer) -> None:
    reader = Reader(memory)
    trainer.publish(1)
    reader.switch()
    trainer.publish(2)
    leased, newest = slots.slot_of(reader.pointed), slots.slot_of(memory.rows[0])
    assert not trainer.give_back(leased)
    assert not trainer.give_back(newest)
    assert set(memory.leaves) == {leased, newest}
    reader.switch()
    assert trainer.give_back(leased)
    assert memory.versions[leased] == 0
    assert set(memory.leaves) == {newest}
    assert memory.exclusive == set()


def test_a_slot_given_back_is_written_anew_in_full(memory, trainer) -> None:
    trainer.publish(1)
    trainer.publish(2, leaves=(0,))
    (other,) = {0, 1} - {slots.slot_of(memory.rows[0])}
    assert trainer.give_back(other)
    trainer.publish(3, leaves=(1,))
    reader = Reader(memory)
    reader.switch()
    assert reader.values() == [2, 3, 1]


def test_drive_gives_errors_to_the_step_that_asked(memory) -> None:
    """So that a generator's own `finally` runs, and its operations are still performed."""
    done: list[str] = []

    def steps():
        try:
            yield ("fails",)
        except ValueError:
            done.append((yield ("mend",)))
        return "result"

    def perform(operation: tuple) -> str:
        if operation == ("fails",):
            raise ValueError
        return "mended"

    assert slots.drive(steps(), perform) == "result"
    assert done == ["mended"]
