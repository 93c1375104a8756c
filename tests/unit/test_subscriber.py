"""The subscriber: what it sees, waits for and says when the publisher or it itself has gone.

Mutants: read row 0 only; return from wait() on any news; keep a descriptor after a failed start.
"""

import os
import pickle
import threading
import time

import pytest
import torch
from torch import nn

from shmsync import (
    ChannelClosed,
    ChannelCorrupt,
    ChannelError,
    Handle,
    PublisherGone,
    ShmSyncError,
    Subscriber,
    WaitTimeout,
    wire,
)
from tests.helpers import probes
from tests.helpers.models import fill, filled, uniform

SHAPES = {"leaf": (10,)}


@pytest.fixture
def channel(publisher):
    return publisher(filled(SHAPES, 0), max_subscribers=8)


def test_seen_version_and_lag_tell_apart_what_is_there_and_what_is_used(channel, subscriber) -> None:
    follower = subscriber(channel)
    assert (follower.seen, follower.version, follower.lag) == (0, 0, 0)
    for _ in range(3):
        channel.publish()
    assert (follower.seen, follower.version, follower.lag) == (3, 0, 3)
    follower.lease().close()
    assert (follower.seen, follower.version, follower.lag) == (3, 3, 0)
    channel.publish(worker_ids=4)
    assert (follower.seen, follower.lag) == (3, 0), "what goes to others is no news"


def test_with_bindings_the_version_in_use_is_theirs(channel, subscriber) -> None:
    follower = subscriber(channel)
    worker = nn.Module()
    worker.register_buffer("leaf", torch.zeros(10))
    follower.bind(worker)
    channel.publish()
    assert follower.refresh() == 1
    channel.publish()
    with follower.lease() as lease:
        assert (lease.version, follower.version) == (2, 1)
    assert follower.refresh() == 2


def test_stats_count(channel, subscriber) -> None:
    follower = subscriber(channel)
    expected = {"version": 0, "seen": 0, "lag": 0, "forwards": 0, "slots_mapped": 0, "slots_leased": 0}
    expected["device_slots_mapped"] = 0
    assert follower.stats() == expected
    channel.publish()
    lease = follower.lease()
    again = follower.lease()
    channel.publish()
    newer = follower.lease()
    expected = {"version": 2, "seen": 2, "lag": 0, "forwards": 0, "slots_mapped": 2, "slots_leased": 2}
    expected["device_slots_mapped"] = 0
    assert follower.stats() == expected
    for one in (lease, again, newer):
        one.close()
    assert follower.stats()["slots_leased"] == 0


def test_wait_returns_what_came(channel, subscriber) -> None:
    follower = subscriber(channel)
    assert follower.wait(0) == 0
    channel.publish()
    channel.publish()
    assert follower.wait(1) == 2


def test_wait_sees_a_push_of_another_thread(channel, subscriber) -> None:
    follower = subscriber(channel, worker_id=2)

    def push() -> None:
        for ids in (None, 3, 2, None):
            time.sleep(0.02)
            channel.publish(worker_ids=ids)

    thread = threading.Thread(target=push)
    thread.start()
    assert follower.wait(3, timeout=30) >= 3
    assert follower.wait(4, timeout=30) == 4
    thread.join()


def test_wait_runs_out_of_time(channel, subscriber) -> None:
    follower = subscriber(channel, worker_id=0)
    channel.publish()
    channel.publish(worker_ids=1)
    for timeout in (0, 0.05):
        began = time.monotonic()
        with pytest.raises(WaitTimeout, match=f"version 2 within {timeout} s, got version 1"):
            follower.wait(2, timeout=timeout)
        assert timeout <= time.monotonic() - began < 30
    with pytest.raises(TimeoutError):
        follower.wait(9, timeout=0)


def test_wait_ends_when_the_publisher_closes(channel, subscriber) -> None:
    follower = subscriber(channel)
    channel.publish()
    closer = threading.Timer(0.05, channel.close)
    closer.start()
    with pytest.raises(PublisherGone, match=f"pid {os.getpid()}, has ended at version 1; version 2 will not come"):
        follower.wait(2)
    closer.join()
    assert follower.wait(1) == 1, "what is there is there"


def serve(state) -> str:
    """A trainer in another process."""
    import shmsync

    state.channel = shmsync.Publisher(filled(SHAPES, 5))
    state.channel.publish()
    return str(state.channel.handle)


def test_a_killed_publisher_is_noticed_and_its_weights_stay(peer, nothing_left) -> None:
    trainer = peer()
    with Subscriber(trainer.call(serve)) as follower:
        assert follower.publisher_alive()
        lease = follower.lease()
        trainer.kill()
        assert not follower.publisher_alive()
        with pytest.raises(PublisherGone, match=f"pid {trainer.pid}"):
            follower.wait(2)
        assert uniform(lease.weights) == 5
        with follower.lease() as another:
            assert uniform(another.weights) == 5
        with pytest.raises(PublisherGone, match=f"pid {trainer.pid}"):
            Subscriber(follower.handle)
        lease.close()


