"""The lease: while it, or a tensor of it, lives, its bytes stay.

Mutants: end the lease with its block whatever lives on; unlock at the first of several leases; release under the mutex
from the garbage collector (a deadlock).
"""

import gc
import threading

import numpy as np
import pytest
import torch

from shmsync import ShmSyncError, Subscriber
from tests.helpers.models import filled, uniform

SHAPES = {"a.weight": (30,), "a.bias": (3,), "b": (5,)}


@pytest.fixture
def channel(publisher):
    channel = publisher(filled(SHAPES, 0))
    channel.publish(filled(SHAPES, 1))
    return channel


@pytest.fixture
def follower(channel, subscriber):
    return subscriber(channel)


def push_on(channel, count: int = 5) -> None:
    for _ in range(count):
        channel.publish(filled(SHAPES, channel.version + 1))


def leased(follower) -> int:
    return follower.stats()["slots_leased"]


def test_weights_are_nested_locked_and_of_the_newest_version(channel, follower) -> None:
    push_on(channel, 2)
    with follower.lease() as lease:
        assert lease.version == 3
        assert lease.weights.is_locked
        assert set(lease.weights.keys(True, True)) == {"b", ("a", "bias"), ("a", "weight")}
        assert lease.weights["a", "weight"].shape == (30,)
        assert uniform(lease.weights) == 3
        with pytest.raises(RuntimeError, match="lock"):
            lease.weights["b"] = torch.zeros(5)


def test_it_holds_its_version_while_others_come(channel, follower) -> None:
    with follower.lease() as lease:
        push_on(channel)
        assert uniform(lease.weights) == 1
    push_on(channel)
    with follower.lease() as lease:
        assert uniform(lease.weights) == channel.version


def test_it_ends_with_its_block(channel, follower) -> None:
    with follower.lease() as lease:
        assert leased(follower) == 1
    assert leased(follower) == 0
    with pytest.raises(ShmSyncError, match="has ended"):
        lease.weights  # noqa: B018
    lease.close()


OUTLIVING = {
    "tensor": lambda weights: weights["a", "weight"],
    "view": lambda weights: weights["a", "weight"][5:7].view(2, 1),
    "detached": lambda weights: weights["b"].detach(),
    "numpy": lambda weights: weights["b"].numpy(),
    "weights": lambda weights: weights,
    "subtree": lambda weights: weights["a"],
    "storage": lambda weights: weights["b"].untyped_storage(),
    "dlpack": lambda weights: np.from_dlpack(weights["b"]),
}


def value(kept: object) -> float:
    if isinstance(kept, np.ndarray):
        return uniform([torch.from_numpy(kept.copy())])
    if isinstance(kept, torch.UntypedStorage):
        return uniform([torch.tensor([]).set_(kept)])
    return uniform(kept)


@pytest.mark.parametrize("keep", OUTLIVING.values(), ids=OUTLIVING)
def test_it_outlives_its_block_with_the_last_of_its_tensors(channel, follower, keep) -> None:
    with follower.lease() as lease:
        kept = keep(lease.weights)
    push_on(channel)
    assert value(kept) == 1
    assert leased(follower) == 1
    del kept
    assert leased(follower) == 0, "at once, not at some collection"


def test_dropped_without_a_block_it_ends_too(channel, follower) -> None:
    lease = follower.lease()
    assert leased(follower) == 1
    del lease
    assert leased(follower) == 0


def test_several_leases_on_one_slot_end_one_by_one(channel, follower) -> None:
    one, other = follower.lease(), follower.lease()
    one.close()
    push_on(channel)
    assert uniform(other.weights) == 1
    assert leased(follower) == 1
    other.close()
    assert leased(follower) == 0


def test_it_outlives_the_subscribers_close(channel, follower) -> None:
    lease = follower.lease()
    kept = lease.weights["b"]
    follower.close()
    push_on(channel)
    assert uniform(kept) == 1
    assert uniform(lease.weights) == 1


def test_it_outlives_the_subscriber_itself(channel, subscriber) -> None:

    lease = Subscriber(channel.handle).lease()
    gc.collect()
    push_on(channel)
    assert uniform(lease.weights) == 1
    del lease
    push_on(channel)
    assert channel.stats()["slots"] <= 3


def test_it_ends_on_another_thread_and_in_the_middle_of_anything(channel, follower) -> None:
    """The last tensor of a lease may die while the lease mutex is held, here by this very thread."""
    lease = follower.lease()
    with follower._mutex:
        lease.close()
        assert leased(follower) == 1, "it cannot end now"
    follower.lease().close()
    assert leased(follower) == 0
    boxes = [[follower.lease()] for _ in range(20)]
    threads = [threading.Thread(target=box.clear) for box in boxes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert leased(follower) == 0


def test_threads_take_and_drop_leases_at_once(channel, follower) -> None:
    wrong: list[object] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            with follower.lease() as lease:
                if uniform(lease.weights) != lease.version:
                    wrong.append(lease.version)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    push_on(channel, 300)
    stop.set()
    for thread in threads:
        thread.join(30)
    assert wrong == []
    assert leased(follower) == 0
    assert channel.version == 301


def test_keys_that_no_nesting_can_show_stay_flat(publisher, subscriber) -> None:
    channel = publisher({"a": torch.ones(1), "a.b": torch.ones(2)})
    channel.publish()
    with subscriber(channel).lease() as lease:
        assert set(lease.weights.keys()) == {"a", "a.b"}
        assert lease.weights["a.b"].shape == (2,)


def test_it_is_for_every_kind_of_reader(channel, follower) -> None:
    """In inference mode, too, it gives ordinary tensors without a graph."""
    with torch.inference_mode(), follower.lease() as lease:
        assert not lease.weights["b"].is_inference()
        assert not lease.weights["b"].requires_grad
