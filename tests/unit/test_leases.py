"""Byte locks: each description has its own, and the kernel ends them with it.

Mutants: classic locks (fcntl.lockf) instead of OFD ones: they belong to the process; a lock converted in place.
"""

import fcntl
import os

import pytest

from shmsync import segment
from shmsync.leases import Locks


@pytest.fixture
def describe(nothing_left):
    """Makes locks on descriptions of their own, of one segment."""
    fd = segment.create("unit", 4096)
    made = []

    def make(flags: int = os.O_RDWR) -> Locks:
        made.append(Locks(segment.reopen(fd, flags)))
        return made[-1]

    yield make
    for locks in made:
        locks.close()
    os.close(fd)


def test_readers_share_and_a_writer_is_alone(describe) -> None:
    writer, one, other = describe(), describe(os.O_RDONLY), describe(os.O_RDONLY)
    assert one.try_shared(3)
    assert other.try_shared(3)
    assert not writer.try_exclusive(3)
    one.unlock(3)
    assert not writer.try_exclusive(3)
    other.unlock(3)
    assert writer.try_exclusive(3)
    assert not one.try_shared(3)
    writer.unlock(3)
    assert one.try_shared(3)


def test_slots_are_independent(describe) -> None:
    writer, reader = describe(), describe(os.O_RDONLY)
    assert reader.try_shared(3)
    for slot in (0, 2, 4, 65535):
        assert writer.try_exclusive(slot)
        assert not reader.try_shared(slot)
    assert not writer.try_exclusive(3)


def test_locks_are_not_counted(describe) -> None:
    """Why subscribers count: the first unlock ends it, however often it was taken."""
    writer, reader = describe(), describe(os.O_RDONLY)
    assert reader.try_shared(0)
    assert reader.try_shared(0)
    reader.unlock(0)
    assert writer.try_exclusive(0)


def test_a_readers_description_cannot_write_lock(describe) -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        describe(os.O_RDONLY).try_exclusive(0)


def test_closing_a_description_ends_its_locks_and_only_its(describe) -> None:
    writer, one, other = describe(), describe(os.O_RDONLY), describe(os.O_RDONLY)
    one.try_shared(0)
    other.try_shared(1)
    one.close()
    one.close()
    assert writer.try_exclusive(0)
    assert not writer.try_exclusive(1)


def test_closing_another_descriptor_of_the_segment_ends_nothing(describe) -> None:
    """The trap of classic locks."""
    writer, reader = describe(), describe(os.O_RDONLY)
    reader.try_shared(0)
    os.close(segment.reopen(writer.fd, os.O_RDONLY))
    assert not writer.try_exclusive(0)


def test_a_lock_is_left_behind_by_no_duplicate(describe) -> None:
    """A duplicate shares the description: what shmsync never hands on."""
    writer, reader = describe(), describe(os.O_RDONLY)
    reader.try_shared(0)
    copy = fcntl.fcntl(reader.fd, fcntl.F_DUPFD_CLOEXEC, 0)
    reader.close()
    assert not writer.try_exclusive(0)
    os.close(copy)
    assert writer.try_exclusive(0)


def test_one_owner_and_everybody_else_sees_whether_it_lives(describe) -> None:
    owner, rival, reader = describe(), describe(), describe(os.O_RDONLY)
    assert not reader.owner_alive()
    assert owner.own()
    assert not rival.own()
    assert reader.owner_alive()
    assert rival.owner_alive()
    assert not owner.owner_alive(), "of itself it sees nothing"
    owner.close()
    assert not reader.owner_alive()
    assert rival.own()


def test_a_roster_line_lives_as_long_as_its_claim(describe) -> None:
    one, other, reader = describe(), describe(), describe(os.O_RDONLY)
    assert one.claim_line(5)
    assert not other.claim_line(5)
    assert other.claim_line(6)
    assert [reader.line_alive(line) for line in (4, 5, 6, 7)] == [False, True, True, False]
    one.close()
    assert not reader.line_alive(5)


def test_lines_slots_and_owner_do_not_get_in_each_others_way(describe) -> None:
    owner, reader = describe(), describe()
    assert owner.own()
    for number in (0, 1, 4095):
        assert owner.try_exclusive(number)
        assert reader.claim_line(number)
