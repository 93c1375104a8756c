"""The binding: one module on one channel, from bind() to its end.

What may happen to the module's tensors is in test_targets.py, kinds of modules in test_binding_kinds.py,
copies and pickles in test_binding_copies.py.
Mutants: switch in the middle of hold(); leave the parameters in the slot at unbind.
"""

import threading

import pytest
import torch
from torch import nn

from shmsync import BindingError, ChannelClosed, LayoutMismatch, Publisher, Subscriber
from shmsync.binding import binding_of
from tests.helpers import probes
from tests.helpers.models import fill, snapshot, uniform


@pytest.fixture
def source():
    return fill(nn.Linear(2, 2), 0)


@pytest.fixture
def channel(publisher, source):
    return publisher(source)


def push(channel: Publisher, source: nn.Module, k: float) -> None:
    channel.publish(fill(source, k))


def ran(module: nn.Module) -> float:
    """What a forward computes with: weight + bias, over one input of 1."""
    return uniform(module(torch.zeros(1, 2)))


modes = pytest.mark.parametrize("mode", ["auto", "map", "copy"])


@modes
def test_each_forward_is_on_the_newest_version(channel, source, subscriber, mode) -> None:
    worker = nn.Linear(2, 2)
    binding = subscriber(channel).bind(worker, mode)
    assert binding.version == 0
    for k in (1, 2, 3):
        push(channel, source, k)
        assert ran(worker) == k
        assert binding.version == k


@modes
def test_at_version_zero_a_module_keeps_its_own_weights(publisher, subscriber, mode) -> None:
    for channel in (publisher(), publisher(nn.Linear(2, 2))):
        worker = fill(nn.Linear(2, 2), 7)
        address = worker.weight.data_ptr()
        subscriber(channel).bind(worker, mode)
        assert ran(worker) == 7
        assert worker.weight.data_ptr() == address
        channel.publish(fill(nn.Linear(2, 2), 1))
        assert ran(worker) == 1


def test_mode_is_what_it_turned_out_to_be(publisher, subscriber) -> None:
    channel = publisher()
    assert subscriber(channel).bind(nn.Linear(2, 2)).mode == "auto"
    channel.publish(nn.Linear(2, 2))
    assert subscriber(channel).bind(nn.Linear(2, 2)).mode == "map"
    assert subscriber(channel).bind(nn.Linear(2, 2), "copy").mode == "copy"


@pytest.mark.parametrize("mode", ["", "both", None, "MAP"])
def test_another_mode_is_refused(channel, subscriber, mode) -> None:
    worker = nn.Linear(2, 2)
    with pytest.raises(BindingError, match="'auto', 'map', 'copy'"):
        subscriber(channel).bind(worker, mode)
    assert binding_of(worker) is None


def test_what_is_no_module_is_refused(channel, subscriber) -> None:
    with pytest.raises(BindingError, match="int - at 'b'"):
        subscriber(channel).bind({"a": nn.Linear(2, 2), "b": 3})


@modes
def test_hold_excludes_a_switch_and_begins_on_the_newest(channel, source, subscriber, mode) -> None:
    worker = nn.Linear(2, 2)
    follower = subscriber(channel)
    binding = follower.bind(worker, mode)
    push(channel, source, 1)
    with binding.hold() as version:
        assert version == binding.version == 1
        for k in (2, 3, 4):
            push(channel, source, k)
            assert ran(worker) == 1
            assert follower.refresh() == 1
            assert uniform(worker) == 1
    assert ran(worker) == 4


@modes
def test_hold_keeps_a_graph_valid(channel, source, subscriber, mode) -> None:
    worker = nn.Linear(2, 2)
    binding = subscriber(channel).bind(worker, mode)
    push(channel, source, 2)
    x = torch.ones(1, 2, requires_grad=True)
    with binding.hold():
        loss = worker(x).sum()
        push(channel, source, 3)
        push(channel, source, 4)
        loss.backward()
    assert x.grad.tolist() == [[4.0, 4.0]]


@modes
def test_a_switch_in_inference_mode_leaves_ordinary_parameters(channel, source, subscriber, mode) -> None:
    """The next forward may be a training one."""
    worker = nn.Linear(2, 2)
    binding = subscriber(channel).bind(worker, mode)
    for k in (1, 2, 3):
        push(channel, source, k)
        with torch.inference_mode():
            assert ran(worker) == k
        assert not any(p.is_inference() or p.data.is_inference() for p in worker.parameters())
        with binding.hold():
            worker.zero_grad()
            worker(torch.ones(1, 2)).sum().backward()
        assert worker.bias.grad.tolist() == [1.0, 1.0]


def test_hold_that_raises_ends(channel, source, subscriber) -> None:
    worker = nn.Linear(2, 2)
    binding = subscriber(channel).bind(worker)
    with pytest.raises(KeyError), binding.hold():
        raise KeyError
    push(channel, source, 1)
    assert ran(worker) == 1


def test_a_forward_that_raises_lets_the_next_switch_through(channel, source, subscriber) -> None:
    worker = nn.Linear(2, 2)
    binding = subscriber(channel).bind(worker)
    with pytest.raises(RuntimeError):
        worker(torch.zeros(1, 5))
    push(channel, source, 1)
    assert binding.refresh() == 1


