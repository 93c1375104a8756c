"""What the trainer's side of a test does, in the test's own process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shmsync

from . import work
from .modules import Watched, fill
from .peers import Peer

MIB = 1 << 20


def on_gpu(make: Callable[[], Any], device: str = "cuda") -> Any:
    """The module, built on a device."""
    with torch.device(device):
        return make()


def attach(channel: shmsync.Publisher, peers: Sequence[Peer], make: Callable[[], nn.Module], *args: Any) -> list[Any]:
    """Let the peers build and bind a module at the same time; the mode and the version of each."""
    for peer in peers:
        peer.start(work.attach, str(channel.handle), make, *args)
    return [peer.result() for peer in peers]


def share(
    channel: shmsync.Publisher, source: Watched, peers: Sequence[Peer], make: Callable[[], nn.Module] = Watched
) -> None:
    """Publish version 1, attach the peers, who copy it unless the publisher was fast, and publish 2, which they map."""
    channel.publish(fill(source, 1))
    assert all(attached in (("copy", 1), ("map", 1)) for attached in attach(channel, peers, make))
    follow(channel, source, peers, 2)


def follow(channel: shmsync.Publisher, source: Watched, peers: Sequence[Peer], v: int, mode: str = "map") -> None:
    """Publish version `v`: it is complete when publish returns, and each peer's next forward is all of it."""
    assert channel.publish(fill(source, v)).version == v
    for peer in peers:
        peer.start(work.look)
    assert [peer.result() for peer in peers] == [work.Look(v, mode, v, v)] * len(peers)


def used() -> int:
    """Bytes of the device that are in use, by all processes."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def eventually(condition: Callable[[], Any], what: str, seconds: float = 15.0) -> None:
    """Ask again and again until `condition()` is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"Expected {what} within {seconds} s, got none of it"
        time.sleep(0.02)


def fitting(wanted: int, on_device: float, on_host: float) -> int:
    """The bytes of a policy of which so many copies fit on the device and on the host; `wanted` if they do."""
    free = torch.cuda.mem_get_info()[0]
    return min(wanted, int(0.9 * free / on_device), int(0.8 * _host_free() / on_host))


def _host_free() -> int:
    """What this process may still take of the host's memory, its control group's limit included."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    available = next(int(line[1]) * 1024 for line in lines if line[0] == "MemAvailable:")
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            text = Path("/sys/fs/cgroup", limit).read_text().strip()
            current = int(Path("/sys/fs/cgroup", usage).read_text())
        except OSError:
            continue
        if text != "max":
            available = min(available, int(text) - current)
    return available


def visible(number: int) -> str:
    """How another process names this process's device `number` in CUDA_VISIBLE_DEVICES."""
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return names[number].strip() if names else str(number)
