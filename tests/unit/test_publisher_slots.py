"""Slots grow when they are needed, go back when they are not, and their number is what they cost.

Mutants: never give back; give back the newest; wait for ever; count subscribers instead of leases.
"""

import os
import threading

import pytest

import shmsync
from shmsync import SlotsExhausted
from shmsync.slots import IDLE_PUBLISHES, SPARE_SLOTS
from tests.helpers.models import filled, uniform

SHAPES = {"leaf": (50_000,)}
SLOT_NBYTES = 49 * 4096  # 200 000 bytes, in whole pages


@pytest.fixture
def channel(publisher):
    return publisher(filled(SHAPES, 0))


def push(channel, k: float) -> None:
    channel.publish(filled(SHAPES, k))


def burst(channel, follower, count: int) -> list:
    """So many versions, each with a lease that is held."""
    leases = []
    for _ in range(count):
        push(channel, channel.version + 1)
        leases.append(follower.lease())
    return leases


def shared_nbytes(channel) -> int:
    """What the kernel counts for DATA's slots, without its first pages."""
    fd, before = channel._store.fd, channel._store.head.slots_offset
    return os.fstat(fd).st_blocks * 512 - resident_before(fd, before)


def resident_before(fd: int, end: int) -> int:
    total, offset = 0, 0
    while offset < end:
        try:
            begin = os.lseek(fd, offset, os.SEEK_DATA)
        except OSError:
            break
        if begin >= end:
            break
        offset = min(os.lseek(fd, begin, os.SEEK_HOLE), end)
        total += offset - begin
    return total


def test_a_channel_that_nobody_publishes_on_costs_no_slot(channel) -> None:
    assert channel.stats()["nbytes"] == shared_nbytes(channel) == 0


def test_pushes_that_nobody_holds_take_two_slots(channel) -> None:
    for k in range(1, 20):
        push(channel, k)
    assert channel.stats()["slots"] == 2
    assert channel.stats()["slot_nbytes"] == SLOT_NBYTES
    assert channel.stats()["nbytes"] == shared_nbytes(channel) == 2 * SLOT_NBYTES


def test_each_lease_costs_one_slot(channel, subscriber) -> None:
    leases = burst(channel, subscriber(channel), 6)
    push(channel, 7)
    stats = channel.stats()
    assert (stats["slots"], stats["nbytes"]) == (7, 7 * SLOT_NBYTES)
    assert shared_nbytes(channel) == stats["nbytes"]
    assert [uniform(lease.weights) for lease in leases] == [1, 2, 3, 4, 5, 6]


def test_after_a_burst_spare_slots_go_back(channel, subscriber) -> None:
    leases = burst(channel, subscriber(channel), 8)
    for lease in leases:
        lease.close()
    for k in range(3 * IDLE_PUBLISHES):
        push(channel, k)
    assert channel.stats()["slots"] == SPARE_SLOTS
    assert shared_nbytes(channel) == SPARE_SLOTS * SLOT_NBYTES
    with subscriber(channel).lease() as lease:
        assert uniform(lease.weights) == 3 * IDLE_PUBLISHES - 1


def test_one_old_lease_does_not_keep_the_spare_slots(channel, subscriber) -> None:
    kept, *others = burst(channel, subscriber(channel), 8)
    for lease in others:
        lease.close()
    for k in range(3 * IDLE_PUBLISHES):
        push(channel, k)
    assert channel.stats()["slots"] <= SPARE_SLOTS + 1
    assert uniform(kept.weights) == 1


