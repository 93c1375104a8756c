"""C07: leaves without elements are leaves: their shape, dtype and key arrive.

Mutants: drop leaves of no bytes from the layout; map or copy a range of length 0.
"""

import pytest
import torch
from torch import nn

from shmsync import LayoutMismatch
from tests.helpers import workers
from tests.helpers.models import snapshot

EMPTY = {"flat": (0,), "rows": (0, 3), "columns": (2, 0), "deep": (2, 0, 3)}


def only_empty() -> dict[str, torch.Tensor]:
    return {
        key: torch.empty(shape, dtype=torch.int64 if key == "columns" else torch.float32)
        for key, shape in EMPTY.items()
    }


def beside_a_normal_leaf() -> dict[str, torch.Tensor]:
    return {"first": torch.randn(3), **only_empty(), "last": torch.randn(())}


class Holder(nn.Module):
    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for key, value in weights.items():
            self.register_buffer(key, torch.zeros_like(value))

    def forward(self) -> None:
        return None


class Wide(nn.Module):
    """A linear layer of no inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 0))
        self.bias = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


def holder_of_empty() -> nn.Module:
    return Holder(only_empty())


def holder() -> nn.Module:
    return Holder(beside_a_normal_leaf())


@pytest.mark.parametrize(
    ("weights", "make"), [(only_empty, holder_of_empty), (beside_a_normal_leaf, holder)], ids=["only", "beside"]
)
def test_shapes_dtypes_and_keys_are_all_there(publisher, peer, weights, make) -> None:
    pushed = weights()
    channel = publisher(pushed)
    early, late = peer(), peer()
    early.call(workers.attach, str(channel.handle), make)
    for version in (1, 2, 3):
        assert channel.publish(pushed).version == version
        assert early.call(workers.refreshed) == (version, snapshot(pushed))
        assert early.call(workers.leased) == (version, snapshot(pushed))
    late.call(workers.attach, str(channel.handle), make)
    assert late.call(workers.refreshed) == (3, snapshot(pushed))


def test_empty_parameters_keep_their_identity_and_strides(publisher, subscriber) -> None:
    source, worker = Wide(), Wide()
    before = [(id(p), p.shape, p.stride()) for p in worker.parameters()]
    channel = publisher(source)
    subscriber(channel).bind(worker)
    channel.publish()
    assert worker(torch.zeros(2, 0)).tolist() == [source.bias.tolist()] * 2
    assert snapshot(worker) == snapshot(source)
    assert [(id(p), p.shape, p.stride()) for p in worker.parameters()] == before


def test_shapes_without_elements_are_compared_all_the_same(publisher) -> None:
    channel = publisher({"leaf": torch.empty(0, 3)})
    with pytest.raises(LayoutMismatch, match=r"\(0, 3\).*\(3, 0\)"):
        channel.publish({"leaf": torch.empty(3, 0)})
    with pytest.raises(LayoutMismatch, match=r"float32.*float64"):
        channel.publish({"leaf": torch.empty(0, 3, dtype=torch.float64)})


def test_two_empty_leaves_are_not_tied(publisher) -> None:
    """All empty tensors share the address 0."""
    channel = publisher({"a": torch.empty(0), "b": torch.empty(0)})
    assert [leaf.keys for leaf in channel.layout] == [("a",), ("b",)]
