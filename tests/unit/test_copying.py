"""Copies into a slot: to the bit what torch's `copy_` would write, whatever the source, and again after a plan is made.

Mutants: copy bytes where strides differ; where the source is lazily conjugated; take a plan for another source.
"""

import random

import pytest
import torch

from shmsync.copying import Filler, copy_all
from shmsync.weights import DTYPES
from tests.helpers.models import bits

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2]
SHAPES = [(), (1,), (7,), (3, 5), (2, 3, 4), (0, 3), (2 * 32768 + 3,), (300, 301)]


def random_tensor(chance: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random bits, in any strides and laziness."""
    top = 2 if dtype == torch.bool else 256
    count = torch.Size(shape).numel() * dtype.itemsize
    tensor = torch.randint(0, top, (count,), dtype=torch.uint8).view(dtype).reshape(shape)
    if len(shape) > 1 and chance.random() < 0.4:
        tensor = tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if shape and chance.random() < 0.2:
        tensor = torch.stack([tensor, tensor], -1)[..., 0]
    if dtype.is_complex and dtype != torch.complex32 and chance.random() < 0.5:
        tensor = tensor.conj()
    if dtype.is_floating_point and chance.random() < 0.3:
        tensor = tensor.detach().requires_grad_()
    return tensor


def slot_for(sources: list[torch.Tensor], chance: random.Random) -> list[torch.Tensor]:
    """Empty dense tensors for these, some cast and some in other strides."""
    views = []
    for source in sources:
        cast = source.is_floating_point() and source.dtype in FLOATS and chance.random() < 0.5
        view = torch.empty_like(source, dtype=chance.choice(FLOATS) if cast else source.dtype, requires_grad=False)
        views.append(view.detach().contiguous() if chance.random() < 0.5 else view.detach())
    return views


@pytest.mark.parametrize("seed", range(20))
def test_filling_a_slot_is_copying_each_leaf(seed) -> None:
    torch.manual_seed(seed)
    chance = random.Random(seed)
    kinds = [(chance.choice(SHAPES), chance.choice(list(DTYPES.values()))) for _ in range(25)]
    sources = [random_tensor(chance, *kind) for kind in kinds]
    filler = Filler(slot_for(sources, chance))
    token = object()
    for given_token in (None, token, token, token):
        leaves = list(range(len(sources)))
        filler.fill(leaves, sources, given_token)
        for view, source in zip(filler.views, sources, strict=True):
            assert bits(view) == bits(source.detach().to(view.dtype))
            assert not view.requires_grad
        sources = [source.detach().clone(memory_format=torch.preserve_format) for source in sources]
        if given_token is None:
            sources = [random_tensor(chance, *kind) for kind in kinds]


def test_only_the_named_leaves_are_written() -> None:
    filler = Filler([torch.zeros(3), torch.zeros(3), torch.zeros(3)])
    filler.fill([2, 0], [torch.full((3,), 2.0), torch.full((3,), 5.0)])
    assert [view[0].item() for view in filler.views] == [5.0, 0.0, 2.0]
    filler.fill([], [])


def test_a_token_means_the_same_kinds_and_not_the_same_addresses() -> None:
    filler = Filler([torch.zeros(3), torch.zeros(2)])
    token = object()
    for k in (1.0, 2.0, 3.0):
        filler.fill([0, 1], [torch.full((3,), k), torch.full((2,), k)], token)
        assert [view.tolist() for view in filler.views] == [[k] * 3, [k] * 2]


def test_another_token_is_another_plan() -> None:
    filler = Filler([torch.zeros(2, 2), torch.zeros(3)])
    first = torch.arange(4.0).reshape(2, 2)
    filler.fill([0], [first], "one")
    filler.fill([0], [first.t()], "other")
    assert filler.views[0].tolist() == first.t().tolist()
    filler.fill([1], [torch.ones(3)], "third")
    filler.fill([0], [first])
    assert filler.views[0].tolist() == first.tolist()
    assert filler.views[1].tolist() == [1.0] * 3


def test_copies_record_nothing_in_autograd() -> None:
    destination, source = torch.zeros(3), torch.ones(3, requires_grad=True)
    copy_all([destination], [source * 2])
    assert destination.tolist() == [2.0] * 3
    assert not destination.requires_grad
    copy_all([], [])
