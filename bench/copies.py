"""What is measured of a copy alone: the roofline, shmsync's publish, torch's list copy, and casts. One process each.

Each object is served by a child process. ``copy(buffers)`` does one round into buffers of which there are `buffers` in
turn, and answers with seconds by metric; it raises if the bytes are not the source's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from .policy import ProbePolicy
from .populated import populated
from .streaming import Memmove, Streaming
from .workloads import ALL

Seconds = dict[str, float]


class WrongBytes(RuntimeError):
    """A copy differs from its source."""


class Roofline:
    """Plain one-pass copies of the workload's bytes in one piece, by every method at hand; the fastest counts."""

    def __init__(self, workload: str) -> None:
        self._numel = ALL[workload].nbytes // 4
        self._source = torch.zeros(self._numel)
        self._made: list[Tensor] = []
        self._turn = 0
        threads = int(os.environ.get("SHMSYNC_THREADS") or torch.get_num_threads())
        self._streaming = Streaming(4 * self._numel, threads)
        self._methods: dict[str, Callable[[Tensor], None]] = {
            "torch": self._torch,
            "memmove, one thread": self._memmove(Memmove(1)),
        }
        if threads > 1:
            self._methods[f"memmove, {threads} threads"] = self._memmove(Memmove(threads))

    def start(self) -> int:
        """As a host: nothing more to do."""
        return 1

    def copy(self, buffers: int) -> Seconds:
        """One copy by each method."""
        while len(self._made) < buffers:
            self._made.append(torch.frombuffer(populated(4 * self._numel), dtype=torch.float32, count=self._numel))
        found = {name: self._one(method, buffers) for name, method in self._methods.items()}
        found["streaming memmove"] = self._streaming.copy(buffers)
        return found

    def _one(self, method: Callable[[Tensor], None], buffers: int) -> float:
        self._turn += 1
        destination = self._made[self._turn % buffers]
        self._source.fill_(float(self._turn))
        seconds = timed(method, destination)
        _check([destination], [self._source], "roofline")
        return seconds

    def _torch(self, destination: Tensor) -> None:
        destination.copy_(self._source)

    def _memmove(self, move: Memmove) -> Callable[[Tensor], None]:
        return lambda destination: move(destination.data_ptr(), self._source.data_ptr(), 4 * self._numel)

    def close(self) -> None:
        """End the streaming process."""
        self._streaming.close()


class Publish:
    """shmsync's Publisher without subscribers: the whole publish, and the copying in it where that can be told;
    with checksums also their comparison."""

    def __init__(self, workload: str, dtype: torch.dtype | None = None, checksum: bool = False) -> None:
        from shmsync import Publisher, Subscriber

        self._policy = ProbePolicy(ALL[workload])
        options = {"checksum": True} if checksum else {}
        self._publisher = Publisher(self._policy, dtype=dtype, **options)
        self._subscriber = Subscriber(self._publisher.handle)
        self._dtype, self._checksum = dtype, checksum
        self._version = 0

    def copy(self, buffers: int) -> Seconds:
        """One publish. The number of buffers is shmsync's own affair."""
        self._version += 1
        self._policy.fill(self._version)
        with _copying() as copying:
            seconds = timed(self._publisher.publish, self._policy)
        with self._subscriber.lease() as lease:
            found = list(lease.weights.flatten_keys(".").values())
        expected = [leaf if self._dtype is None else leaf.to(self._dtype) for leaf in self._policy.leaves()]
        _check(found, expected, "shmsync")
        times = {"publish": seconds, **({"copying": sum(copying)} if copying else {})}
        return times | ({"verify": timed(self._subscriber.verify)} if self._checksum else {})

    def slots(self) -> int:
        """How many slots it rotates over."""
        return self._publisher.stats()["slots"]

    def close(self) -> None:
        """End the channel."""
        self._subscriber.close()
        self._publisher.close()


class ListCopy:
    """torch's own copy of all leaves: ``_foreach_copy_`` into the same kind of memory, or a cast with ``copy_``."""

    def __init__(self, workload: str, dtype: torch.dtype = torch.float32) -> None:
        self._workload, self._dtype = ALL[workload], dtype
        self._policy = ProbePolicy(self._workload)
        self._made: list[list[Tensor]] = []
        self._turn = 0

    def copy(self, buffers: int) -> Seconds:
        """One copy of all leaves."""
        while len(self._made) < buffers:
            self._made.append(self._buffer())
        self._turn += 1
        self._policy.fill(self._turn)
        destinations, sources = self._made[self._turn % buffers], list(self._policy.leaves())
        seconds = timed(torch._foreach_copy_, destinations, sources)
        _check(destinations, [leaf.to(self._dtype) for leaf in sources], "torch")
        return {"foreach": seconds}

    def _buffer(self) -> list[Tensor]:
        sizes = [torch.Size(shape).numel() for shape in self._workload.shapes]
        memory = populated(sum(sizes) * self._dtype.itemsize)
        flat = torch.frombuffer(memory, dtype=self._dtype, count=sum(sizes))
        return [piece.view(shape) for piece, shape in zip(flat.split(sizes), self._workload.shapes, strict=True)]


def timed(function: Callable[..., Any], *args: Any) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    function(*args)
    return time.perf_counter() - begin


@contextmanager
def _copying() -> Any:
    """Seconds spent in the publisher's copies during the block; empty if this version has no such method."""
    try:
        from shmsync.channel import Store as store
    except ImportError:
        store = None
    seconds: list[float] = []
    copy_in = getattr(store, "copy_in", None)
    if copy_in is None:
        yield seconds
        return

    def copy(self: Any, *args: Any) -> None:
        seconds.append(timed(copy_in, self, *args))

    with mock.patch.object(store, "copy_in", copy):
        yield seconds


def _check(found: list[Tensor], expected: list[Tensor], whose: str) -> None:
    if len(found) != len(expected) or not all(map(torch.equal, found, expected)):
        raise WrongBytes(f"Expected the source's bytes after a copy by {whose}, got others")
