"""The roster: who is attached and what it uses, as the publisher and the peers see it.

Mutants: leave a line alive after close(); read the lines of the dead; take the worker's number for None; trust a line
that was found once; of two lines take the first; a line's pid is enough to follow.
"""

import os
import time

import pytest
import torch

from shmsync import SubscribersExhausted, roster
from shmsync.roster import RosterLine
from tests.helpers import workers
from tests.helpers.models import fill


@pytest.fixture
def channel(publisher):
    return publisher({"leaf": torch.zeros(1)}, max_subscribers=4)


def test_a_line_says_who_it_is(channel, subscriber) -> None:
    subscriber(channel)
    subscriber(channel, worker_id=2, name="left arm")
    first, second = channel.subscribers()
    assert (first.line, first.pid, first.worker_id, first.used, first.seen) == (0, os.getpid(), None, 0, 0)
    assert (second.line, second.worker_id, second.name) == (1, 2, "left arm")
    assert first.name == f"subscriber-{os.getpid()}"


def test_worker_zero_is_a_worker(channel, subscriber) -> None:
    subscriber(channel, worker_id=0)
    assert [line.worker_id for line in channel.subscribers()] == [0]


def test_a_line_counts_forwards_and_switches(channel, subscriber) -> None:
    module = torch.nn.Module()
    module.register_buffer("leaf", torch.zeros(1))
    module.forward = lambda: None
    follower = subscriber(channel)
    follower.bind(module)
    before = time.time()
    for _ in range(3):
        channel.publish()
        module()
        module()
    channel.publish()
    assert follower.seen == 4
    (line,) = channel.subscribers()
    assert (line.forwards, line.switches, line.used, line.seen) == (6, 3, 3, 4)
    assert before <= line.switched_seconds <= time.time()
    assert follower.peers() == [line]


def test_all_lines_taken_is_an_error_that_names_the_number(channel, subscriber) -> None:
    followers = [subscriber(channel) for _ in range(4)]
    with pytest.raises(SubscribersExhausted, match="All 4 .*max_subscribers="):
        subscriber(channel)
    followers[1].close()
    assert [line.line for line in channel.subscribers()] == [0, 2, 3], "a closed one is gone at once"
    subscriber(channel, name="next")
    assert [(line.line, line.name) for line in channel.subscribers()][1] == (1, "next")


def test_a_new_line_starts_at_zero(channel, subscriber) -> None:
    """What the one before left in it is gone."""
    first = subscriber(channel, worker_id=3, name="a long name of the one before")
    channel.publish()
    first.lease().close()
    first.close()
    second = subscriber(channel, name="x")
    (line,) = channel.subscribers()
    assert line == RosterLine(0, line.pid, None, "x", 0, 0, 0, 0, 0.0)
    assert second.version == 0


def test_one_that_only_watches_takes_no_line(channel, subscriber) -> None:
    for _ in range(4):
        subscriber(channel)
    watcher = subscriber(channel, listed=False)
    channel.publish()
    assert watcher.seen == 1
    with watcher.lease() as lease:
        assert lease.version == 1
    assert len(watcher.peers()) == len(channel.subscribers()) == 4


@pytest.mark.parametrize("name", ["ж" * 100, "naïve", "", "a\0b", "🦜" * 40], ids=ascii)
def test_any_name_fits(channel, subscriber, name) -> None:
    """64 bytes of it, cut between characters or not."""
    subscriber(channel, name=name)
    (line,) = channel.subscribers()
    assert name[:10].split("\0")[0] in line.name
    assert len(line.name.encode()) <= 64 + 2


def module() -> torch.nn.Module:
    return torch.nn.Linear(2, 2)


def test_a_killed_process_is_gone_from_it(publisher, peer) -> None:
    channel = publisher(fill(module(), 1))
    channel.publish()
    crew = [peer(), peer()]
    for number, worker in enumerate(crew):
        worker.call(workers.attach, str(channel.handle), module, number)
    assert [(line.worker_id, line.pid) for line in channel.subscribers()] == [(0, crew[0].pid), (1, crew[1].pid)]
    pids = [worker.pid for worker in crew]
    assert channel.following([os.getpid(), *pids, 0]) == set(pids)
    crew[0].kill()
    assert [line.worker_id for line in channel.subscribers()] == [1]
    assert channel.following(pids) == {crew[1].pid}
    crew[1].call(workers.detach)
    assert channel.subscribers() == []
    assert channel.following(pids) == set()


def test_a_process_follows_as_long_as_one_of_its_subscribers_does(channel, subscriber, monkeypatch) -> None:
    """Though a line before that is left from a dead one of the same pid. Mutant: look at its first line alone."""
    first, second = subscriber(channel), subscriber(channel, worker_id=2)
    assert channel.following([os.getpid()]) == {os.getpid()}
    with monkeypatch.context() as patch:
        patch.setattr(roster.OwnLine, "left", lambda line: None)
        first.close()
    assert channel.following([os.getpid()]) == {os.getpid()}
    second.close()
    assert channel.following([os.getpid()]) == set()


# --- answers to the bell


def test_nobody_has_answered_yet(channel, subscriber) -> None:
    subscriber(channel, worker_id=1)
    assert channel.answer(1, os.getpid()) is None


def test_an_answer_is_found_by_worker_and_process(channel, subscriber) -> None:
    channel.publish()
    first, second = subscriber(channel, worker_id=0), subscriber(channel, worker_id=3)
    second.lease().close()
    second.answer(1)
    assert channel.answer(3, os.getpid()) == (1, 1)
    assert channel.answer(0, os.getpid()) is None
    assert channel.answer(3, os.getpid() + 1) is None
    first.answer(1)
    assert channel.answer(0, os.getpid()) == (0, 1), "it has not switched"


def test_an_answer_is_found_again_after_its_line_was_taken_by_another(channel, subscriber) -> None:
    """The place that was remembered is somebody else's then."""
    first = subscriber(channel, worker_id=1)
    first.answer(5)
    assert channel.answer(1, os.getpid()) == (0, 5)
    first.close()
    other, again = subscriber(channel, worker_id=2), subscriber(channel, worker_id=1)
    other.answer(9)
    assert channel.answer(1, os.getpid()) is None
    again.answer(7)
    assert channel.answer(1, os.getpid()) == (0, 7)
    assert channel.answer(2, os.getpid()) == (0, 9)


def test_a_closed_subscriber_has_not_answered(channel, subscriber) -> None:
    first = subscriber(channel, worker_id=1)
    first.answer(5)
    assert channel.answer(1, os.getpid()) == (0, 5)
    first.close()
    assert channel.answer(1, os.getpid()) is None


def test_of_two_lines_of_one_worker_the_newer_answer_counts(channel, subscriber) -> None:
    older, newer = subscriber(channel, worker_id=1), subscriber(channel, worker_id=1)
    newer.answer(8)
    older.answer(4)
    assert channel.answer(1, os.getpid()) == (0, 8)
