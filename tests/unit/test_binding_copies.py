"""Copies and pickles of a bound module are modules like any other: unbound, with values of their own.

Mutants: leave the gate in the copy; let the copy's forward run the original; share the slot with the copy.
"""

import copy
import io
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shmsync.binding import binding_of
from tests.helpers.models import fill, uniform


@pytest.fixture
def world(publisher, subscriber):
    """A channel of one layer, `push(k)` publishes fill(k) on it, and a subscriber."""
    source = nn.Linear(2, 2)
    channel = publisher(source)
    return SimpleNamespace(follower=subscriber(channel), push=lambda k: channel.publish(fill(source, k)))


def ran(module: nn.Module) -> float:
    return uniform(module(torch.zeros(1, 2)))


def roundtrip(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))


def saved(module: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": roundtrip, "torch.save": saved}


def leftovers(module: nn.Module) -> list[str]:
    """Names under which something of shmsync's is in a module."""
    return [name for name, value in vars(module).items() if type(value).__module__.startswith("shmsync")]


@pytest.mark.parametrize("mode", ["map", "copy"])
@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_copies_of_a_bound_module_are_unbound(world, mode, duplicate) -> None:
    worker = nn.Linear(2, 2)
    world.follower.bind(worker, mode)
    world.push(1)
    ran(worker)
    assert leftovers(worker)
    own = duplicate(duplicate(worker))
    world.push(2)
    assert (ran(worker), ran(own)) == (2, 1)
    assert binding_of(own) is None
    assert leftovers(own) == []
    assert own.forward.__self__ is own
    assert world.follower.stats()["forwards"] == 2
    with torch.no_grad():
        own.weight.add_(1)
    assert uniform(worker) == 2


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_a_copy_can_be_bound_itself(world, duplicate) -> None:
    worker = nn.Linear(2, 2)
    world.follower.bind(worker)
    own = duplicate(worker)
    world.follower.bind(own)
    world.push(1)
    assert (ran(worker), ran(own)) == (1, 1)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, roundtrip])
def test_a_copy_of_a_module_around_a_bound_one_is_unbound(world, duplicate) -> None:
    inner = nn.Linear(2, 2)
    outer = nn.Sequential(inner)
    world.follower.bind(inner)
    world.push(1)
    ran(outer)
    own = duplicate(outer)
    world.push(2)
    assert (ran(outer), ran(own)) == (2, 1)
    assert own[0].forward.__self__ is own[0]


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_a_copy_keeps_the_forward_that_somebody_had_put_in(world, duplicate) -> None:
    """The gate stands in front of it; it must not be lost with the gate."""
    worker = nn.Linear(2, 2)
    worker.forward = MyForward()
    world.follower.bind(worker)
    assert duplicate(worker)(None) == "mine"


class MyForward:
    def __call__(self, x: object) -> str:
        return "mine"
