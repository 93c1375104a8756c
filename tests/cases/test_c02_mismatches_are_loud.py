"""C02: weights that do not fit are refused before a byte is written, and the error names every key.

Mutants: `copy_` without the check of shapes (broadcasts); a check after the first copy; `missing` left out.
"""

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from shmsync import LayoutMismatch
from tests.helpers.models import fill, filled, snapshot, uniform

SHAPES = {"a.weight": (2, 3), "a.bias": (3,), "b.weight": (4,)}


def as_flat(weights: dict[str, torch.Tensor]) -> dict:
    return weights


def as_nested(weights: dict[str, torch.Tensor]) -> dict:
    tree: dict = {}
    for key, value in weights.items():
        *path, name = key.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[name] = value
    return tree


def as_tensordict(weights: dict[str, torch.Tensor]) -> TensorDict:
    return TensorDict(as_nested(weights))


def as_flat_tensordict(weights: dict[str, torch.Tensor]) -> TensorDict:
    return TensorDict(weights)


def as_module(weights: dict[str, torch.Tensor]) -> nn.Module:
    root = nn.Module()
    for key, value in weights.items():
        *path, name = key.split(".")
        node = root
        for part in path:
            if part not in node._modules:
                node.add_module(part, nn.Module())
            node = node._modules[part]
        node.register_parameter(name, nn.Parameter(value))
    return root


def as_models(weights: dict[str, torch.Tensor]) -> dict:
    """Several models: the top-level names are modules."""
    tree = as_nested(weights)
    return {
        name: as_module(dict(flat_items(branch))) if isinstance(branch, dict) else branch
        for name, branch in tree.items()
    }


def flat_items(tree: dict, path: str = "") -> list[tuple[str, torch.Tensor]]:
    items: list[tuple[str, torch.Tensor]] = []
    for key, value in tree.items():
        name = f"{path}.{key}" if path else key
        items += flat_items(value, name) if isinstance(value, dict) else [(name, value)]
    return items


WAYS_IN = [as_flat, as_nested, as_tensordict, as_flat_tensordict, as_module, as_models]


def prefixed(weights):
    return {f"module.{key}": value for key, value in weights.items()}


def with_extra(weights):
    return {**weights, "c.weight": torch.ones(1)}


def without_bias(weights):
    return {key: value for key, value in weights.items() if key != "a.bias"}


def shrunk(weights):
    return {**weights, "a.bias": torch.ones(1)}


def flattened(weights):
    return {**weights, "a.weight": torch.ones(3)}


def without_dimension(weights):
    return {**weights, "b.weight": torch.ones(())}


def transposed(weights):
    return {**weights, "a.weight": torch.ones(3, 2)}


FAULTS = [
    (prefixed, ["unexpected", "missing", *SHAPES, *(f"module.{key}" for key in SHAPES)]),
    (with_extra, ["unexpected", "c.weight"]),
    (without_bias, ["missing", "a.bias"]),
    (shrunk, ["a.bias", "(3,)", "(1,)"]),
    (flattened, ["a.weight", "(2, 3)", "(3,)"]),
    (without_dimension, ["b.weight", "(4,)", "()"]),
    (transposed, ["a.weight", "(2, 3)", "(3, 2)"]),
]


@pytest.mark.parametrize("way", WAYS_IN, ids=lambda way: way.__name__)
@pytest.mark.parametrize(("fault", "named"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_what_does_not_fit_changes_nothing_and_is_named(publisher, subscriber, way, fault, named) -> None:
    channel = publisher(way(filled(SHAPES, 0)))
    worker = as_module(filled(SHAPES, 0))
    follower = subscriber(channel)
    binding = follower.bind(worker)
    channel.publish(way(filled(SHAPES, 1)))
    follower.refresh()
    before = snapshot(worker)
    with pytest.raises(LayoutMismatch) as raised:
        channel.publish(way(fault(filled(SHAPES, 2))))
    for text in named:
        assert text in str(raised.value)
    assert channel.version == follower.seen == follower.refresh() == binding.version == 1
    assert snapshot(worker) == before
    with follower.lease() as lease:
        assert uniform(lease.weights) == 1
    assert channel.publish(way(filled(SHAPES, 3))).version == 2
    assert (follower.refresh(), uniform(worker)) == (2, 3)


@pytest.mark.parametrize("way", WAYS_IN, ids=lambda way: way.__name__)
def test_one_fault_does_not_hide_another(publisher, way) -> None:
    """All faults are in one error, so that nobody mends them one by one."""
    channel = publisher(way(filled(SHAPES, 0)))
    wrong = {"a.weight": torch.ones(2), "b.weight": torch.ones(4), "d.weight": torch.ones(1)}
    with pytest.raises(LayoutMismatch) as raised:
        channel.publish(way(wrong))
    assert raised.value.unexpected == ["d.weight"]
    assert raised.value.missing == ["a.bias"]
    assert list(raised.value.differing) == ["a.weight"]


@pytest.mark.parametrize("fault", [prefixed, with_extra, without_bias, shrunk, flattened], ids=lambda f: f.__name__)
def test_a_module_that_does_not_fit_is_refused_unchanged(publisher, subscriber, fault) -> None:
    """The same on the other side: binding a module that the channel does not fit."""
    channel = publisher(filled(SHAPES, 1))
    channel.publish()
    worker = fill(as_module(fault(filled(SHAPES, 0))), 5)
    with pytest.raises(LayoutMismatch):
        subscriber(channel).bind(worker)
    assert uniform(worker) == 5
    assert "forward" not in vars(worker)


def test_only_a_non_persistent_buffer_may_be_absent(publisher, subscriber) -> None:
    """It keeps its published value; a persistent one may not be absent."""
    source = nn.Module()
    source.register_buffer("kept", torch.ones(2), persistent=False)
    source.register_buffer("needed", torch.ones(2))
    channel = publisher(source)
    channel.publish()
    channel.publish({"needed": torch.full((2,), 2.0)})
    with subscriber(channel).lease() as lease:
        assert lease.weights["needed"].tolist() == [2.0, 2.0]
        assert lease.weights["kept"].tolist() == [1.0, 1.0]
    with pytest.raises(LayoutMismatch, match="missing keys: `needed`"):
        channel.publish({"kept": torch.ones(2)})
