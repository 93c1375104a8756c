"""The publisher: what a publish writes, to whom, and what it refuses.

Slots and memory are in test_publisher_slots.py, worker ids in tests/cases/test_c29_worker_ids.py.
Mutants: advance the version before the checks; keep the sources of a push; let threads publish at once.
"""

import os
import pickle
import threading

import numpy as np
import pytest
import torch
from torch import nn

from shmsync import (
    ChannelClosed,
    LayoutMismatch,
    LimitError,
    NothingPublished,
    NotThePublisher,
    Publication,
    Publisher,
    ShmSyncError,
)
from shmsync.channel import Store
from tests.helpers.models import fill, filled, uniform

SHAPES = {"small": (10,), "large": (1000,), "scalar": ()}
NBYTES = 4 * 1011


@pytest.fixture
def channel(publisher):
    return publisher(filled(SHAPES, 0))


def test_nothing_is_published_at_construction(channel, subscriber) -> None:
    follower = subscriber(channel)
    assert (channel.version, follower.seen) == (0, 0)
    with pytest.raises(NothingPublished, match="Nothing is published"):
        follower.lease()


def test_a_push_is_one_line_in_the_log_for_those_who_ask(publisher, caplog) -> None:
    """Mutants: log at INFO; a line per leaf."""
    channel = publisher({"a": torch.zeros(2), "b": torch.zeros(3)}, name="policy")
    with caplog.at_level("INFO", "shmsync"):
        channel.publish()
    assert caplog.messages == []
    with caplog.at_level("DEBUG", "shmsync"):
        channel.publish()
        channel.publish(worker_ids=[2, 0])
    assert [text.rpartition(",")[0] for text in caplog.messages] == [
        "policy: version 2 to everybody, 2 leaves, 20 bytes",
        "policy: version 3 to workers [0, 2], 2 leaves, 20 bytes",
    ]


def test_a_publication_says_what_was_written(channel) -> None:
    made = channel.publish()
    assert isinstance(made, Publication)
    assert (made.version, made.leaves, made.nbytes) == (1, 3, NBYTES)
    assert 0 < made.seconds < 60


def test_weights_default_to_the_constructors_as_they_are_now(publisher, subscriber) -> None:
    source = nn.Linear(2, 2)
    channel = publisher(source)
    follower = subscriber(channel)
    for k in (1, 2):
        fill(source, k)
        channel.publish()
        with follower.lease() as lease:
            assert uniform(lease.weights) == k
    source.weight = nn.Parameter(torch.full((2, 2), 3.0))
    source.bias = nn.Parameter(torch.full((2,), 3.0))
    channel.publish()
    with follower.lease() as lease:
        assert uniform(lease.weights) == 3


def test_without_weights_the_first_push_fixes_the_layout(publisher, subscriber) -> None:
    channel = publisher()
    follower = subscriber(channel)
    assert channel.layout is follower.layout is None
    assert channel.stats()["slot_nbytes"] == 0
    with pytest.raises(NothingPublished, match="made without weights"):
        channel.publish()
    assert channel.publish(filled(SHAPES, 1)).version == 1
    assert channel.layout == follower.layout
    assert set(follower.layout.index) == set(SHAPES)
    with pytest.raises(LayoutMismatch):
        channel.publish({"small": torch.ones(10)})
    with pytest.raises(NothingPublished):
        channel.publish()


def test_a_partial_push_writes_only_what_differs_once_the_slots_are_warm(channel, subscriber) -> None:
    """Steady state: the bytes of the changed leaf, whichever it is."""
    channel.publish()
    for k in range(1, 5):
        channel.publish({"small": torch.full((10,), float(k))}, partial=True)
    for key, shape in SHAPES.items():
        for _ in range(3):  # until both slots have this leaf's value
            channel.publish({key: torch.zeros(shape)}, partial=True)
        made = channel.publish({key: torch.ones(shape)}, partial=True)
        assert (made.leaves, made.nbytes) == (1, 4 * torch.Size(shape).numel())
    with subscriber(channel).lease() as lease:
        assert uniform(lease.weights) == 1


def test_a_partial_push_into_a_cold_slot_says_what_it_completed(channel) -> None:
    channel.publish()
    made = channel.publish({"small": torch.ones(10)}, partial=True)
    assert (made.leaves, made.nbytes) == (3, NBYTES)


def test_a_full_push_of_the_same_tensors_writes_them_all(channel) -> None:
    """The publisher cannot know that nobody changed them."""
    weights = filled(SHAPES, 3)
    for _ in range(3):
        assert channel.publish(weights).nbytes == NBYTES


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_bytes_are_those_that_are_stored(publisher, dtype) -> None:
    channel = publisher({**filled(SHAPES, 0), "count": torch.zeros(3, dtype=torch.int64)}, dtype=dtype)
    assert channel.publish().nbytes == 1011 * dtype.itemsize + 24