def test_a_publisher_that_went_before_the_first_look_takes_nothing_away(publisher, subscriber) -> None:
    """Bound at version 0; it publishes and is gone before the next forward: the module keeps its own weights."""
    channel = publisher()
    follower = subscriber(channel)
    worker = fill(nn.Linear(2, 2), 3)
    binding = follower.bind(worker)
    channel.publish(nn.Linear(2, 2))
    channel.close()
    for _ in range(2):
        assert uniform(worker(torch.zeros(1, 2))) == 3
        assert binding.refresh() == follower.seen == follower.lag == 0
    assert follower.stats()["version"] == 0
    assert not follower.publisher_alive()
    with pytest.raises(PublisherGone):
        follower.wait(1)


def test_closed_is_closed(channel, subscriber) -> None:
    follower = subscriber(channel)
    channel.publish()
    follower.lease().close()
    follower.close()
    follower.close()
    uses = [
        follower.lease,
        follower.refresh,
        follower.peers,
        follower.publisher_alive,
        lambda: follower.wait(1),
        lambda: follower.bind(nn.Linear(1, 1)),
    ]
    for use in uses:
        with pytest.raises(ChannelClosed, match="is closed"):
            use()
    assert channel.subscribers() == []


def test_a_context_manager_lets_the_error_through_and_closes(channel) -> None:
    with pytest.raises(KeyError), Subscriber(channel.handle) as follower:
        raise KeyError
    with pytest.raises(ChannelClosed):
        follower.lease()


def test_it_belongs_to_its_process(channel, subscriber) -> None:
    with pytest.raises(ShmSyncError, match=r"send its .handle"):
        pickle.dumps(subscriber(channel))


def test_a_failed_start_leaves_nothing_open(channel) -> None:
    before = probes.descriptors().keys(), len(probes.segment_maps())
    handle = channel.handle
    damaged = [
        {"fd": 10_000},
        {"fd": channel._store.fd},
        {"nonce": "00" * 16},
        {"boot_id": "x"},
        {"pid": 1 << 22},
    ]
    for change in damaged:
        with pytest.raises(ChannelError):
            Subscriber(Handle(**{**vars(handle), **change}))
        with pytest.raises(ValueError, match="worker id"):
            Subscriber(handle, worker_id=8)
    assert (probes.descriptors().keys(), len(probes.segment_maps())) == before


def damage(channel, offset: int, value: int) -> None:
    os.pwrite(channel._store.fd, value.to_bytes(8, "little"), offset)


def test_a_damaged_segment_is_refused(channel, subscriber) -> None:
    channel.publish()
    follower = subscriber(channel)
    damage(channel, wire.offset_of(wire.DATA_HEAD, "slot_stride"), 12345)
    with pytest.raises(ChannelCorrupt, match="slot_stride"):
        follower.lease()


@pytest.mark.parametrize("word", [1 << 16 | 60000, 7 << 16 | 1], ids=["no such slot", "no such version"])
def test_a_damaged_row_is_an_error_and_no_crash(channel, subscriber, monkeypatch, word) -> None:
    monkeypatch.setattr("shmsync.performer._PATIENCE_SECONDS", 0.1)
    channel.publish()
    follower = subscriber(channel)
    damage(channel, channel._store.head.rows_offset, word)
    with pytest.raises(ChannelCorrupt, match=f"version {word >> 16} in slot|slot {word & 0xFFFF}"):
        follower.lease()
    assert follower.stats()["slots_leased"] == 0


def test_a_segment_of_another_channel_is_not_taken_for_ours(channel, publisher, subscriber) -> None:
    other = publisher(filled(SHAPES, 1))
    other.publish()
    follower = subscriber(channel)
    channel._control.mapping.words(wire.CTL_DATA_OFFSET, 1)[0] = other._store.fd + 1
    with pytest.raises(ChannelCorrupt, match="not the one"):
        follower.lease()


def test_slots_are_mapped_when_they_are_met_and_once(channel, subscriber) -> None:
    follower = subscriber(channel)
    channel.publish()
    counts = []
    for _ in range(10):
        channel.publish()
        follower.lease().close()
        counts.append((follower.stats()["slots_mapped"], len(probes.segment_maps())))
    assert counts[0][0] == 1
    assert counts[-1][0] == 2
    assert counts[3:] == [counts[-1]] * 7


def test_two_subscribers_of_one_process_do_not_share_locks(channel, subscriber) -> None:
    """Each has a description of its own: the end of one ends nothing of the other."""
    one, other = subscriber(channel), subscriber(channel)
    channel.publish(filled(SHAPES, 1))
    lease = one.lease()
    other.lease().close()
    other.close()
    for k in (2, 3, 4):
        channel.publish(filled(SHAPES, k))
    assert uniform(lease.weights) == 1


def test_it_reads_through_descriptions_that_cannot_write(channel, subscriber) -> None:
    follower = subscriber(channel)
    channel.publish()
    follower.lease().close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(follower._locks.fd, b"x", 0)
