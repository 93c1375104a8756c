"""share_memory() and torch.multiprocessing move a mapped tensor's storage out of the slot: one warning, right values.

Mutant: never compare addresses; the tensors of that slot then show the version at which they were moved, for ever.
"""

import pickle
import warnings

import pytest
import torch
from torch import nn

from tests.helpers.models import fill, uniform


class World:
    def __init__(self, publisher, subscriber) -> None:
        self.source, self.worker = nn.Linear(2, 2), nn.Linear(2, 2)
        self.channel = publisher(self.source)
        self.follower = subscriber(self.channel)
        self.binding = self.follower.bind(self.worker)

    def push(self, k: float) -> float:
        self.channel.publish(fill(self.source, k))
        return uniform(self.worker(torch.zeros(1, 2)))


@pytest.fixture
def world(publisher, subscriber):
    return World(publisher, subscriber)


def share_parameter(world: World) -> None:
    world.worker.weight.share_memory_()


def share_module(world: World) -> None:
    world.worker.share_memory()


def send_state_dict(world: World) -> None:
    for tensor in world.worker.state_dict().values():
        send(tensor)


def send_parameter(world: World) -> None:
    send(world.worker.bias)


def send(tensor: torch.Tensor) -> None:
    """What torch.multiprocessing's reductions do to a tensor that is put into a queue."""
    tensor.untyped_storage()._share_fd_cpu_()


MOVES = [share_parameter, share_module, send_state_dict, send_parameter]


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
def test_a_moved_slot_is_mapped_again_with_one_warning(world, move) -> None:
    world.push(1)
    move(world)
    assert uniform(world.worker) == 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k in range(2, 12):
            assert world.push(k) == k
            assert uniform(world.worker) == k
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == 1
    assert "moved out of the channel" in texts[0]
    assert world.binding.mode == "map"


def test_moved_again_and_again_it_is_warned_about_once(world) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k in range(1, 12):
            assert world.push(k) == k
            world.worker.share_memory()
    assert len(caught) == 1


def test_moved_tensors_are_nobodys_weights(world) -> None:
    """The slot is free for the publisher, and what was moved keeps its value."""
    world.push(1)
    kept = world.worker.weight.detach()
    world.worker.share_memory()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for k in range(2, 8):
            world.push(k)
    assert uniform(kept) in {1.0}
    assert world.channel.stats()["slots"] <= 3


def test_closing_after_a_move_keeps_the_values(world) -> None:
    world.push(1)
    world.worker.share_memory()
    world.follower.close()
    world.channel.publish(fill(world.source, 2))
    assert uniform(world.worker) == 1
    assert uniform(world.worker(torch.zeros(1, 2))) == 1


def test_a_lease_that_was_moved_harms_no_later_lease(world) -> None:
    for k in range(1, 8):
        world.channel.publish(fill(world.source, k))
        with world.follower.lease() as lease:
            assert uniform(lease.weights) == k
            lease.weights["weight"].share_memory_()
            assert uniform(lease.weights) == k


def test_plain_pickles_move_nothing(world) -> None:
    world.push(1)
    before = world.worker.weight.data_ptr()
    pickle.dumps(world.worker.state_dict())
    assert world.worker.weight.data_ptr() == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert world.push(2) == 2
