"""Modules and values that show at once whether two versions were mixed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from tensordict import is_tensor_collection
from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch says, once per process, that complex32 is experimental
    torch.empty(1, dtype=torch.complex32)


def fill(module: nn.Module, k: float) -> nn.Module:
    """Set every parameter and buffer to the constant `k`; gives the module back."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.fill_(k)
    return module


def filled(shapes: dict[str, tuple[int, ...]], k: float) -> dict[str, Tensor]:
    """A state dict of float32 leaves that are all `k`."""
    return {key: torch.full(shape, float(k)) for key, shape in shapes.items()}


def uniform(tensors: Any) -> float:
    """The one value that all elements of a module, TensorDict, dict or tensors have; fails if there are several."""
    values: set[float] = set()
    for tensor in flat(tensors):
        low, high = tensor.detach().double().aminmax()
        values |= {float(low), float(high)}
    assert len(values) == 1, f"mixed values: {sorted(values)}"
    return values.pop()


def flat(weights: Any) -> Iterator[Tensor]:
    """The tensors of a module, TensorDict, mapping or iterable."""
    if isinstance(weights, Tensor):
        yield weights
    elif isinstance(weights, nn.Module):
        yield from (*weights.parameters(), *weights.buffers())
    else:
        values: Iterable[Any] = weights.values() if hasattr(weights, "values") else weights
        for value in values:
            yield from flat(value)


class Bits(NamedTuple):
    """A tensor's dtype, shape and bytes: comparable to the bit, and safe to send (a tensor would be shared)."""

    dtype: str
    shape: tuple[int, ...]
    raw: bytes


def bits(tensor: Tensor) -> Bits:
    """A tensor as Bits, whatever its dtype, strides and laziness."""
    dense = tensor.detach().clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg().reshape(-1)
    raw = dense.view(torch.uint8).numpy().tobytes() if dense.numel() else b""
    return Bits(str(tensor.dtype), tuple(tensor.shape), raw)


def snapshot(weights: Any) -> dict[str, Bits]:
    """Dotted key path → Bits of a module (non-persistent buffers too), TensorDict or state dict."""
    if isinstance(weights, nn.Module):
        named = [*weights.named_parameters(remove_duplicate=False), *weights.named_buffers(remove_duplicate=False)]
        return {key: bits(tensor) for key, tensor in named}
    table: dict[str, Bits] = {}
    for key, value in weights.items():
        if isinstance(value, Tensor):
            table[key] = bits(value)
        elif is_tensor_collection(value) or isinstance(value, (dict, nn.Module)):
            table |= {f"{key}.{inner}": found for inner, found in snapshot(value).items()}
    return table


def mlp() -> nn.Module:
    """A small policy with parameters, running statistics, a counter and a tied pair."""
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4))
    module[3].weight = module[2].weight
    return module.eval()


class Watched(nn.Module):
    """Layers whose forward says what it saw: `(lowest, highest)` over all weights, one layer after the other."""

    def __init__(self, layers: int = 20, numel: int = 100_000) -> None:
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.zeros(numel)) for _ in range(layers)])
        self.pause = lambda: None

    def forward(self) -> tuple[float, float]:
        lows, highs = [], []
        for number, layer in enumerate(self.layers):
            low, high = layer.detach().aminmax()
            lows.append(float(low))
            highs.append(float(high))
            if number == 0:
                self.pause()
        return min(lows), max(highs)
