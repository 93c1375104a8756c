"""What tests let other processes do. Every function takes the process's `state` first."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import shmsync
from tests.helpers import probes
from tests.helpers.models import Bits, Watched, snapshot


def subscribe(state: Any, handle: str, worker_id: int | None = None) -> None:
    state.subscriber = shmsync.Subscriber(handle, worker_id=worker_id)


def attach(
    state: Any, handle: str, make: Callable[[], nn.Module], worker_id: int | None = None, mode: str = "auto"
) -> int:
    """Subscribe, build a module and bind it; the version in use."""
    subscribe(state, handle, worker_id)
    state.module = make()
    state.binding = state.subscriber.bind(state.module, mode)
    return state.binding.version


def detach(state: Any) -> None:
    state.subscriber.close()
    del state.subscriber
    for name in ("binding", "module"):
        if hasattr(state, name):
            delattr(state, name)


def refreshed(state: Any) -> tuple[int, dict[str, Bits]]:
    """Switch to the newest version; the version in use and the module's tensors."""
    return state.subscriber.refresh(), snapshot(state.module)


def leased(state: Any) -> tuple[int, dict[str, Bits]]:
    """The newest version and its weights, through a lease."""
    with state.subscriber.lease() as lease:
        return lease.version, snapshot(lease.weights)


def forward(state: Any, *args: Any) -> Any:
    """What a forward gives, as numbers, and the version that it used."""
    output = state.module(*(torch.tensor(arg) for arg in args))
    return state.binding.version, output.tolist() if isinstance(output, torch.Tensor) else output


def evaluate(state: Any, function: Callable[..., Any], *args: Any) -> Any:
    """`function(module, *args)`, and the module's tensors afterwards."""
    return function(state.module, *args), snapshot(state.module)


def footprint(state: Any) -> probes.Footprint:
    return probes.footprint()


def segment_memory(state: Any) -> dict[str, int]:
    return probes.segment_memory()


def limit_descriptors(state: Any, soft: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, soft))


def watch(state: Any, last: int, pause_seconds: float, seconds: float) -> list[tuple[int, float, float]]:
    """Forwards of a Watched module without pause until one used version `last`: (version, lowest, highest) of each."""
    module: Watched = state.module
    seen: list[tuple[int, float, float]] = []

    def pause() -> None:
        seen.append((state.binding.version, 0.0, 0.0))  # inside the forward: no switch can come between
        if pause_seconds:
            time.sleep(pause_seconds)

    module.pause = pause
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        low, high = module()
        seen[-1] = (seen[-1][0], low, high)
        if seen[-1][0] >= last:
            break
    return seen


def pid(state: Any) -> int:
    return os.getpid()
