"""The processes beside the trainer in bench.gpu: a worker that follows a channel, and one that is sent tensors.

They are spawned, since CUDA does not survive a fork, and serve their methods as all children of the benchmarks do.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing  # how tensors go through a queue
from torch import Tensor, nn

from .processes import Child, _serve

_spawn = multiprocessing.get_context("spawn")
_RANGE = 2**23
DEVICE = "cuda:0"


class SpawnedChild(Child):
    """A Child that is a fresh interpreter."""

    def __init__(self, name: str, factory: Callable[..., Any], *args: Any) -> None:
        self.name = name
        self._pipe, theirs = _spawn.Pipe()
        self._process = _spawn.Process(target=_serve, args=(theirs, factory, args), name=name)  # type: ignore[assignment]
        self._process.start()
        theirs.close()


class Leaves(nn.Module):
    """Leaves of one size; version v fills leaf i with i * step + v, all of them exact in fp32.

    ``forward`` gives (lowest, highest) of the versions that it found, as a tensor on the device: in all elements, or
    only in one of the first and one of the last leaf.
    """

    def __init__(self, leaves: int, numel: int, device: str = DEVICE) -> None:
        super().__init__()
        self.leaves = nn.ParameterList([nn.Parameter(torch.zeros(numel, device=device)) for _ in range(leaves)])
        self.step = _RANGE // leaves
        self.note: Callable[[], object] = bool

    @torch.no_grad()
    def fill(self, version: int) -> None:
        """Give all leaves the values of a version, in place."""
        for number, leaf in enumerate(self.leaves):
            leaf.fill_(number * self.step + version)

    @torch.no_grad()
    def forward(self, whole: bool = True) -> Tensor:
        self.note()
        if not whole:
            first, last = self.leaves[0][0], self.leaves[-1][-1] - (len(self.leaves) - 1) * self.step
            return torch.stack((torch.minimum(first, last), torch.maximum(first, last)))
        found = torch.stack([torch.stack(torch.aminmax(leaf)) for leaf in self.leaves])
        found -= torch.arange(len(found), device=found.device, dtype=found.dtype).unsqueeze(1) * self.step
        return torch.stack((found[:, 0].min(), found[:, 1].max()))


class Follower:
    """A worker with a module that is bound to a channel."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        torch.zeros(1, device=DEVICE)

    def bind(self, handle: str, leaves: int, numel: int) -> None:
        """Follow a channel with a new module."""
        import shmsync

        self._module = Leaves(leaves, numel)
        self._subscriber = shmsync.Subscriber(handle)
        self._binding = self._subscriber.bind(self._module)

    def look(self) -> tuple[int, str, float, float]:
        """The newest version, how it is bound, and what a forward found in all elements."""
        self._subscriber.refresh()
        low, high = self._module().tolist()
        return self._binding.version, self._binding.mode, low, high

    def await_version(self, version: int) -> tuple[float, float, int]:
        """Run small forwards until one has used this version: what it found, and when it ended (monotonic, ns)."""
        deadline = time.monotonic() + 30
        while True:
            seen = self._module(False)
            if self._binding.version >= version:
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"Expected version {version}, got {self._binding.version} within 30 s")
            torch.cuda.synchronize()
        low, high = seen.tolist()
        return low, high, time.monotonic_ns()

    def watch(self, seconds: float) -> tuple[int, int]:
        """Forwards over all elements for so long: how many, and how many of them saw anything but one version, which
        is the one that they are said to have used."""
        versions: list[int] = []
        results = []
        self._module.note = lambda: versions.append(self._binding.version)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            results += [self._module() for _ in range(4)]
            torch.cuda.synchronize()
        self._module.note = bool
        pairs = torch.stack(results).tolist()
        mixed = sum(not version == low == high for version, (low, high) in zip(versions, pairs, strict=True))
        backwards = sum(later < earlier for earlier, later in zip(versions, versions[1:], strict=False))
        return len(pairs), mixed + backwards

    def unbind(self) -> None:
        """Leave the channel and give the memory back."""
        self._subscriber.close()
        del self._module, self._binding, self._subscriber
        torch.cuda.empty_cache()

    def close(self) -> None:
        """As unbind, if that is still to be done."""
        if hasattr(self, "_subscriber"):
            self.unbind()


class Receiver:
    """A worker that gets its weights as tensors through torch.multiprocessing, torch's own CUDA IPC."""

    def __init__(self, queue: Any) -> None:
        torch.set_num_threads(1)
        torch.zeros(1, device=DEVICE)
        self._queue = queue

    def prepare(self, leaves: int, numel: int) -> None:
        """Make the module."""
        self._module = Leaves(leaves, numel)

    @torch.no_grad()
    def take(self, flat: bool) -> tuple[float, float, int]:
        """Receive one version, copy it into the parameters, and run a small forward; as Follower.await_version."""
        received = self._queue.get(timeout=30)
        leaves = list(self._module.leaves)
        tensors = received.split([leaf.numel() for leaf in leaves]) if flat else received
        torch._foreach_copy_([leaf.data for leaf in leaves], list(tensors))
        low, high = self._module(False).tolist()
        return low, high, time.monotonic_ns()

    def look(self) -> tuple[float, float]:
        """What a forward finds in all elements."""
        low, high = self._module().tolist()
        return low, high

    def close(self) -> None:
        """Give the memory back."""
        self.__dict__.clear()
        torch.cuda.empty_cache()
