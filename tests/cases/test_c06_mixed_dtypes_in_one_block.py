"""C06: leaves of every dtype lie side by side in one slot and arrive to the bit.

Mutants: align leaves to 4 bytes; copy through a common dtype; take the leaves in the order of the keys of each push.
"""

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from shmsync.weights import DTYPES
from tests.helpers import workers
from tests.helpers.models import bits, snapshot

EVERY_DTYPE = list(DTYPES.values())


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Any bit pattern, NaNs with payloads and denormals included."""
    generator = torch.Generator().manual_seed(seed)
    top = 2 if dtype == torch.bool else 256
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, top, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def block(seed: int = 0) -> dict[str, torch.Tensor]:
    leaves = [
        (torch.bfloat16, (3,)),
        (torch.float32, (2,)),
        (torch.bool, (1,)),
        (torch.float64, (2,)),
        (torch.int8, (5,)),
        (torch.complex64, (1,)),
        (torch.float16, (1,)),
        (torch.int64, ()),
    ]
    return {
        f"{n}_{dtype}".replace("torch.", ""): random_bits(dtype, shape, n + seed)
        for n, (dtype, shape) in enumerate(leaves)
    }


def every_dtype(seed: int = 0) -> dict[str, torch.Tensor]:
    """Odd sizes, so that unaligned offsets would show, each dtype also without dimensions."""
    table = {}
    for number, dtype in enumerate(EVERY_DTYPE):
        table[f"odd{number}"] = random_bits(dtype, (number % 5 + 1,), seed + number)
        table[f"scalar{number}"] = random_bits(dtype, (), seed + number + 100)
    return table


def backwards(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(reversed(weights.items()))


class Holder(nn.Module):
    """Floating and complex leaves as parameters, the others as buffers; every other one the other way round."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for key, value in weights.items():
            self.register_parameter(key, nn.Parameter(torch.zeros_like(value), requires_grad=False))

    def forward(self) -> None:
        return None


def every_dtype_module() -> nn.Module:
    return Holder(every_dtype())


@pytest.mark.parametrize("make", [block, every_dtype])
@pytest.mark.parametrize("kind", [dict, TensorDict])
def test_all_leaves_arrive_to_the_bit_and_aligned(publisher, subscriber, make, kind) -> None:
    channel = publisher(kind(make()))
    follower = subscriber(channel)
    channel.publish()
    for seed, order in ((1, dict), (2, backwards), (3, backwards)):
        weights = make(seed)
        channel.publish(kind(order(weights)))
        with follower.lease() as lease:
            assert snapshot(lease.weights) == snapshot(weights)
            for key, tensor in lease.weights.items():
                assert tensor.data_ptr() % 64 == 0, key


def test_a_partial_push_changes_one_leaf_of_each_dtype_and_no_neighbour(publisher, subscriber) -> None:
    weights = every_dtype()
    channel = publisher(weights)
    channel.publish()
    follower = subscriber(channel)
    for number, key in enumerate(weights):
        weights[key] = random_bits(weights[key].dtype, tuple(weights[key].shape), 1000 + number)
        channel.publish({key: weights[key]}, partial=True)
        with follower.lease() as lease:
            assert snapshot(lease.weights) == snapshot(weights)


@pytest.mark.parametrize("mode", ["map", "copy"])
def test_every_dtype_as_a_parameter_of_another_process(publisher, peer, mode) -> None:
    source = every_dtype_module()
    for key, value in every_dtype(7).items():
        source.get_parameter(key).data = value
    channel = publisher(source)
    worker = peer()
    worker.call(workers.attach, str(channel.handle), every_dtype_module, None, mode)
    channel.publish()
    assert worker.call(workers.refreshed) == (1, snapshot(source))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.float32], ids=str)
def test_lazily_conjugated_and_negated_tensors_arrive_by_value(publisher, subscriber, dtype) -> None:
    plain = torch.randn(4, dtype=dtype)
    lazy = plain.conj() if dtype.is_complex else torch.complex(plain, plain).conj().imag
    assert lazy.is_conj() or lazy.is_neg()
    channel = publisher({"lazy": lazy, "plain": plain})
    channel.publish()
    with subscriber(channel).lease() as lease:
        assert bits(lease.weights["lazy"]) == bits(lazy)
        assert bits(lease.weights["plain"]) == bits(plain)
