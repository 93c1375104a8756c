"""A worker process of one rival: a stand-in collector, and what the host asks of it."""

from __future__ import annotations

from typing import Any

import torch

from . import memory
from .board import Board
from .policy import ProbePolicy
from .standin import StandIn
from .workloads import Workload


class Worker:
    """Served by a child process. ``rival`` is this process's copy of the host's rival."""

    def __init__(self, rival: Any, workload: Workload, index: int, board: Board) -> None:
        torch.set_num_threads(1)
        self._rival, self._workload, self._index, self._board = rival, workload, index, board
        self._before = memory.usage()

    def join(self) -> None:
        """Make a policy and meet the host's `connect`; afterwards pushes reach this worker by themselves."""
        # Not sooner: on the way to a large comparison not all rivals' workers should hold weights at once.
        policy = ProbePolicy(self._workload)
        policy.fill(0)
        self.stand_in = StandIn(self._index, policy, self._board)
        self._rival.join(self.stand_in)

    def forward(self) -> tuple[float, float]:
        """One forward on what is there now."""
        return self.stand_in.forward()

    def loop(self) -> None:
        """Forwards until the board says stop."""
        self.stand_in.next()

    def memory(self) -> memory.Usage:
        """What the policy and the rival's receiving end have cost this process."""
        return memory.grown(self._before)

    def close(self) -> None:
        """Leave what was joined."""
        self._rival.leave()
