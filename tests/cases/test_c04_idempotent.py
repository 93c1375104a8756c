"""C04: pushing the same weights again changes nothing about the worker's module but its values.

Mutants: put new Parameter objects into the module; set requires_grad; warn at each push.
"""

import warnings

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from tests.helpers.models import mlp, snapshot


class WithExtra(nn.Linear):
    """Extra state is part of the state dict, but no tensor."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.extra = {"steps": 3}

    def get_extra_state(self) -> dict:
        return self.extra

    def set_extra_state(self, state: dict) -> None:
        self.extra = state


def policy() -> nn.Module:
    module = mlp()
    module.append(WithExtra())
    module[0].bias.requires_grad_(False)
    return module


def description(module: nn.Module) -> dict:
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {
        "state": list(module.state_dict()),
        "named": [key for key, _ in module.named_parameters()],
        "tensors": {key: (id(t), type(t), t.dtype, t.shape, t.requires_grad, t.is_leaf) for key, t in named},
        "extra": module[4].extra,
        "hooks": {key: t._backward_hooks for key, t in named},
        "training": module.training,
    }


@pytest.mark.parametrize("mode", ["map", "copy"])
def test_the_same_weights_three_times(publisher, subscriber, mode) -> None:
    source, worker = policy(), policy()
    worker[2].weight.register_hook(torch.zeros_like)
    optimizer = torch.optim.Adam(worker.parameters())
    before, groups = description(worker), [id(p) for p in optimizer.param_groups[0]["params"]]
    weights = TensorDict.from_module(source).data
    channel = publisher(weights)
    follower = subscriber(channel)
    follower.bind(worker, mode)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for version in (1, 2, 3):
            assert channel.publish(weights).version == version
            worker(torch.zeros(1, 3))
            assert follower.version == version
            assert description(worker) == before
            assert snapshot(worker) == snapshot(source)
    assert caught == []
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == groups


def test_the_optimizer_of_before_steps_the_bound_parameters(publisher, subscriber) -> None:
    """Its references are the module's parameters still."""
    source, worker = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(worker.parameters(), lr=1.0)
    channel = publisher(source)
    subscriber(channel).bind(worker, "copy")
    channel.publish()
    worker(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(worker.bias.detach(), source.bias.detach() - 1)


def test_pushing_leaves_the_pushed_weights_as_they_are(publisher) -> None:
    source = policy()
    before, values = description(source), snapshot(source)
    weights = TensorDict.from_module(source)
    channel = publisher(weights)
    for _ in range(3):
        channel.publish(weights)
    assert description(source) == before
    assert snapshot(source) == values
    assert not any(tensor.is_shared() for tensor in source.state_dict().values() if isinstance(tensor, torch.Tensor))
