"""What tests let other processes do. Every function takes the process's `state` first."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import shmsync

from .modules import Digest, digest, fill


class Look(NamedTuple):
    """What a worker has after a refresh: the version, how it came there, and what a forward found in all leaves."""

    version: int
    mode: str
    low: float
    high: float


def warm(state: Any) -> None:
    """Make the CUDA context, which takes a while and device memory."""
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()


def reset(state: Any) -> None:
    """Let go of everything, but for the CUDA context."""
    for name in ("subscriber", "channel"):
        if hasattr(state, name):
            getattr(state, name).close()
    vars(state).clear()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


# --- a worker


def attach(  # noqa: PLR0917 - Peer.call gives them by position
    state: Any,
    handle: str,
    make: Callable[[], nn.Module],
    mode: str = "auto",
    device: str = "cuda",
    worker_id: int | None = None,
) -> tuple[str, int]:
    """Build a module on the device and bind it; the mode and the version in use."""
    with torch.device(device):
        state.module = make()
    return bind(state, handle, mode, worker_id)


def bind(state: Any, handle: str, mode: str = "auto", worker_id: int | None = None) -> tuple[str, int]:
    """Subscribe, and bind the module that is there."""
    state.subscriber = shmsync.Subscriber(handle, worker_id=worker_id)
    state.binding = state.subscriber.bind(state.module, mode)
    return state.binding.mode, state.binding.version


def rebind(state: Any, handle: str) -> tuple[str, int]:
    """Leave the channel and bind the same module to another one."""
    state.subscriber.close()
    return bind(state, handle)


def reattach(state: Any, handle: str) -> int:
    return state.subscriber.reattach(handle)


def refresh(state: Any) -> int:
    return state.subscriber.refresh()


def wait(state: Any, version: int) -> int:
    return state.subscriber.wait(version, 20.0)


def look(state: Any) -> Look:
    """Refresh, and run a forward of a Watched module to its end."""
    state.subscriber.refresh()
    low, high = state.module().tolist()
    return Look(state.binding.version, state.binding.mode, low, high)


def contents(state: Any) -> tuple[int, str, dict[str, Digest]]:
    """Refresh; the version, the mode, and every tensor of the module to the bit."""
    state.subscriber.refresh()
    return state.binding.version, state.binding.mode, digest(state.module)


def devices(state: Any) -> set[str]:
    return {str(tensor.device) for tensor in (*state.module.parameters(), *state.module.buffers())}


def addresses(state: Any) -> dict[str, int]:
    """Where the parameters are, tied ones under each of their names."""
    return {name: p.data_ptr() for name, p in state.module.named_parameters(remove_duplicate=False)}


def stats(state: Any) -> dict[str, int]:
    return state.subscriber.stats()


class Memory(NamedTuple):
    """``allocated``: bytes that this process has of torch's allocator. ``foreign``: whether none of the parameters is
    in there. ``span``: bytes from the first parameter's begin to the last one's end."""

    allocated: int
    foreign: bool
    span: int


def memory(state: Any) -> Memory:
    gc.collect()
    own = [(s["address"], s["address"] + s["total_size"]) for s in torch.cuda.memory_snapshot()]
    places = [(p.data_ptr(), p.data_ptr() + p.numel() * p.element_size()) for p in state.module.parameters()]
    inside = [begin for begin, _ in places if any(first <= begin < last for first, last in own)]
    span = max(end for _, end in places) - min(begin for begin, _ in places)
    return Memory(torch.cuda.memory_allocated(), not inside, span)


def traces_of_a_device(state: Any) -> tuple[bool, set[str]]:
    """Whether torch has made a CUDA context, and the driver's files that this process has open or mapped."""
    opened = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            opened.add(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    mapped = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    return torch.cuda.is_initialized(), {name for name in opened | mapped if name.startswith("/dev/nvidia")}


def train(state: Any) -> None:
    """A forward in training mode, which writes the running statistics of batch norms."""
    state.module.train()
    state.module(torch.randn(32, 64, device="cuda") + 5)
    torch.cuda.synchronize()


def watch(state: Any, seconds: float, pause_cycles: int) -> list[tuple[int, float, float]]:
    """Forwards of a Watched module without pause: (version, lowest, highest) of each.

    By turns one that is waited for, and twenty of which the process waits for none.
    """
    versions: list[int] = []
    results = []
    state.module.note = lambda: versions.append(state.binding.version)  # inside: no switch can come between
    state.module.pause_cycles = pause_cycles
    deadline, burst = time.monotonic() + seconds, 1
    while time.monotonic() < deadline:
        results += [state.module() for _ in range(burst)]
        torch.cuda.synchronize()
        burst = 21 - burst
    return [(version, *pair) for version, pair in zip(versions, torch.stack(results).tolist(), strict=True)]


def begin_slowly(state: Any, pause_cycles: int) -> int:
    """Begin a forward that rests half way, on the device; come back at once. The version that it uses."""
    state.module.pause_cycles = pause_cycles
    state.slow = state.module()
    state.module.pause_cycles = 0
    state.slow_end = torch.cuda.Event()
    state.slow_end.record()
    return state.binding.version


def refresh_timed(state: Any) -> tuple[int, float]:
    begin = time.monotonic()
    return state.subscriber.refresh(), time.monotonic() - begin


def slowly_done(state: Any) -> bool:
    return state.slow_end.query()


def slow_result(state: Any) -> tuple[float, float]:
    low, high = state.slow.tolist()
    return low, high


def capture(state: Any) -> None:
    """Record a forward into a CUDA graph."""
    state.subscriber.refresh()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            state.module()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    state.graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(state.graph):
        state.output = state.module()


def replay(state: Any) -> Look:
    """Refresh, and replay the recorded forward."""
    state.subscriber.refresh()
    state.graph.replay()
    low, high = state.output.tolist()
    return Look(state.binding.version, state.binding.mode, low, high)


# --- a trainer


def lead(state: Any, make: Callable[[], nn.Module], device: str = "cuda") -> str:
    """Be a trainer at version 0; the channel's handle."""
    with torch.device(device):
        state.source = make()
    state.channel = shmsync.Publisher(state.source)
    return str(state.channel.handle)


def push(state: Any, v: int) -> int:
    return state.channel.publish(fill(state.source, v)).version


def push_for(state: Any, seconds: float) -> int:
    """Publish without pause."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        push(state, state.channel.version + 1)
    return state.channel.version
