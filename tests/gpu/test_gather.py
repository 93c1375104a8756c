"""The gather kernel gives torch's bytes on a real device, NaNs included, and is what pushes use where it was built.

Mutants: a NaN other than torch's; tails or unaligned leaves left out; blocks beyond 65535 lost.
"""

from __future__ import annotations

import pytest
import torch

import shmsync
from shmsync import device, gathering
from tests.gpu.conftest import NO_KERNEL

CASTS = {
    "float32_to_bfloat16": (torch.float32, torch.bfloat16),
    "float32_to_float16": (torch.float32, torch.float16),
    "bfloat16_to_float32": (torch.bfloat16, torch.float32),
    "float16_to_float32": (torch.float16, torch.float32),
}
ROW_NBYTES = 32

needs_kernel = pytest.mark.skipif(gathering.image() is None, reason=NO_KERNEL)


def every(dtype: torch.dtype) -> torch.Tensor:
    """All bit patterns of 16 bits; of 32 bits those about every value of 16 bits, and random ones."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32, device="cuda").to(torch.int16)
    if dtype.itemsize == 2:
        return patterns.view(dtype)
    exact = torch.cat([patterns.view(half).to(dtype) for half in (torch.bfloat16, torch.float16)]).view(torch.int32)
    halves = (0, 1, -1, 1 << 12, (1 << 12) - 1, (1 << 12) + 1, 1 << 15, (1 << 15) - 1, (1 << 15) + 1)
    anything = torch.randint(-(2**31), 2**31, (1 << 20,), device="cuda").to(torch.int32)
    return torch.cat([*(exact + step for step in halves), anything]).view(dtype)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def gather(kinds: list[str], sources: list[torch.Tensor]) -> list[torch.Tensor]:
    """The bytes of each, by the kernel."""
    sizes = [s.numel() * CASTS[k][1].itemsize if k in CASTS else s.nbytes for k, s in zip(kinds, sources, strict=True)]
    offsets = [sum((size + 63) // 64 * 64 for size in sizes[:i]) for i in range(len(sizes))]
    slot = torch.zeros(offsets[-1] + sizes[-1] + 64, dtype=torch.uint8, device="cuda")
    table = torch.empty(ROW_NBYTES * len(sizes), dtype=torch.uint8, device="cuda")
    stream = torch.cuda.current_stream()
    with torch.cuda.stream(torch.cuda.Stream()):
        handle = torch.cuda.current_stream().cuda_stream
        torch.cuda.current_stream().wait_stream(stream)
        plan = device.runtime.Gather(offsets, [source.nbytes for source in sources], kinds)
        kernel = device.runtime.gather_kernel(0, gathering.image())
        assert plan.upload(0, table.data_ptr(), [source.data_ptr() for source in sources], handle)
        plan.launch(0, kernel, table.data_ptr(), slot.data_ptr(), handle)
        torch.cuda.current_stream().synchronize()
    return [slot[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]


@needs_kernel
@pytest.mark.parametrize("kind", CASTS)
def test_casts_are_torchs_to_the_bit(kind: str) -> None:
    source, destination = CASTS[kind]
    numbers = every(source)
    into = [torch.empty_like(numbers, dtype=destination)]
    torch._foreach_copy_(into, [numbers])
    [found] = gather([kind], [numbers])
    bits = torch.int16 if destination.itemsize == 2 else torch.int32
    differ = found.view(bits) != into[0].view(bits)
    assert not differ.any(), f"{int(differ.sum())} differ, first {numbers[differ][:4].tolist()}"


@needs_kernel
@pytest.mark.parametrize("kind", ["bytes", *CASTS])
def test_many_sizes_and_places(kind: str) -> None:
    """A long one that needs many blocks, empty ones, and every distance from a multiple of 16 that torch makes."""
    dtype = CASTS[kind][0] if kind in CASTS else torch.uint8
    flat = torch.randint(0, 256, (1 << 26,), dtype=torch.uint8, device="cuda").view(dtype)
    step = [flat[shift : shift + size] for shift in range(9) for size in (0, 1, 3, 4, 15, 16, 17, 4095, 4097, 16385)]
    sources = [*step * 20, flat, *step * 2]
    found = gather([kind] * len(sources), sources)
    for source, bytes_ in zip(sources, found, strict=True):
        expected = source
        if kind in CASTS:
            expected = torch.empty_like(source, dtype=CASTS[kind][1])
            torch._foreach_copy_([expected], [source])
        assert torch.equal(bytes_, raw(expected)) if source.numel() else bytes_.numel() == 0


@needs_kernel
def test_a_leaf_with_more_blocks_than_sixteen_bits_can_count() -> None:
    """2 GB."""
    long = torch.arange(1 << 28, dtype=torch.int64, device="cuda")
    [found] = gather(["bytes"], [long])
    assert torch.equal(found, raw(long))


def test_pushes_use_it_where_it_was_built(publisher) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(5, 7) for _ in range(300))).cuda()
    channel = publisher(model, dtype=torch.bfloat16)
    for _ in range(3):
        channel.publish(model)
    assert channel.stats()["kernel_launches"] == (0 if gathering.image() is None else 3)
    worker = torch.nn.Sequential(*(torch.nn.Linear(5, 7) for _ in range(300))).bfloat16()
    with shmsync.Subscriber(channel.handle) as subscriber:
        subscriber.bind(worker)
        for ours, theirs in zip(model.parameters(), worker.parameters(), strict=True):
            assert torch.equal(ours.detach().bfloat16().cpu(), theirs)