def test_slots_that_are_used_again_and_again_stay(channel, subscriber) -> None:
    """Hysteresis: a burst that comes back soon finds its slots; giving back and taking again costs page faults."""
    follower = subscriber(channel)
    for _ in range(4):
        for lease in burst(channel, follower, 8):
            lease.close()
        for k in range(IDLE_PUBLISHES // 2):
            push(channel, k)
        assert channel.stats()["slots"] >= 8


def test_a_slot_that_was_given_back_is_right_when_it_is_used_again(channel, subscriber) -> None:
    """Also in a subscriber that had it mapped before."""
    follower = subscriber(channel)
    for lease in burst(channel, follower, 8):
        lease.close()
    for k in range(3 * IDLE_PUBLISHES):
        push(channel, k)
    leases = burst(channel, follower, 8)
    assert [uniform(lease.weights) for lease in leases] == [lease.version for lease in leases]


def test_the_slot_of_a_worker_that_gets_nothing_new_stays(channel, subscriber) -> None:
    """Its row is live though nobody holds the slot."""
    channel.publish(filled(SHAPES, 7), worker_ids=5)
    for k in range(3 * IDLE_PUBLISHES):
        channel.publish(filled(SHAPES, k), worker_ids=k % 5)
    with subscriber(channel, worker_id=5).lease() as lease:
        assert uniform(lease.weights) == 7


@pytest.fixture
def narrow(publisher):
    return publisher(filled(SHAPES, 0), max_slots=2, timeout=0.3)


def test_max_slots_waits_and_then_names_who_holds_what(narrow, subscriber) -> None:
    follower = subscriber(narrow, worker_id=3, name="slow arm")
    push(narrow, 1)
    lease = follower.lease()
    push(narrow, 2)
    with pytest.raises(SlotsExhausted) as raised:
        push(narrow, 3)
    for text in ("All 2 slots", "0.3 s", f"pid {os.getpid()}", "worker 3", "slow arm", "version 1", "max_slots"):
        assert text in str(raised.value)
    assert narrow.version == follower.seen == 2
    assert uniform(lease.weights) == 1
    lease.close()
    push(narrow, 4)
    with follower.lease() as newest:
        assert uniform(newest.weights) == 4


def test_a_lease_of_somebody_off_the_roster_is_waited_for_too(narrow, subscriber) -> None:
    watcher = subscriber(narrow, listed=False)
    push(narrow, 1)
    lease = watcher.lease()
    push(narrow, 2)
    with pytest.raises(SlotsExhausted, match=rf"pid {os.getpid()} holds version 1 in slot 0\."):
        push(narrow, 3)
    lease.close()
    push(narrow, 3)


def test_who_holds_nothing_is_not_named(narrow, subscriber, peer) -> None:
    """A lease that outlives its subscriber is on no line of the roster; a line says what was used last. Mutant: name
    the lines."""
    push(narrow, 1)
    culprit = peer()
    culprit.call(hold_and_close, str(narrow.handle))
    bystander = subscriber(narrow, name="bystander")
    bystander.lease().close()
    push(narrow, 2)
    with pytest.raises(SlotsExhausted) as raised:
        push(narrow, 3)
    assert f"pid {culprit.pid} holds version 1" in str(raised.value)
    assert "bystander" not in str(raised.value)


def test_neighbouring_slots_have_a_line_together(publisher, subscriber) -> None:
    """The kernel merges their locks. Mutant: read a line's first byte."""
    channel = publisher(filled(SHAPES, 0), max_slots=3, timeout=0.3)
    follower = subscriber(channel)
    leases = burst(channel, follower, 3)
    with pytest.raises(SlotsExhausted) as raised:
        push(channel, 4)
    for number in (1, 2, 3):
        assert f"holds version {number} in slot {number - 1}" in str(raised.value)
    leases.clear()


def hold_and_close(state, handle: str) -> None:
    subscriber = shmsync.Subscriber(handle)
    state.lease = subscriber.lease()
    subscriber.close()


def test_a_push_waits_until_a_slot_is_free(publisher, subscriber) -> None:
    channel = publisher(filled(SHAPES, 0), max_slots=2, timeout=60.0)
    follower = subscriber(channel)
    push(channel, 1)
    lease = follower.lease()
    push(channel, 2)
    waiting = threading.Thread(target=push, args=(channel, 3))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    lease.close()
    waiting.join(30)
    assert (channel.version, channel.stats()["slots"]) == (3, 2)


def test_subsets_and_leases_never_need_more_than_promised(publisher, subscriber) -> None:
    """3N + 2 slots with N subscribers, one lease each: max_slots=None is that many, so a publish never waits."""
    channel = publisher(filled({"leaf": (4,)}, 0), max_subscribers=4, timeout=0.0)
    followers = [subscriber(channel, worker_id=number) for number in range(4)]
    held: list = [None] * 4
    for k in range(400):
        channel.publish(filled({"leaf": (4,)}, k), worker_ids=(k * 7 + k // 5) % 4 if k % 3 else None)
        number = (k * 5 + k // 3) % 4
        held[number] = followers[number].lease()
    assert channel.stats()["slots"] <= 14
    assert channel.version == 400
