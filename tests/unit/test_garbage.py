"""What is dropped is gone at once: no cycle keeps a slot, a descriptor or a line until some collection.

Mutants: let a lease refer to its subscriber's bound method and the other way round; keep bindings in a global table.
"""

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from shmsync import Publisher, Subscriber
from tests.helpers import probes
from tests.helpers.models import fill, filled

SHAPES = {"leaf": (10,)}


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def left() -> tuple[int, int]:
    return len(probes.segment_descriptors()), len(probes.segment_maps())


def test_a_dropped_publisher() -> None:
    channel = Publisher(filled(SHAPES, 0))
    channel.publish()
    channel.publish()
    del channel
    assert left() == (0, 0)


def test_a_dropped_subscriber(publisher) -> None:
    channel = publisher(filled(SHAPES, 0))
    channel.publish()
    before = left()
    follower = Subscriber(channel.handle)
    follower.lease().close()
    assert left() > before
    del follower
    assert left() == before
    assert channel.subscribers() == []


def test_a_dropped_lease_of_a_dropped_subscriber(publisher) -> None:
    channel = publisher(filled(SHAPES, 0))
    channel.publish()
    before = left()
    lease = Subscriber(channel.handle).lease()
    tensor = lease.weights["leaf"]
    del lease
    assert left() > before
    del tensor
    assert left() == before


@pytest.mark.parametrize("end", ["unbind", "close", "both"])
def test_an_unbound_module(publisher, end) -> None:
    channel = publisher(nn.Linear(2, 2))
    channel.publish()
    before = left()
    follower, worker = Subscriber(channel.handle), nn.Linear(2, 2)
    binding = follower.bind(worker)
    worker(torch.ones(1, 2))
    module, watched = weakref.ref(worker), weakref.ref(binding)
    if end != "close":
        binding.unbind()
    if end != "unbind":
        follower.close()
    del follower, binding
    assert watched() is None
    assert left() == before
    del worker
    assert module() is None


def test_a_bound_module_dropped_with_all_that_binds_it_is_collected(publisher) -> None:
    """It refers to its gate and the gate to it: the collector may be needed, but must be enough."""
    channel = publisher(nn.Linear(2, 2))
    channel.publish()
    before = left()
    for _ in range(3):
        follower, worker = Subscriber(channel.handle), nn.Linear(2, 2)
        follower.bind(worker)
        worker(torch.ones(1, 2))
    del follower, worker
    gc.collect()
    assert left() == before
    assert channel.subscribers() == []
    for k in range(5):
        channel.publish(fill(nn.Linear(2, 2), k))
    assert channel.stats()["slots"] <= 3


def test_errors_hold_no_segment_once_they_are_gone(publisher) -> None:
    channel = publisher(nn.Linear(2, 2))
    channel.publish()
    before = left()
    with Subscriber(channel.handle) as follower:
        for _ in range(3):
            try:
                follower.bind(nn.Linear(3, 3))
            except ValueError as error:
                del error
            with pytest.raises(ValueError, match="worker id"):
                Subscriber(channel.handle, worker_id=-1)
    del follower
    gc.collect()  # tracebacks are cycles
    assert left() == before


def test_slots_of_closed_bindings_are_free_at_once(publisher) -> None:
    channel = publisher(nn.Linear(2, 2), max_slots=2, timeout=0.0)
    for k in range(5):
        channel.publish(fill(nn.Linear(2, 2), k))
        follower, worker = Subscriber(channel.handle), nn.Linear(2, 2)
        follower.bind(worker)
        follower.close()
