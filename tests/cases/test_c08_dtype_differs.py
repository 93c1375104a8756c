"""C08: another dtype is an error, unless `dtype=` asks for the cast, which is then torch's to the bit.

Mutants: `copy_` without the check of dtypes; cast integers too; flush denormals.
"""

import pytest
import torch

from shmsync import LayoutMismatch, ShmSyncError
from tests.helpers import workers
from tests.helpers.models import bits

MISMATCHES = [
    (torch.bfloat16, torch.tensor([1.0])),
    (torch.float32, torch.tensor([1.0], dtype=torch.float64)),
    (torch.float16, torch.tensor([1e6])),
    (torch.int64, torch.tensor([1.7])),
    (torch.float32, torch.tensor([1])),
    (torch.int8, torch.tensor([300])),
    (torch.uint8, torch.tensor([-1], dtype=torch.int8)),
    (torch.bool, torch.tensor([2], dtype=torch.uint8)),
    (torch.float32, torch.tensor([1 + 2j])),
    (torch.float8_e4m3fn, torch.tensor([1.0]).to(torch.float8_e5m2)),
]


@pytest.mark.parametrize(("stored", "given"), MISMATCHES, ids=lambda value: str(getattr(value, "dtype", value)))
def test_nothing_is_cast_unasked(publisher, subscriber, stored, given) -> None:
    old = {"model.leaf": torch.ones(1).to(stored), "other": torch.zeros(2)}
    channel = publisher(old)
    channel.publish()
    for partial in (False, True):
        with pytest.raises(LayoutMismatch) as raised:
            channel.publish({"model.leaf": given, "other": torch.ones(2)}, partial=partial)
        for text in ("model.leaf", f"expected dtype {stored}", f"got {given.dtype}"):
            assert text in str(raised.value)
    assert channel.version == 1
    with subscriber(channel).lease() as lease:
        assert bits(lease.weights["model", "leaf"]) == bits(old["model.leaf"])
        assert bits(lease.weights["other"]) == bits(old["other"])


FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def hard_values(dtype: torch.dtype) -> torch.Tensor:
    """Denormals, the borders of rounding, infinities, NaN, zeros of both signs, and any other bit pattern."""
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (4096 * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)
    named = torch.tensor(
        [
            *(0.0, -0.0, 1.0, 1 / 3, 1.0 + 2**-8, 1.0 + 2**-9, 1.0 + 3 * 2**-9, 1.0 + 2**-11, 65504.0, 65520.0),
            *(1e-40, -1e-40, 9.18e-41, 1e-45, 5e-324, 2.0**-133, 6e-8, 2.9e-8, 1e-8, 1e6, 3.4e38, 3.4e39, 1e308),
            *(float("inf"), float("-inf"), float("nan")),
        ],
        dtype=torch.float64,
    )
    return torch.cat([named.to(dtype), raw])


TARGETS = [*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("stored", TARGETS, ids=str)
@pytest.mark.parametrize("given", FLOATS, ids=str)
def test_dtype_casts_floating_leaves_as_torch_does(publisher, subscriber, given, stored) -> None:
    values = hard_values(given)
    weights = {
        "many": values,
        "transposed": values.reshape(2, -1).t(),
        "scalar": torch.tensor(1e-40).to(given),
        "long": values.repeat(17)[: 2 * 32768 + 1],  # torch casts such leaves on several threads
        "long and strided": values[: 2 * 2052].reshape(2, 2052).repeat(9, 2).t(),
        "int": torch.arange(5),
        "bool": torch.tensor([True]),
        "complex": torch.tensor([1e-40 + 2j]),
    }
    channel = publisher(weights, dtype=stored)
    channel.publish()
    with subscriber(channel).lease() as lease:
        for key, value in weights.items():
            expected = value.to(stored) if value.is_floating_point() else value
            assert bits(lease.weights[key]) == bits(expected), key


def bf16_linear() -> torch.nn.Module:
    return torch.nn.Linear(3, 3, dtype=torch.bfloat16)


def test_a_float32_trainer_and_bfloat16_workers(publisher, peer) -> None:
    source = torch.nn.Linear(3, 3)
    channel = publisher(source, dtype=torch.bfloat16)
    worker = peer()
    worker.call(workers.attach, str(channel.handle), bf16_linear)
    channel.publish()
    assert worker.call(workers.refreshed)[1] == {
        key: bits(p.to(torch.bfloat16)) for key, p in source.named_parameters()
    }


@pytest.mark.parametrize("wrong", [torch.int8, torch.bool, torch.complex64], ids=str)
def test_only_a_floating_dtype_can_be_asked_for(publisher, wrong) -> None:
    with pytest.raises(ShmSyncError, match=str(wrong)):
        publisher({"leaf": torch.ones(1)}, dtype=wrong)


def test_dtype_casts_no_integer_given_for_a_floating_leaf(publisher) -> None:
    channel = publisher({"leaf": torch.ones(1)}, dtype=torch.bfloat16)
    with pytest.raises(LayoutMismatch, match=r"leaf.*int64"):
        channel.publish({"leaf": torch.ones(1, dtype=torch.int64)})


@pytest.mark.parametrize("mode", ["auto", "map"])
def test_a_worker_of_another_dtype_is_refused_unless_it_asks(publisher, subscriber, mode) -> None:
    source, worker = torch.nn.Linear(2, 2, dtype=torch.float64), torch.nn.Linear(2, 2)
    channel = publisher(source)
    channel.publish()
    with pytest.raises(LayoutMismatch, match=r"weight.*float64.*float32"):
        subscriber(channel).bind(worker, mode)
    subscriber(channel).bind(worker, "copy")
    assert bits(worker.weight) == bits(source.weight.float())
