"""gloo broadcast: torch.distributed, one flat buffer to all workers over loopback.

Favourable to the rival: a worker's parameters are views of the buffer that it receives into, so nothing is copied
there. A barrier confirms; a word at the head of the buffer tells a push from the end.
"""

from __future__ import annotations

import contextlib
import threading

import torch
import torch.distributed as dist
from torch import Tensor

from .. import rpcnet
from ..policy import ProbePolicy
from ..standin import StandIn
from .base import Rival

_HEAD = 16  # floats, so that the leaves are aligned to 64 bytes
_PUSH, _END = 1.0, 2.0


class GlooBroadcast(Rival):
    """``torch.distributed.broadcast`` of everything in one tensor."""

    title = "gloo broadcast"

    @classmethod
    def footprint(cls, workers: int) -> int:
        return 2 + 2 * workers

    def prepare(self) -> None:
        self._meeting = rpcnet.Meeting(self.workers)

    def connect(self, policy: ProbePolicy) -> None:
        self._meeting.start_group(0)
        self._leaves = list(policy.leaves())
        self._flat, self._views = self._buffer()

    def send(self) -> None:
        torch._foreach_copy_(self._views, self._leaves)
        self._flat[0] = _PUSH
        dist.broadcast(self._flat, 0)
        dist.barrier()

    def finish(self) -> None:
        self._flat[0] = _END
        dist.broadcast(self._flat, 0)

    def join(self, stand_in: StandIn) -> None:
        self._meeting.start_group(stand_in.worker_idx + 1)
        self._flat, views = self._buffer()
        torch._foreach_copy_(views, list(stand_in.policy.leaves()))
        for parameter, view in zip(stand_in.policy.parameters(), views, strict=True):
            parameter.data = view
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self) -> None:
        # The end may come as a closed connection, from another worker that heard of it first.
        with contextlib.suppress(RuntimeError):
            while True:
                dist.broadcast(self._flat, 0)
                if self._flat[0] == _END:
                    return
                dist.barrier()

    def _buffer(self) -> tuple[Tensor, list[Tensor]]:
        sizes = [torch.Size(shape).numel() for shape in self.workload.shapes]
        flat = torch.zeros(_HEAD + sum(sizes))
        pieces = flat[_HEAD:].split(sizes)
        return flat, [piece.view(shape) for piece, shape in zip(pieces, self.workload.shapes, strict=True)]
