"""C16: nothing that is pushed drags a graph along, and what a policy returns keeps its value.

Mutants: copy under grad (the slot's views require grad); return views of mapped parameters as they are.
"""

import collections
import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict
from torch import nn

from tests.helpers.models import bits, fill, uniform


def test_products_and_parameters_arrive_without_their_graph(publisher, subscriber) -> None:
    module = nn.Linear(3, 3)
    channel = publisher(module)
    follower = subscriber(channel)
    for weights in ({key: p * 0.5 for key, p in module.named_parameters()}, dict(module.named_parameters())):
        channel.publish(weights)
        with follower.lease() as lease:
            for key, tensor in lease.weights.items():
                assert bits(tensor) == bits(weights[key])
                assert not tensor.requires_grad
                assert tensor.grad_fn is None


def test_no_graph_is_kept_alive(publisher) -> None:
    p = torch.ones(3, requires_grad=True)
    channel = publisher({"p": p})
    inner = p * p
    alive = weakref.ref(inner)  # sin saves it for backward: it lives as long as the graph
    weights = {"p": inner.sin()}
    del inner
    channel.publish(weights)
    assert alive() is not None
    del weights
    gc.collect()
    assert alive() is None


def test_a_push_between_two_backward_passes_over_one_graph(publisher) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    channel = publisher(module)
    loss = module(torch.ones(1, 2)).sum()
    channel.publish()
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in module.parameters()]
    channel.publish()
    channel.publish({key: p * 1.0 for key, p in module.named_parameters()})
    loss.backward()
    for p, gradient in zip(module.parameters(), first, strict=True):
        torch.testing.assert_close(p.grad, 2 * gradient)


@pytest.mark.parametrize("mode", ["map", "copy"])
def test_the_workers_flags_stay_as_it_set_them(publisher, subscriber, mode) -> None:
    source, worker = nn.Linear(2, 2), nn.Linear(2, 2)
    source.weight.requires_grad_(False)
    worker.bias.requires_grad_(False)
    channel = publisher(source)
    follower = subscriber(channel)
    follower.bind(worker, mode)
    for _ in range(3):
        channel.publish()
        follower.refresh()
        assert (worker.weight.requires_grad, worker.bias.requires_grad) == (True, False)
        assert (worker.weight.grad_fn, worker.weight.is_leaf) == (None, True)
    worker(torch.ones(1, 2)).sum().backward()
    assert worker.weight.grad is not None
    assert worker.bias.grad is None


Pair = collections.namedtuple("Pair", ["action", "value"])


@dataclasses.dataclass
class Record:
    action: torch.Tensor
    value: Any


def lazily_stacked(view: torch.Tensor) -> LazyStackedTensorDict:
    return LazyStackedTensorDict(TensorDict(action=view), TensorDict(action=view))


OUTPUTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda view: view,
    "tuple": lambda view: (view, 1.0),
    "list": lambda view: [view, None],
    "namedtuple": lambda view: Pair(view, torch.full((), 1.0)),
    "dict": lambda view: {"action": view, "text": "kept"},
    "ordered dict": lambda view: collections.OrderedDict(action=view),
    "nested": lambda view: {"deep": [({"action": view},)]},
    "tensordict": lambda view: TensorDict(action=view),
    "nested tensordict": lambda view: TensorDict(outer=TensorDict(inner=TensorDict(action=view))),
    "locked tensordict": lambda view: TensorDict(outer=TensorDict(action=view)).lock_(),
    "lazy stack": lazily_stacked,
    "dataclass": lambda view: Record(view, {"action": view}),
    "torch return type": lambda view: torch.return_types.max((view, view)),
}
VIEWS: dict[str, Callable[[nn.Module], torch.Tensor]] = {
    "parameter": lambda module: module.action,
    "expanded": lambda module: module.action.expand(5, 3),
    "slice": lambda module: module.action[1:],
    "data": lambda module: module.action.data,
    "transposed": lambda module: module.matrix.t(),
    "buffer": lambda module: module.offset,
    "view of a buffer": lambda module: module.offset.detach().view(3, 1),
}


class Policy(nn.Module):
    def __init__(self, output: Callable = OUTPUTS["tensor"], view: Callable = VIEWS["expanded"]) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(2, 3))
        self.action = nn.Parameter(torch.zeros(3))
        self.register_buffer("offset", torch.zeros(3))
        self.output, self.view = output, view

    def forward(self) -> Any:
        return self.output(self.view(self))


def tensors_in(output: Any) -> Any:
    """The tensors of an output, as uniform() takes them."""
    if isinstance(output, Record):
        return [output.action, *output.value.values()]
    if isinstance(output, (tuple, list)):
        return [tensors_in(item) for item in output if item is not None and not isinstance(item, float)]
    if isinstance(output, dict):
        return [tensors_in(item) for item in output.values() if not isinstance(item, str)]
    return output


def pushes(channel, source: nn.Module, follower, count: int = 4) -> None:
    for _ in range(count):
        fill(source, channel.version + 1)
        channel.publish()
        follower.refresh()


@pytest.mark.parametrize("mode", ["map", "copy"])
@pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS)
def test_an_action_keeps_its_value_after_later_pushes(publisher, subscriber, output, mode) -> None:
    source, worker = Policy(), Policy(output)
    channel = publisher(source)
    follower = subscriber(channel)
    follower.bind(worker, mode)
    pushes(channel, source, follower, 1)
    returned = worker()
    assert type(returned) is type(output(torch.ones(3)))
    pushes(channel, source, follower)
    assert uniform(tensors_in(returned)) == 1


@pytest.mark.parametrize("mode", ["map", "copy"])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_whatever_view_of_the_weights_it_is(publisher, subscriber, view, mode) -> None:
    source, worker = Policy(), Policy(view=view)
    channel = publisher(source)
    follower = subscriber(channel)
    follower.bind(worker, mode)
    pushes(channel, source, follower, 1)
    returned = worker()
    assert returned.shape == view(worker).shape
    pushes(channel, source, follower)
    assert uniform(returned) == 1


def test_a_tensordict_that_came_in_is_given_back_with_clones_in_it(publisher, subscriber) -> None:
    """As torchrl's policies do: they write into the TensorDict they got."""
    source, worker = Policy(), Policy()
    worker.forward = lambda td: td.set("action", worker.action)
    channel = publisher(source)
    follower = subscriber(channel)
    follower.bind(worker)
    pushes(channel, source, follower, 1)
    given = TensorDict(observation=torch.zeros(3))
    observation = given["observation"]
    assert worker(given) is given
    assert given["observation"] is observation
    pushes(channel, source, follower)
    assert uniform(given["action"]) == 1


def test_an_action_can_still_be_trained_through(publisher, subscriber) -> None:
    source, worker = Policy(), Policy()
    channel = publisher(source)
    follower = subscriber(channel)
    binding = follower.bind(worker)
    pushes(channel, source, follower, 1)
    with binding.hold():
        worker().sum().backward()
    assert worker.action.grad.tolist() == [5.0, 5.0, 5.0]
