"""Accelerators: the CUDA runtime, through the extension, and what is asked of torch about tensors on its devices.

Nothing here is needed for the host. No function makes a CUDA context, but for those that say so.
"""

from __future__ import annotations

import logging
import operator
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .errors import DeviceError, ShmSyncError
from .layout import Layout, Leaf

try:
    from . import _C as engine

    runtime: Any = getattr(engine, "cuda", None)
except ImportError:
    runtime = None

_log = logging.getLogger("shmsync")
_is_cuda = operator.attrgetter("is_cuda")
# Memories by number: devices as this process counts them, or one of these.
HOST, ELSEWHERE = -1, -2


class Torch:
    """What torch knows of devices. Tests put another one in its place, over a runtime without any hardware."""

    def memory_of(self, tensor: Tensor) -> int:
        """HOST, the number of a CUDA device, or ELSEWHERE."""
        device = tensor.device
        if device.type == "cpu":
            return HOST
        return device.index if device.type == "cuda" and device.index is not None else ELSEWHERE

    def all_on_host(self, tensors: Sequence[Tensor]) -> bool:
        """Whether no tensor is on a CUDA device."""
        return not any(map(_is_cuda, tensors))

    def stream(self, index: int) -> int:
        """The calling thread's current stream on a device, as the runtime knows it."""
        return torch.cuda.current_stream(index).cuda_stream

    def current(self, index: int) -> AbstractContextManager[Any]:
        """A block with that device current. The way back makes no context on the device before, as the runtime's would
        in a process that uses only this one."""
        return torch.cuda.device(index)

    def capturing(self) -> bool:
        """Whether this thread's current stream is being captured in a graph: it does nothing now."""
        return torch.cuda.is_current_stream_capturing()

    def wrap(self, address: int, nbytes: int, index: int, owner: object) -> Tensor:
        """Bytes on a device as a tensor, which keeps `owner` alive. Contract: copies nothing."""
        return torch.as_tensor(_Interface(address, nbytes, owner), device=torch.device("cuda", index))

    def empty(self, leaf: Leaf, index: int) -> Tensor:
        """A leaf without elements, on a device."""
        return torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device=torch.device("cuda", index))

    def copy(self, index: int, stream: int, destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Have each source copied into its destination, cast by value where the dtypes differ, on that stream."""
        # One kernel does many tensors, if each list is of one dtype.
        groups: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for destination, source in zip(destinations, sources, strict=True):
            group = groups.setdefault((destination.dtype, source.dtype), ([], []))
            group[0].append(destination)
            group[1].append(source)
        with torch.no_grad(), self.current(index), self._on(index, stream):
            for into, out_of in groups.values():
                torch._foreach_copy_(into, out_of)

    def _on(self, index: int, stream: int) -> AbstractContextManager[Any]:
        """A block on a stream; none is needed for the current one. torch makes another stream of the handle 0, which is
        that of its default stream."""
        if self.stream(index) == stream:
            return nullcontext()
        return torch.cuda.stream(torch.cuda.ExternalStream(stream, device=index))

    def clone(self, tensor: Tensor) -> Tensor:
        """The same values in memory of torch's own, on the same device."""
        return tensor.clone()

    def free_cached(self) -> None:
        """Give back device memory that torch keeps for later."""
        torch.cuda.empty_cache()

    def synchronize(self, index: int) -> None:
        """Wait for all work on a device."""
        torch.cuda.synchronize(index)


class _Interface:
    """What torch makes a tensor of without copying; the tensor's storage keeps it, and so the owner."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


torch_side: Torch = Torch()


def memory_of(tensor: Tensor) -> int:
    """HOST, the number of a CUDA device, or ELSEWHERE (another kind of device)."""
    return torch_side.memory_of(tensor)


def name_of(memory: int) -> str:
    """A memory, for people."""
    return {HOST: "the host", ELSEWHERE: "another kind of device"}.get(memory, f"cuda:{memory}")


def reason() -> str | None:
    """Why devices can't be reached directly from this process; None = they can."""
    if runtime is None:
        return "the compiled extension is not installed"
    return runtime.reason()


def uuid_of(index: int) -> bytes:
    """What identifies a device in all processes, whatever number each of them gives it. Raises DeviceError."""
    with attempt():
        return runtime.device_uuid(index)


def index_of(uuid: bytes) -> int | None:
    """The number that this process gives to a device; None if it doesn't see it."""
    if reason() is not None:
        return None
    with attempt():
        return next((index for index in range(runtime.device_count()) if runtime.device_uuid(index) == uuid), None)


@contextmanager
def attempt(index: int | None = None) -> Iterator[None]:
    """A block in which the runtime's and torch's errors become DeviceError, with a device current if one is given."""
    try:
        with nullcontext() if index is None else torch_side.current(index):
            yield
    except (ShmSyncError, RecursionError, NotImplementedError):
        raise
    except RuntimeError as error:  # of torch too: out of memory, a context that did not outlive a fork
        raise DeviceError(str(error), getattr(error, "name", type(error).__name__)) from error


def give_back(pid: int, function: Callable[..., None], index: int, *args: Any) -> None:
    """Call a function of the runtime that gives something back on a device; what goes wrong is only logged.

    ``pid``: the process that it belongs to. In a forked child nothing is done: CUDA does not outlive a fork.

    It is tried twice: the first call may tell of an earlier, asynchronous error, which has nothing to do with it.
    """
    for last in (False, True) if os.getpid() == pid else ():
        try:
            with torch_side.current(index):
                function(index, *args)
            return
        except RuntimeError as error:
            if last:
                _log.warning("Something of a device could not be given back: %s", str(error))


def register(index: int, address: int, nbytes: int) -> None:
    """Pin memory of the host, for all devices; this one is in use. Raises DeviceError.

    Contract: for shared mappings, never private ones, of which it would copy every page.
    """
    with attempt(index):
        runtime.host_register(address, nbytes, False)


def unregister(pid: int, index: int, address: int) -> None:
    """Undo that; as `give_back`."""
    give_back(pid, lambda _, registered: runtime.host_unregister(registered), index, address)


def synchronized(index: int) -> None:
    """Wait for all work on a device; what goes wrong is only logged: then nothing works there any more."""
    give_back(os.getpid(), torch_side.synchronize, index)


class Memory:
    """Bytes on a device that belong to this process alone, not to torch's allocator.

    Raises DeviceError if the device has no room; memory that torch only keeps for later is asked back first.
    Contract: makes a context on the device; the bytes are undefined.
    """

    def __init__(self, index: int, nbytes: int) -> None:
        self.index, self.nbytes = index, nbytes
        with attempt(index):
            try:
                self.address: int = runtime.malloc(index, nbytes)
            except runtime.CudaError:
                torch_side.free_cached()
                self.address = runtime.malloc(index, nbytes)
        self._end = weakref.finalize(self, give_back, os.getpid(), runtime.free, index, self.address)
        self._end.atexit = False  # the process's end frees it, and the runtime may be gone by then

    def exported(self) -> bytes:
        """What another process opens it by."""
        with attempt(self.index):
            return bytes(runtime.ipc_export(self.index, self.address))

    def free(self) -> None:
        """Contract: no work on it may be pending. A second call does nothing."""
        self._end()


def views(address: int, index: int, layout: Layout, owner: object) -> list[Tensor]:
    """One tensor per leaf over a slot on a device, each with a storage of its own, which keeps `owner` alive.

    Contract: copies nothing.
    """
    with torch.inference_mode(False), torch.no_grad():
        return [_view(address, index, leaf, owner) for leaf in layout]


def _view(address: int, index: int, leaf: Leaf, owner: object) -> Tensor:
    if leaf.nbytes == 0:
        return torch_side.empty(leaf, index)
    flat = torch_side.wrap(address + leaf.offset, leaf.nbytes, index, owner)
    return flat.view(leaf.dtype).as_strided(leaf.shape, leaf.stride)


class Opened:
    """Another process's memory, opened here. It is closed when nothing refers to this object any more.

    ``then``: called after that. Contract: makes a context on the device.
    """

    def __init__(self, index: int, handle: bytes, then: Callable[[], None]) -> None:
        with attempt(index):
            self.address: int = runtime.ipc_open(index, handle)
        end = weakref.finalize(self, _close, os.getpid(), index, self.address, then)
        end.atexit = False


def _close(pid: int, index: int, address: int, then: Callable[[], None]) -> None:
    try:
        # Work that was given a tensor over it may still be queued.
        give_back(pid, torch_side.synchronize, index)
        give_back(pid, runtime.ipc_close, index, address)
    finally:
        then()


class Stream:
    """A stream of our own on a device: it waits for nobody but whom it is told to wait for."""

    def __init__(self, index: int) -> None:
        self.index = index
        with attempt(index):
            self.handle: int = runtime.stream_create(index)
        end = weakref.finalize(self, give_back, os.getpid(), runtime.stream_destroy, index, self.handle)
        end.atexit = False

    def wait(self, event: Event) -> None:
        """Begin nothing of what is queued from now on before the event."""
        wait(self.index, self.handle, event)

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        """Copy bytes between any two memories."""
        if nbytes:
            with attempt(self.index):
                runtime.copy(self.index, destination, source, nbytes, self.handle)

    def copy_batch(self, destinations: Any, sources: Any, nbytes: Any) -> None:
        """Copy many pieces, given as addresses and sizes."""
        with attempt(self.index):
            runtime.copy_batch(self.index, destinations, sources, nbytes, self.handle)

    def synchronize(self) -> None:
        """Wait until all that is queued is done, without the GIL."""
        with attempt(self.index):
            runtime.stream_synchronize(self.index, self.handle)


class Event:
    """A point in a stream: what was queued before it is done when it has come."""

    def __init__(self, index: int, stream: int) -> None:
        self.index = index
        with attempt(index):
            self.handle: int = runtime.event_create(index)
        end = weakref.finalize(self, give_back, os.getpid(), runtime.event_destroy, index, self.handle)
        end.atexit = False
        with attempt(index):
            runtime.event_record(index, self.handle, stream)

    def done(self) -> bool:
        """Whether it has come."""
        with attempt(self.index):
            return bool(runtime.event_query(self.index, self.handle))

    def synchronize(self) -> None:
        """Wait until it has come, without the GIL."""
        with attempt(self.index):
            runtime.event_synchronize(self.index, self.handle)


def wait(index: int, stream: int, event: Event) -> None:
    """Let a stream of a device, torch's, say, begin nothing more before an event, which may be another device's."""
    with attempt(index):
        runtime.stream_wait_event(index, stream, event.handle)
