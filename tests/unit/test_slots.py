"""The slot protocol's generators over words and locks that live in this test: one guard after the other.

tests/model runs the same generators in all interleavings; here each test is one schedule that a user would meet.
Mutants: pick a slot that a live row points to; store the version before the copy; leave stamps after a failed copy;
release the old lease before the parameters have left it; compare no version after locking.
"""

import pytest

from shmsync import slots
from tests.helpers.memory import Memory, Reader, Trainer


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
