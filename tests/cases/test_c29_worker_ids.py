"""C29: a push reaches exactly the workers it names, once each.

Mutants: shift the rows by one; store row 0 for a subset; let a newer row 0 hide behind an older row of a worker.
"""

import random

import pytest
import torch

from shmsync import WorkerIdError
from tests.helpers.models import uniform

WORKERS = 3


@pytest.fixture
def channel(publisher):
    channel = publisher({"leaf": torch.zeros(2)}, max_subscribers=WORKERS)
    channel.publish({"leaf": torch.ones(2)})
    return channel


@pytest.fixture
def crew(channel, subscriber):
    return [subscriber(channel, worker_id=number) for number in range(WORKERS)]


def state_of(crew) -> list[tuple[int, float]]:
    """Version and value of every worker, as a lease shows them."""
    states = []
    for follower in crew:
        with follower.lease() as lease:
            assert follower.seen == lease.version
            states.append((lease.version, uniform(lease.weights)))
    return states


ADDRESSES = [
    (None, {0, 1, 2}),
    (0, {0}),
    ([1], {1}),
    ([2, 0], {0, 2}),
    ((1,), {1}),
    ([1, 1], {1}),
    ({0, 2}, {0, 2}),
    (range(3), {0, 1, 2}),
    (iter([2]), {2}),
]


@pytest.mark.parametrize(("ids", "reached"), ADDRESSES, ids=[str(ids) for ids, _ in ADDRESSES])
def test_the_addressed_get_it_and_the_others_keep_their_version(channel, crew, ids, reached) -> None:
    made = channel.publish({"leaf": torch.full((2,), 5.0)}, worker_ids=ids)
    assert made.version == channel.version == 2
    assert (made.leaves, made.nbytes) == (1, 8), "one copy, whatever the number of workers"
    assert state_of(crew) == [(2, 5.0) if number in reached else (1, 1.0) for number in range(WORKERS)]
    assert [channel.addressed(number) for number in range(WORKERS)] == [version for version, _ in state_of(crew)]


@pytest.mark.parametrize("nobody", [[], (), set(), iter([])], ids=["list", "tuple", "set", "iterator"])
def test_nobody_is_nothing(channel, crew, nobody) -> None:
    made = channel.publish({"leaf": torch.full((2,), 5.0)}, worker_ids=nobody)
    assert (made.version, made.leaves, made.nbytes) == (1, 0, 0)
    assert state_of(crew) == [(1, 1.0)] * WORKERS
    assert channel.publish().version == 2, "no version was spent"


BAD = [-1, 3, [0, 3], [-1], "0", ["0"], 1.0, [0.0], [None], True, [True], torch.tensor([0.5]), b"0", object()]


@pytest.mark.parametrize("ids", BAD, ids=str)
def test_a_bad_id_is_named_with_the_valid_range_and_nothing_happens(channel, crew, ids) -> None:
    with pytest.raises(WorkerIdError, match="0 to 2"):
        channel.publish({"leaf": torch.full((2,), 5.0)}, worker_ids=ids)
    assert channel.version == 1
    assert state_of(crew) == [(1, 1.0)] * WORKERS


def test_a_device_no_worker_is_on_is_refused(channel, crew) -> None:
    with pytest.raises(WorkerIdError, match="cuda:5"):
        channel.publish(worker_ids=torch.device("cuda:5"))
    assert channel.version == 1


@pytest.mark.parametrize("worker_id", [-1, 3, 2**40, "0", 1.5, True], ids=str)
def test_a_subscriber_of_no_worker_is_refused(channel, subscriber, worker_id) -> None:
    with pytest.raises(WorkerIdError, match="0 to 2"):
        subscriber(channel, worker_id=worker_id)
    assert channel.subscribers() == []


def test_a_thousand_random_subsets(channel, crew, subscriber) -> None:
    """Against a table of what each worker must have; a subscriber of no worker sees what goes to everybody."""
    chance = random.Random(29)
    onlooker = subscriber(channel, listed=False)
    expected = [(1, 1.0)] * (WORKERS + 1)
    for version in range(2, 1002):
        value = float(version * 3)
        everybody = chance.random() < 0.2
        chosen = chance.sample(range(WORKERS), chance.randint(1, WORKERS))
        channel.publish({"leaf": torch.full((2,), value)}, worker_ids=None if everybody else chosen)
        for number in range(WORKERS + 1):
            if everybody or number in chosen:
                expected[number] = (version, value)
        assert state_of([*crew, onlooker]) == expected
