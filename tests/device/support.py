"""A trainer and readers on the fake's devices. Every byte of version v is v, so that a reader's kernel can tell."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

import shmsync
from shmsync import device
from tests.fakes.fake import Seen
from tests.fakes.torch_side import FakeTorch

OVERWRITTEN = 250
# How often a forward looks at each parameter: the longer its kernels take, the more can happen meanwhile.
LAYERS = 8


class Policy(nn.Module):
    """Four parameters of different sizes and kinds. A forward has the device look at all of them, piece by piece."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(300))
        self.b = nn.Parameter(torch.zeros(33, 7, dtype=torch.float64))
        self.c = nn.Parameter(torch.zeros(()))
        self.d = nn.Parameter(torch.zeros(5, 11).t())

    def forward(self) -> list[Seen] | list[bytes]:
        side = device.torch_side
        assert isinstance(side, FakeTorch)
        seen = []
        for tensor in [*self.parameters()] * LAYERS:
            index = side.memory_of(tensor)
            if index == device.HOST:
                return [_bytes(parameter) for parameter in self.parameters()]
            seen.append(side.fake.check(index, side.stream(index), tensor.data_ptr(), tensor.nbytes))
        return seen


def _bytes(tensor: torch.Tensor) -> bytes:
    dense = tensor.detach()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy().tobytes()


def policy(side: FakeTorch, index: int) -> Policy:
    """A policy on a device, or on the host."""
    module = Policy()
    if index != device.HOST:
        side.to_device(module, index)
    return module


def fill(side: FakeTorch, module: nn.Module, value: int, names: Iterable[str] | None = None) -> None:
    """The trainer's step: kernels on its current stream, or stores on the host."""
    for name, tensor in module.named_parameters():
        if names is not None and name not in names:
            continue
        index = side.memory_of(tensor)
        if index == device.HOST:
            tensor.data.as_strided((tensor.numel(),), (1,)).view(torch.uint8).fill_(value)
        else:
            side.fake.fill(index, side.stream(index), tensor.data_ptr(), tensor.nbytes, value)


def publish(side: FakeTorch, channel: shmsync.Publisher, module: nn.Module, version: int, *names: str) -> None:
    """Step to a version and push it; with names, a partial push of these parameters."""
    fill(side, module, version, names or None)
    given = {name: getattr(module, name) for name in names} or module
    channel.publish(given, partial=bool(names))


def values(seen: list[Seen] | list[bytes]) -> set[int]:
    """The bytes that a forward saw, once its kernels are done."""
    found: set[int] = set()
    for one in seen:
        found |= set(one) if isinstance(one, bytes) else set(one.value)
    return found


class Reader:
    """A subscriber with a bound policy; its forwards are kept until their kernels are done."""

    def __init__(self, side: FakeTorch, handle: object, index: int, mode: str = "auto") -> None:
        self.side, self.index = side, index
        self.subscriber = shmsync.Subscriber(handle)  # type: ignore[arg-type]
        self.module = policy(side, index)
        self.binding = self.subscriber.bind(self.module, mode)
        self.forwards: list[tuple[int, list[Seen] | list[bytes]]] = []

    def forward(self) -> int:
        """Run one; the version that it used."""
        with self.binding.hold() as version:
            self.forwards.append((version, self.module()))
        return version

    def wrong(self) -> list[str]:
        """The forwards, whose kernels are done, that saw anything but the version that they used; and those back in
        time."""
        found = [f"version {v} saw {values(seen)}" for v, seen in self.forwards if v and values(seen) != {v}]
        order = [version for version, _ in self.forwards]
        return found + ([f"went back: {order}"] if order != sorted(order) else [])

    def close(self) -> None:
        self.subscriber.close()
        self.forwards.clear()


def push_on(
    side: FakeTorch, channel: shmsync.Publisher, module: nn.Module, versions: Iterable[int], reader: Reader
) -> None:
    """Step to each of these versions and push it, with a forward of a reader's after each."""
    for version in versions:
        publish(side, channel, module, version)
        reader.forward()