@modes
def test_unbind_keeps_the_values_and_lets_the_slot_go(channel, source, subscriber, mode) -> None:
    worker = nn.Linear(2, 2)
    follower = subscriber(channel)
    binding = follower.bind(worker, mode)
    push(channel, source, 1)
    ran(worker)
    binding.unbind()
    binding.unbind()
    assert follower.stats()["slots_leased"] == 0
    assert binding_of(worker) is None
    for k in (2, 3, 4):
        push(channel, source, k)
        assert (ran(worker), follower.refresh()) == (1, 1)
    with torch.no_grad():
        worker.weight.add_(1)
    assert not {"forward", "_call_impl"} & vars(worker).keys()


def test_unbind_gives_an_own_forward_back(channel, source, subscriber) -> None:
    """One that somebody had put into the instance."""
    worker = nn.Linear(2, 2)
    mine = worker.forward = lambda x: "mine"
    binding = subscriber(channel).bind(worker)
    assert worker(None) == "mine"
    binding.unbind()
    assert worker.forward is mine
    assert worker(None) == "mine"


@modes
def test_closing_the_subscriber_unbinds(channel, source, subscriber, mode) -> None:
    worker = nn.Linear(2, 2)
    follower = subscriber(channel)
    binding = follower.bind(worker, mode)
    push(channel, source, 1)
    ran(worker)
    follower.close()
    push(channel, source, 2)
    push(channel, source, 3)
    assert ran(worker) == 1
    assert binding.refresh() == binding.version == 0
    with binding.hold():
        assert ran(worker) == 1
    with pytest.raises(ChannelClosed):
        follower.bind(worker)


@modes
def test_rebinding_moves_to_another_channel(publisher, subscriber, mode) -> None:
    """As a worker goes over to a restarted trainer's channel."""
    old, new = publisher(fill(nn.Linear(2, 2), 1)), publisher(fill(nn.Linear(2, 2), 100))
    for channel in (old, new):
        channel.publish()
    worker = nn.Linear(2, 2)
    first, second = subscriber(old), subscriber(new)
    before = first.bind(worker, mode)
    assert ran(worker) == 1
    after = second.bind(worker, mode)
    assert binding_of(worker) is after
    assert ran(worker) == 100
    old.publish(fill(nn.Linear(2, 2), 2))
    assert ran(worker) == 100
    assert first.stats()["slots_leased"] == 0
    before.unbind()
    first.close()
    new.publish(fill(nn.Linear(2, 2), 200))
    assert ran(worker) == 200
    after.unbind()
    assert not {"forward", "_call_impl"} & vars(worker).keys()


def test_rebinding_to_the_same_subscriber_changes_the_mode(channel, source, subscriber) -> None:
    worker = nn.Linear(2, 2)
    follower = subscriber(channel)
    push(channel, source, 1)
    follower.bind(worker, "map")
    binding = follower.bind(worker, "copy")
    push(channel, source, 2)
    assert (ran(worker), binding.mode) == (2, "copy")
    assert follower.stats()["forwards"] == 1, "one gate, not two"
    assert len(probes.segment_maps()) > 0


def test_a_refused_rebinding_leaves_the_old_binding(channel, source, publisher, subscriber) -> None:
    worker = nn.Linear(2, 2)
    binding = subscriber(channel).bind(worker)
    push(channel, source, 1)
    other = publisher(nn.Linear(3, 3))
    other.publish()
    with pytest.raises(LayoutMismatch):
        subscriber(other).bind(worker)
    push(channel, source, 2)
    assert (ran(worker), binding_of(worker)) == (2, binding)


def test_unbinding_waits_for_a_forward_of_another_thread(channel, source, subscriber) -> None:
    """Else the publisher could write where it reads."""
    inside, go = threading.Event(), threading.Event()
    seen: list[float] = []

    class Slow(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.set()
            go.wait(20)
            seen.append(uniform(self))
            return super().forward(x)

    worker = Slow(2, 2)
    follower = subscriber(channel)
    follower.bind(worker)
    push(channel, source, 1)
    thread = threading.Thread(target=ran, args=(worker,))
    thread.start()
    assert inside.wait(20)
    closer = threading.Thread(target=follower.close)
    closer.start()
    for k in (2, 3, 4, 5):
        push(channel, source, k)
    go.set()
    thread.join(20)
    closer.join(20)
    assert seen == [1.0]
    assert uniform(worker) == 1


def test_one_module_in_two_bindings_at_once_is_one_gate(channel, source, subscriber) -> None:
    """A module under two names of one dict of models."""
    shared = nn.Linear(2, 2)
    with Publisher({"a": source, "b": source}) as both, Subscriber(both.handle) as follower:
        binding = follower.bind({"a": shared, "b": shared})
        both.publish(fill(nn.ModuleDict({"a": source, "b": source}), 1))
        assert ran(shared) == 1
        binding.unbind()
    assert not {"forward", "_call_impl"} & vars(shared).keys()
    assert snapshot(shared) == snapshot(source)