def test_two_threads_advance_the_version_exactly(channel, subscriber) -> None:
    """And every version is of one of them."""
    versions: list[int] = []

    def push(k: int) -> None:
        for _ in range(300):
            versions.append(channel.publish(filled(SHAPES, k)).version)

    threads = [threading.Thread(target=push, args=(k,)) for k in (1, 2, 3)]
    follower = subscriber(channel)
    for thread in threads:
        thread.start()
    values = set()
    while any(thread.is_alive() for thread in threads):
        if follower.seen:
            with follower.lease() as lease:
                values.add(uniform(lease.weights))
    for thread in threads:
        thread.join()
    assert values <= {1.0, 2.0, 3.0}
    assert sorted(versions) == list(range(1, 901))
    assert channel.version == follower.seen == 900


def test_a_failed_copy_burns_its_number_and_shows_nothing(channel, subscriber, monkeypatch) -> None:
    channel.publish(filled(SHAPES, 1))
    follower = subscriber(channel)
    with monkeypatch.context() as patch:
        break_copies(patch)
        with pytest.raises(RuntimeError, match="half way"):
            channel.publish(filled(SHAPES, 2))
    assert channel.version == follower.seen == 1
    with follower.lease() as lease:
        assert uniform(lease.weights) == 1
    assert channel.publish(filled(SHAPES, 3)).version == 3
    with follower.lease() as lease:
        assert uniform(lease.weights) == 3


def break_copies(patch: pytest.MonkeyPatch) -> None:
    """From now on the first leaf arrives and then the copy fails."""
    copy_in = Store.copy_in

    def broken(store: Store, slot: int, leaves: np.ndarray) -> None:
        copy_in(store, slot, leaves[:1])
        raise RuntimeError("half way")

    patch.setattr(Store, "copy_in", broken)


def test_after_a_failed_partial_push_its_leaf_is_not_taken_for_written(channel, subscriber, monkeypatch) -> None:
    """Its stamps are unknown, not those of before: the slot is completed from the newest version."""
    channel.publish(filled(SHAPES, 1))
    channel.publish(filled(SHAPES, 1))
    with monkeypatch.context() as patch:
        break_copies(patch)
        with pytest.raises(RuntimeError):
            channel.publish({"large": torch.full((1000,), 9.0)}, partial=True)
    channel.publish({"small": torch.ones(10)}, partial=True)
    with subscriber(channel).lease() as lease:
        assert uniform(lease.weights) == 1


def test_closed_is_closed(channel, subscriber) -> None:
    channel.publish(filled(SHAPES, 1))
    follower = subscriber(channel)
    lease = follower.lease()
    channel.close()
    channel.close()
    for use in (
        channel.publish,
        channel.subscribers,
        channel.stats,
        lambda: channel.handle,
        lambda: channel.addressed(0),
    ):
        with pytest.raises(ChannelClosed, match="is closed"):
            use()
    assert uniform(lease.weights) == 1, "subscribers keep what they hold"
    assert not follower.publisher_alive()


def test_a_context_manager_lets_the_error_through_and_closes() -> None:
    with pytest.raises(KeyError, match="real"), Publisher(filled(SHAPES, 0)) as channel:
        raise KeyError("real")
    with pytest.raises(ChannelClosed):
        channel.publish()


def test_it_stays_in_its_process(channel) -> None:
    with pytest.raises(NotThePublisher, match=r"send publisher.handle"):
        pickle.dumps(channel)


def test_a_forked_child_is_not_the_publisher(channel, subscriber) -> None:
    """Nor does the child's end close the channel."""
    channel.publish(filled(SHAPES, 1))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            channel.publish(filled(SHAPES, 2))
        except NotThePublisher as error:
            os.write(writer, str(error).encode())
            channel.close()
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    text = os.read(reader, 1000).decode()
    os.close(reader)
    assert str(child) in text
    assert str(os.getpid()) in text
    follower = subscriber(channel)
    assert (follower.seen, follower.publisher_alive()) == (1, True)
    assert channel.publish(filled(SHAPES, 3)).version == 2


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"storage": "disk"}, ShmSyncError, "'disk'"),
        ({"dtype": torch.int64}, ShmSyncError, "int64"),
        ({"max_subscribers": 0}, LimitError, "1 to 4096, got 0"),
        ({"max_subscribers": 5000}, LimitError, "got 5000"),
        ({"max_slots": 1}, LimitError, "2 to 65536, got 1"),
        ({"max_slots": 70000}, LimitError, "got 70000"),
    ],
)
def test_options_out_of_range_are_named(options, error, text) -> None:
    with pytest.raises(error, match=text):
        Publisher(filled(SHAPES, 0), **options)


def test_publishing_in_inference_mode_is_publishing(channel, subscriber) -> None:
    with torch.inference_mode():
        channel.publish(filled(SHAPES, 1))
        channel.publish({"small": torch.ones(10)}, partial=True)
    channel.publish({"scalar": torch.tensor(1.0)}, partial=True)
    with subscriber(channel).lease() as lease:
        assert uniform(lease.weights) == 1
        assert not any(tensor.is_inference() for tensor in lease.weights.values())
