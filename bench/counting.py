"""How many bytes one push sends: by torch RPC, by torch.distributed, and through multiprocessing queues."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed.rpc import api


class Counter:
    """Messages and their bytes, pickled calls and tensors together."""

    def __init__(self) -> None:
        self.messages = self.nbytes = 0

    def add(self, nbytes: int) -> None:
        self.messages += 1
        self.nbytes += nbytes


@contextmanager
def counted() -> Iterator[Counter]:
    """Count what this process sends inside the block. Contract: slows every message down; not for timing."""
    counter = Counter()
    with (
        mock.patch.object(api, "_invoke_rpc_python_udf", _rpc(counter, api._invoke_rpc_python_udf)),
        mock.patch.object(ForkingPickler, "dumps", _dumps(counter, ForkingPickler.dumps)),
        mock.patch.object(dist, "send", _tensor(counter, dist.send)),
        mock.patch.object(dist, "isend", _tensor(counter, dist.isend)),
        mock.patch.object(dist, "broadcast", _broadcast(counter, dist.broadcast)),
    ):
        yield counter


def _rpc(counter: Counter, invoke: Callable[..., Any]) -> Callable[..., Any]:
    def counting(to: Any, pickled: bytes, tensors: Any, *args: Any) -> Any:
        counter.add(len(pickled) + sum(t.numel() * t.element_size() for t in tensors))
        return invoke(to, pickled, tensors, *args)

    return counting


def _dumps(counter: Counter, dumps: Callable[..., Any]) -> Callable[..., Any]:
    def counting(obj: Any, protocol: int | None = None) -> Any:
        data = dumps(obj, protocol)
        counter.add(len(data))
        return data

    return counting


def _tensor(counter: Counter, send: Callable[..., Any]) -> Callable[..., Any]:
    def counting(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        counter.add(tensor.numel() * tensor.element_size())
        return send(tensor, *args, **kwargs)

    return counting


def _broadcast(counter: Counter, broadcast: Callable[..., Any]) -> Callable[..., Any]:
    def counting(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        for _ in range(dist.get_world_size() - 1):
            counter.add(tensor.numel() * tensor.element_size())
        return broadcast(tensor, *args, **kwargs)

    return counting
