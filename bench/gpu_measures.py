"""What bench.gpu measures. Each function gives its figures; what arrives at the workers is checked in every round."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import shmsync

from .gpu_children import DEVICE, Leaves, SpawnedChild
from .memory import table
from .stats import Spread, ratios, spread

# Where its seconds go, and what to do.
_Turn = tuple[list[float], Callable[[], object]]


class WrongWeights(RuntimeError):
    """A worker does not have the weights that were pushed."""


@dataclass(frozen=True)
class Shape:
    """A policy of so many leaves of so many fp32 elements."""

    title: str
    leaves: int
    numel: int

    @property
    def nbytes(self) -> int:
        return 4 * self.leaves * self.numel

    def policy(self) -> Leaves:
        return Leaves(self.leaves, self.numel)


@dataclass(frozen=True)
class Figure:
    """One row of the table: seconds of each round, and those of the reference in the same rounds."""

    title: str
    nbytes: int
    seconds: list[float]
    reference: list[float] = field(default_factory=list)

    @property
    def time(self) -> Spread:
        return spread(self.seconds)

    @property
    def ratio(self) -> Spread | None:
        """Time over the reference's time, round by round."""
        return spread(ratios(self.seconds, self.reference)) if self.reference else None


MANY = Shape("2000 x 50 KB", 2000, 12_500)
MIDDLE = Shape("200 x 500 KB", 200, 125_000)
SMALL = Shape("4 MB", 20, 50_000)
_WANTED = 10 * 10**9


