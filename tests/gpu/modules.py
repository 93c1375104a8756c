"""Modules and values that show at once whether two versions were mixed, or one leaf came in another's place."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

# Leaf i of version v holds i * step + v. All of these numbers are below 2**24, so that fp32 has them exactly.
_RANGE = 2**23


class Watched(nn.Module):
    """Leaves of one size whose forward says what it saw, without waiting for the device.

    It gives a tensor (lowest, highest) of the versions found in all leaves, read one after the other: two numbers that
    differ are two versions. ``note`` is called inside the forward, when half of the leaves are on their way. Then, for
    ``pause_cycles`` of the device's clock, nothing is read.
    """

    def __init__(self, leaves: int = 32, numel: int = 1 << 18) -> None:
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.zeros(numel)) for _ in range(leaves)])
        self.note: Callable[[], object] = bool
        self.pause_cycles = 0

    @property
    def step(self) -> int:
        return _RANGE // len(self.layers)

    def forward(self) -> Tensor:
        found = []
        for number, layer in enumerate(self.layers):
            if number == len(self.layers) // 2:
                self.note()
                if self.pause_cycles:
                    torch.cuda._sleep(self.pause_cycles)
            found.append(torch.stack(torch.aminmax(layer.detach())))
        # A spread policy has leaves on several devices.
        seen = torch.stack([pair.to(found[0].device) for pair in found])
        seen -= torch.arange(len(found), device=seen.device, dtype=seen.dtype).unsqueeze(1) * self.step
        return torch.stack((seen[:, 0].min(), seen[:, 1].max()))


@torch.no_grad()
def fill(module: Watched, v: float) -> Watched:
    """Give all leaves the values of version `v`, on the current stream; gives the module back."""
    for number, layer in enumerate(module.layers):
        layer.fill_(number * module.step + v)
    return module


def nbytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


class Zoo(nn.Module):
    """Every kind of leaf: dtypes, no dimension, no element, channels-last, transposed, tied, buffers."""

    DTYPES = (
        *(torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.conv.weight.data = self.conv.weight.data.contiguous(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(6)
        self.turned = nn.Parameter(torch.zeros(5, 7).t())
        self.scalar = nn.Parameter(torch.zeros(()))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        for dtype in self.DTYPES:
            name = str(dtype).rpartition(".")[2]
            self.register_parameter(f"p_{name}", nn.Parameter(torch.zeros(3, 11, dtype=dtype), requires_grad=False))
            self.register_buffer(f"b_{name}", torch.zeros(5, dtype=dtype))


class Adapted(nn.Module):
    """Four megabytes that stay, and an adapter of 256 KB that is pushed alone."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(1024, 1024), nn.Linear(256, 256)


class Exploring(nn.Module):
    """A policy in an exploration wrapper: a buffer and a parameter without dimensions beside ordinary ones."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Linear(64, 64)
        self.temperature = nn.Parameter(torch.zeros(()))
        self.register_buffer("eps", torch.zeros(()))


@torch.no_grad()
def randomise(module: nn.Module, seed: int) -> nn.Module:
    """Give all parameters and buffers random values, the same ones for a seed on every device."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*module.parameters(), *module.buffers()):
        values = torch.rand(tensor.shape, generator=generator) * 8
        tensor.copy_(values > 4 if tensor.dtype == torch.bool else values.to(tensor.dtype))
    return module


class Digest(NamedTuple):
    """What a tensor is, to the bit. ``stride``: of parameters; a buffer is the worker's own."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    sha: str


def digest(module: nn.Module) -> dict[str, Digest]:
    """Dotted name → Digest of all parameters and buffers, tied ones under each of their names."""
    named = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    return {name: _digest(tensor, name in named) for name, tensor in (named | buffers).items()}


def _digest(tensor: Tensor, is_parameter: bool) -> Digest:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    stride = tuple(tensor.stride()) if is_parameter else None
    return Digest(str(tensor.dtype), tuple(tensor.shape), stride, hashlib.sha256(raw).hexdigest())
