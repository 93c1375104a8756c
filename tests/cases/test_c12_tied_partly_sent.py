"""C12: one of two tied names stands for both; two different values for them are an error.

Mutants: take the last of the two values; demand both names.
"""

import pytest
import torch
from torch import nn

from shmsync import LayoutMismatch, TiedLeavesDiffer
from tests.helpers.models import bits, snapshot


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.two = nn.Linear(3, 3)
        self.two.weight = self.one.weight

    def forward(self) -> None:
        return None


@pytest.fixture
def world(publisher, subscriber):
    source, worker = Tied(), Tied()
    channel = publisher(source)
    follower = subscriber(channel)
    follower.bind(worker)
    channel.publish()
    follower.refresh()
    return source, channel, follower, worker


@pytest.mark.parametrize("name", ["one.weight", "two.weight"])
def test_one_of_the_two_names_changes_both(world, name) -> None:
    source, channel, follower, worker = world
    new = torch.randn(3, 3)
    made = channel.publish({name: new}, partial=True)
    follower.refresh()
    assert made.leaves >= 1
    assert bits(worker.one.weight) == bits(worker.two.weight) == bits(new)
    assert worker.one.weight is worker.two.weight
    assert bits(worker.one.bias) == bits(source.one.bias)


def test_both_equal_are_accepted(world) -> None:
    _, channel, follower, worker = world
    new = torch.tensor([[float("nan")] * 3] * 3)
    channel.publish({"one.weight": new, "two.weight": new.clone()}, partial=True)
    follower.refresh()
    assert bits(worker.one.weight) == bits(new)


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("difference", [1.0, -0.0], ids=["another value", "another zero"])
def test_both_different_are_refused_by_both_names(world, partial, difference) -> None:
    """To the bit: 0.0 and -0.0 are different weights."""
    _, channel, follower, worker = world
    before = snapshot(worker)
    other = torch.zeros(3, 3)
    other[2, 2] = difference
    push = {"one.weight": torch.zeros(3, 3), "two.weight": other, "one.bias": torch.ones(3), "two.bias": torch.ones(3)}
    with pytest.raises(TiedLeavesDiffer, match=r"`one.weight`.*`two.weight`"):
        channel.publish(push, partial=partial)
    assert (channel.version, follower.refresh()) == (1, 1)
    assert snapshot(worker) == before


def test_an_untied_source_with_equal_values_is_accepted(world) -> None:
    _, channel, follower, worker = world
    untied = nn.ModuleDict({"one": nn.Linear(3, 3), "two": nn.Linear(3, 3)})
    untied["two"].load_state_dict({**untied["two"].state_dict(), "weight": untied["one"].weight})
    channel.publish(untied)
    follower.refresh()
    assert snapshot(worker) == snapshot(untied)


def test_three_names_of_which_two_agree(publisher) -> None:
    """The third is compared too."""
    tied = torch.zeros(2)
    channel = publisher({"a": tied, "b": tied, "c": tied})
    with pytest.raises(TiedLeavesDiffer, match=r"`a`.*`c`"):
        channel.publish({"a": torch.ones(2), "b": torch.ones(2), "c": torch.zeros(2)})


def test_values_that_differ_only_before_the_cast_are_refused(publisher) -> None:
    tied = torch.zeros(2)
    channel = publisher({"a": tied, "b": tied}, dtype=torch.bfloat16)
    with pytest.raises(TiedLeavesDiffer):
        channel.publish({"a": torch.ones(2), "b": torch.ones(2) + 2**-20})


def test_a_module_that_ties_what_the_channel_does_not_is_refused(publisher, subscriber) -> None:
    """One Parameter cannot show two leaves."""
    untied = nn.ModuleDict({"one": nn.Linear(3, 3), "two": nn.Linear(3, 3)})
    channel = publisher(untied)
    channel.publish()
    with pytest.raises(LayoutMismatch, match=r"`one.weight`.*`two.weight`"):
        subscriber(channel).bind(Tied())


def test_a_worker_that_is_not_tied_follows_both_names(publisher, subscriber) -> None:
    source, worker = Tied(), nn.ModuleDict({"one": nn.Linear(3, 3), "two": nn.Linear(3, 3)})
    channel = publisher(source)
    follower = subscriber(channel)
    follower.bind(worker)
    channel.publish()
    follower.refresh()
    assert snapshot(worker) == snapshot(source)
    assert worker["one"].weight is not worker["two"].weight
    follower.close()
    with torch.no_grad():
        worker["one"].weight.zero_()
    assert bits(worker["two"].weight) == bits(source.two.weight), "the worker's own parameters got tied"


def test_one_value_may_come_in_two_dtypes(publisher, subscriber) -> None:
    """Mutant: compare their bytes."""
    channel = publisher(Tied(), dtype=torch.bfloat16)
    channel.publish()
    channel.publish({"one.weight": torch.ones(3, 3), "two.weight": torch.ones(3, 3).double()}, partial=True)
    with subscriber(channel).lease() as lease:
        assert (lease.weights["one", "weight"] == 1).all()
    differing = {"one.weight": torch.ones(3, 3), "two.weight": torch.full((3, 3), 1.5).double()}
    with pytest.raises(TiedLeavesDiffer):
        channel.publish(differing, partial=True)