def big() -> Shape:
    """10 GB, or what fits: trainer, worker, three slots and the two ends of a plain copy on the device; the channel may
    want as many slots of the host."""
    free, available = torch.cuda.mem_get_info()[0], table("/proc/meminfo")["MemAvailable"]
    nbytes = min(_WANTED, int(0.9 * free / 7), int(0.8 * available / 3))
    return Shape(f"{nbytes / 1e9:.3g} GB", 40, nbytes // 4 // 40)


def same_device(worker: SpawnedChild, shape: Shape, rounds: int) -> tuple[Figure, Figure]:
    """A publish with a worker that maps the ring, and a plain copy of the same bytes in one piece, by turns."""
    source = torch.zeros(shape.leaves * shape.numel, device=DEVICE)
    destination = torch.empty_like(source)
    with _shared(worker, shape) as (policy, channel):
        copies: list[float] = []
        pushes: list[float] = []
        turns: list[_Turn] = [(copies, lambda: _plain(destination, source)), (pushes, channel.publish)]
        for number in range(rounds):
            policy.fill(channel.version + 1)
            for samples, action in turns if number % 2 else reversed(turns):
                samples.append(_timed(action))
            _check(worker, channel.version)
    title = f"publish {shape.title}, worker on the same device"
    return Figure(title, shape.nbytes, pushes, copies), Figure(f"plain copy of {shape.title}", shape.nbytes, copies)


def not_awaited(worker: SpawnedChild, shape: Shape, rounds: int) -> Figure:
    """How long the trainer is held up by a publish that it doesn't await."""
    with _shared(worker, shape) as (policy, channel):
        samples = []
        for version in range(channel.version + 1, channel.version + 1 + rounds):
            policy.fill(version)
            samples.append(_timed(lambda: channel.publish(wait=False)))
            policy.fill(-1)
            worker.call("await_version", version)
            _check(worker, version)
    return Figure(f"publish(wait=False) {shape.title}, until the trainer may go on", shape.nbytes, samples)


def to_host(shape: Shape, rounds: int) -> tuple[Figure, Figure]:
    """A publish with nobody on a device, and a plain copy of the same bytes to pinned memory, by turns."""
    policy = shape.policy()
    source = torch.zeros(shape.leaves * shape.numel, device=DEVICE)
    pinned = torch.empty(source.shape, pin_memory=True)
    copies, pushes = [], []
    with shmsync.Publisher(policy) as channel, shmsync.Subscriber(channel.handle) as subscriber:
        module = Leaves(shape.leaves, shape.numel, "cpu")
        channel.publish()
        binding = subscriber.bind(module)
        for number in range(rounds + 3):
            policy.fill(number)
            copies.append(_timed(lambda: _plain(pinned, source)))
            pushes.append(_timed(channel.publish))
            subscriber.refresh()
            _expect((binding.mode, *module().tolist()), ("map", number, number))
    title = f"publish {shape.title}, workers on the CPU only"
    reference = Figure(f"plain copy of {shape.title} to pinned memory", shape.nbytes, copies[3:])
    return Figure(title, shape.nbytes, pushes[3:], copies[3:]), reference


def first_forward(worker: SpawnedChild, shape: Shape, rounds: int) -> Figure:
    """From the beginning of a push to the end of the worker's first forward on the new weights."""
    with _shared(worker, shape) as (policy, channel):
        samples = []
        for _ in range(rounds):
            version = channel.version + 1
            policy.fill(version)
            torch.cuda.synchronize()
            worker.send("await_version", version)
            time.sleep(0.005)  # so that it is running forwards
            begin = time.monotonic_ns()
            channel.publish()
            *found, end = worker.receive()
            samples.append((end - begin) / 1e9)
            _expect(found, [version, version])
            _check(worker, version)
    return Figure(f"push {shape.title} to the worker's first new forward: shmsync", shape.nbytes, samples)


def torch_ipc(receiver: SpawnedChild, queue: Any, shape: Shape, rounds: int, flat: bool) -> Figure:
    """The same with torch's own CUDA IPC: a snapshot goes through a queue, and the worker copies it in."""
    policy = shape.policy()
    receiver.call("prepare", shape.leaves, shape.numel)
    samples = []
    for number in range(1, rounds + 4):
        policy.fill(number)
        torch.cuda.synchronize()
        receiver.send("take", flat)
        time.sleep(0.005)  # so that it is waiting
        begin = time.monotonic_ns()
        message = snapshot(policy, flat)
        queue.put(message)
        *found, end = receiver.receive()
        samples.append((end - begin) / 1e9)
        _expect(found, [number, number])
        _expect(receiver.call("look"), (number, number))
        del message
    how = "one flat tensor" if flat else f"{shape.leaves} tensors"
    return Figure(
        f"push {shape.title} to the worker's first new forward: torch's IPC, {how}", shape.nbytes, samples[3:]
    )


@torch.no_grad()
def snapshot(policy: Leaves, flat: bool) -> Tensor | list[Tensor]:
    """What is sent must not change with the trainer's next step, and must be there when it is received."""
    leaves = [leaf.detach() for leaf in policy.leaves]
    message = torch.cat([leaf.reshape(-1) for leaf in leaves]) if flat else [leaf.clone() for leaf in leaves]
    torch.cuda.synchronize()
    return message


def growth(worker: SpawnedChild, shape: Shape, pushes: int = 50) -> int:
    """Bytes of device memory that are in use, by all processes, after so many pushes and were not after the third."""
    with _shared(worker, shape) as (policy, channel):
        used = []
        for _ in range(pushes):
            policy.fill(channel.version + 1)
            channel.publish()
            _check(worker, channel.version)
            torch.cuda.synchronize()
            used.append(-torch.cuda.mem_get_info()[0])
    return max(used[3:]) - used[2]


def mixed(worker: SpawnedChild, shape: Shape, seconds: float) -> tuple[int, int, int]:
    """Pushes without pause to a worker that runs forwards without pause: pushes, forwards, forwards gone wrong.

    By turns awaited and not; the weights are spoiled right after each push.
    """
    with _shared(worker, shape) as (policy, channel):
        before = version = channel.version
        worker.send("watch", seconds)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            version += 1
            policy.fill(version)
            channel.publish(wait=version % 2 == 0)
            policy.fill(-1)
        forwards, wrong = worker.receive()
        torch.cuda.synchronize()
        policy.fill(version + 1)
        channel.publish()
        _check(worker, version + 1)
    return version - before, forwards, wrong


@contextmanager
def _shared(worker: SpawnedChild, shape: Shape) -> Iterator[tuple[Leaves, shmsync.Publisher]]:
    """A policy, its channel, and the worker bound to it and mapped; memory is given back at the end."""
    torch.cuda.empty_cache()
    policy = shape.policy()
    with shmsync.Publisher(policy) as channel:
        worker.call("bind", str(channel.handle), shape.leaves, shape.numel)
        # The first versions may come by copy, and slots are made; the worker must map the ring after that.
        for version in (1, 2, 3, 4):
            policy.fill(version)
            channel.publish()
            found = worker.call("look")
        _expect(found, (4, "map", 4, 4))
        yield policy, channel
        worker.call("unbind")
    del policy
    gc.collect()
    torch.cuda.empty_cache()


def _plain(destination: Tensor, source: Tensor) -> None:
    destination.copy_(source, non_blocking=True)
    torch.cuda.current_stream().synchronize()


def _timed(action: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def _check(worker: SpawnedChild, version: int) -> None:
    _expect(worker.call("look"), (version, "map", version, version))


def _expect(found: Any, expected: Any) -> None:
    if tuple(found) != tuple(expected):
        raise WrongWeights(f"Expected {expected} at the worker, got {found}")
