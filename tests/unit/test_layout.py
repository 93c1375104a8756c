"""The layout: where each leaf lies, and that leaves of any strides arrive as they were.

Mutants: align to 4 instead of 64; store the strides of an expanded tensor; tie tensors by address alone.
"""

import random

import pytest
import torch

from shmsync import LayoutMismatch
from shmsync.layout import LEAF_ALIGNMENT, Layout, build, match
from shmsync.weights import DTYPES, Named, flatten
from tests.helpers.models import bits


def layout_of(**tensors: torch.Tensor) -> Layout:
    return build(flatten(tensors))


def random_tensor(chance: random.Random) -> torch.Tensor:
    shape = [chance.choice([0, 1, 2, 3, 7]) for _ in range(chance.randint(0, 5))]
    tensor = torch.zeros(shape, dtype=chance.choice(list(DTYPES.values())))
    if tensor.ndim > 1 and chance.random() < 0.5:
        tensor = tensor.transpose(*chance.sample(range(tensor.ndim), 2))
    return tensor


def test_leaves_are_aligned_and_apart() -> None:
    """Three hundred random tables."""
    chance = random.Random(1)
    for _ in range(300):
        tensors = {f"leaf{n}": random_tensor(chance) for n in range(chance.randint(0, 12))}
        layout = layout_of(**tensors)
        end = 0
        for leaf in layout:
            assert leaf.offset % LEAF_ALIGNMENT == 0
            assert leaf.offset >= end
            assert leaf.nbytes == tensors[leaf.key].numel() * leaf.dtype.itemsize
            end = leaf.offset + leaf.nbytes
        assert end <= layout.slot_nbytes < end + LEAF_ALIGNMENT
        assert layout.nbytes == sum(t.numel() * t.dtype.itemsize for t in tensors.values())
        assert [layout.leaves[number].key for number in layout.index.values()] == list(tensors)


BASE = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
STRIDED = {
    "contiguous": BASE,
    "channels-last": BASE.to(memory_format=torch.channels_last),
    "transposed": BASE.transpose(0, 3),
    "permuted": BASE.permute(2, 0, 3, 1),
    "expanded": BASE[:, :1].expand(2, 6, 4, 5),
    "sliced": BASE[:, 1:3, ::2],
    "sliced and transposed": BASE[:, :, 1:3].transpose(1, 2),
    "shifted": BASE.flatten()[7:],
    "scalar": torch.tensor(3.5),
    "scalar of a larger one": BASE[1, 2, 3, 4],
    "one element": torch.ones(1, 1, 1).as_strided((1, 1, 1), (17, 5, 3)),
    "expanded scalar": torch.tensor(2.5).expand(3, 2),
    "empty": torch.empty(0, 3).t(),
    "8 dimensions": torch.arange(2**8).reshape((2,) * 8).permute(7, 6, 5, 4, 3, 2, 1, 0),
}


@pytest.mark.parametrize("tensor", STRIDED.values(), ids=STRIDED)
def test_any_strides_arrive_right(publisher, subscriber, tensor) -> None:
    """Dense strides are kept, others become contiguous; both partial and full, and beside a neighbour."""
    channel = publisher({"before": torch.ones(3), "leaf": tensor, "after": torch.ones(3)})
    channel.publish()
    changed = tensor + 1
    channel.publish({"leaf": changed}, partial=True)
    with subscriber(channel).lease() as lease:
        got = lease.weights["leaf"]
        assert bits(got) == bits(changed)
        assert got.stride() == torch.empty_like(tensor).stride()
        assert got.numel() == 0 or got.untyped_storage().nbytes() == tensor.numel() * tensor.dtype.itemsize
        assert bits(lease.weights["after"]) == bits(lease.weights["before"]) == bits(torch.ones(3))


def test_a_bound_parameter_keeps_its_strides_or_takes_the_channels(publisher, subscriber) -> None:
    """Values are right where the worker's memory format is not the trainer's."""
    source = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    worker = torch.nn.Conv2d(3, 4, 2)
    channel = publisher(source)
    for mode in ("map", "copy"):
        subscriber(channel).bind(worker, mode)
        channel.publish()
        x = torch.randn(1, 3, 5, 5)
        torch.testing.assert_close(worker(x), source(x))
        assert bits(worker.weight) == bits(source.weight)


def test_only_the_same_elements_are_tied() -> None:
    base = torch.arange(6.0)
    layout = layout_of(a=base, b=base, c=base.view(2, 3), d=base[:3], e=base.clone(), f=base.detach())
    assert [leaf.keys for leaf in layout] == [("a", "b", "f"), ("c",), ("d",), ("e",)]


def test_a_tie_is_as_optional_as_its_least_optional_name() -> None:
    tensor = torch.ones(1)
    both = build({"a": Named("a", tensor, True), "b": Named("b", tensor, False)})
    assert [leaf.optional for leaf in both] == [False]
    assert [leaf.optional for leaf in build({"a": Named("a", tensor, True)})] == [True]


def test_a_dtype_changes_floating_leaves_only() -> None:
    table = flatten({"f": torch.ones(3), "i": torch.ones(3, dtype=torch.int64), "c": torch.ones(1) * 1j})
    layout = build(table, torch.float16)
    assert [(leaf.dtype, leaf.cast, leaf.nbytes) for leaf in layout] == [
        (torch.float16, True, 6),
        (torch.int64, False, 24),
        (torch.complex64, False, 8),
    ]


def test_matching_goes_in_the_order_of_the_layout() -> None:
    layout = layout_of(a=torch.ones(1), b=torch.ones(2), c=torch.ones(3))
    changes = match(layout, flatten({"c": torch.ones(3), "a": torch.ones(1)}), partial=True)
    assert [(change.leaf, change.tensor.numel()) for change in changes] == [(0, 1), (2, 3)]


def test_an_absent_or_additional_non_persistent_buffer_is_no_mismatch() -> None:
    module = torch.nn.Module()
    module.register_buffer("noise", torch.ones(1), persistent=False)
    module.register_buffer("kept", torch.ones(1))
    without = layout_of(kept=torch.ones(1))
    assert [change.leaf for change in match(without, flatten(module))] == [0]
    assert [change.leaf for change in match(build(flatten(module)), flatten({"kept": torch.ones(1)}))] == [1]


def test_a_partial_match_reports_no_missing_keys() -> None:
    layout = layout_of(a=torch.ones(1), b=torch.ones(2))
    with pytest.raises(LayoutMismatch) as raised:
        match(layout, flatten({"a": torch.ones(2)}), partial=True)
    assert raised.value.missing == []
    assert list(raised.value.differing) == ["a"]
