"""Torch's side of the fake runtime: tensors over the fake's device memory, which torch itself takes for the host's."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from shmsync import device, gathering
from shmsync.layout import Leaf
from tests.fakes.build import library
from tests.fakes.fake import FATBIN, Fake, environment

_KINDS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class FakeTorch(device.Torch):
    """What shmsync asks of torch about devices, answered for the fake's. Each thread has a stream on each device."""

    def __init__(self, fake: Fake) -> None:
        self.fake = fake
        self._current = threading.local()
        self._default: dict[int, int] = {}

    def memory_of(self, tensor: Tensor) -> int:
        if not tensor.numel() or not self.fake.count("allocations") + self.fake.count("opens"):
            return device.HOST  # without asking, which makes a context
        index = device.runtime.pointer_device(tensor.data_ptr())
        return device.HOST if index is None else index

    def all_on_host(self, tensors: Sequence[Tensor]) -> bool:
        return all(self.memory_of(tensor) == device.HOST for tensor in tensors)

    def stream(self, index: int) -> int:
        streams: dict[int, int] = getattr(self._current, "streams", {})
        if index in streams:
            return streams[index]
        if index not in self._default:
            self._default[index] = device.runtime.stream_create(index)
        return self._default[index]

    @contextmanager
    def on(self, index: int, stream: int) -> Iterator[None]:
        """A block in which this is the thread's current stream on a device."""
        before = getattr(self._current, "streams", {})
        self._current.streams = {**before, index: stream}
        try:
            yield
        finally:
            self._current.streams = before

    def current(self, index: int) -> AbstractContextManager[Any]:
        return nullcontext()

    def capturing(self) -> bool:
        return getattr(self._current, "captures", False)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """A block in which this thread's streams are captured."""
        self._current.captures = True
        try:
            yield
        finally:
            self._current.captures = False

    def wrap(self, address: int, nbytes: int, index: int, owner: object) -> Tensor:
        assert device.runtime.pointer_device(address) == index
        buffer = (ctypes.c_ubyte * nbytes).from_address(address)
        weakref.finalize(buffer, _keep, owner).atexit = False
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def empty(self, leaf: Leaf, index: int) -> Tensor:
        return torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype)

    def copy(self, index: int, stream: int, destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        same = [(d, s) for d, s in zip(destinations, sources, strict=True) if d.dtype is s.dtype and d.numel()]
        for d, s in same:
            assert d.stride() == s.stride() or d.numel() == 1, "the fake copies bytes only"
        addresses = [d.data_ptr() for d, _ in same], [s.data_ptr() for _, s in same]
        with device.attempt():
            device.runtime.copy_batch(index, *addresses, [d.nbytes for d, _ in same], stream)
        for d, s in zip(destinations, sources, strict=True):
            if d.dtype is not s.dtype and d.numel():
                kind = f"{_KINDS[s.dtype]}_to_{_KINDS[d.dtype]}"
                self.fake.copy_cast(index, stream, d.data_ptr(), s.data_ptr(), d.numel(), kind)

    def clone(self, tensor: Tensor) -> Tensor:
        index = self.memory_of(tensor)
        if index == device.HOST:
            return tensor.clone()
        copy = self.zeros(tensor, index)
        self.copy(index, self.stream(index), [copy], [tensor])
        return copy

    def free_cached(self) -> None:
        pass

    def synchronize(self, index: int) -> None:
        self.fake.drain()

    # ── for tests

    def forget_streams(self) -> None:
        """Give back the threads' streams."""
        for index, stream in self._default.items():
            device.runtime.stream_destroy(index, stream)
        self._default.clear()

    def zeros(self, like: Tensor, index: int) -> Tensor:
        """A tensor on a device, in memory of torch's own, as it were."""
        if not like.numel():
            return torch.empty_like(like)
        memory = device.Memory(index, like.nbytes)
        ctypes.memset(memory.address, 0, like.nbytes)
        flat = self.wrap(memory.address, like.nbytes, index, memory).view(like.dtype)
        return flat.as_strided(like.shape, torch.empty_like(like).stride())

    def to_device(self, module: nn.Module, index: int) -> nn.Module:
        """Move a module's tensors to a device, with their values."""
        for tensor in (*module.parameters(), *module.buffers()):
            moved = self.zeros(tensor.data, index)
            moved.copy_(tensor.data)
            tensor.data = moved
        return module


def _keep(owner: object) -> None:
    """What was kept until now goes."""


def install(**options: Any) -> FakeTorch:
    """Let this process have the fake for its CUDA runtime; options as of `environment`."""
    gathering.image = lambda: FATBIN
    settings = environment(**options)
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    why = device.reason()  # it is looked for once
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    assert why is None, why
    side = FakeTorch(Fake(library()))
    device.torch_side = side
    return side
