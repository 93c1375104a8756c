"""One way of bringing weights from a trainer to its workers, behind one small adapter."""

from __future__ import annotations

from typing import Any

from ..board import Board
from ..policy import ProbePolicy
from ..processes import Child
from ..standin import StandIn
from ..worker import Worker
from ..workloads import Workload


class Rival:
    """An adapter. The host calls ``prepare``, then starts workers, then ``connect`` while each worker runs ``join``.

    ``title``: for tables. ``confirms``: whether `send` returns only when every idle worker has the weights (otherwise
    the trainer goes on sooner, and workers look for news before a forward). ``countable``: whether the bytes it sends
    are visible to ``bench.counting``.
    """

    title = ""
    confirms = True
    countable = True

    def __init__(self, workload: Workload, workers: int) -> None:
        self.workload, self.workers = workload, workers

    @classmethod
    def unavailable(cls) -> str | None:
        """Why it can't run here, or None."""
        return None

    @classmethod
    def footprint(cls, workers: int) -> int:
        """Memory it needs at the most, in multiples of the weights."""
        return 1 + 2 * workers

    # --- in the host

    def prepare(self) -> None:
        """Make what workers inherit. Contract: starts no thread, touches no weights."""

    def start_worker(self, index: int, board: Board) -> Any:
        """A process that serves a Worker."""
        return Child(f"{self.title} worker {index}", Worker, self, self.workload, index, board)

    def connect(self, policy: ProbePolicy) -> None:
        """Set up everything up to the first push. ``policy`` is the trainer's; later pushes send what it holds then."""
        raise NotImplementedError

    def send(self) -> None:
        """Push the policy's weights to all workers. This is what is timed."""
        raise NotImplementedError

    def settle(self) -> None:
        """After a push was measured: wait for what it leaves its workers to do, which is nobody else's to bear."""

    def doubt(self) -> None:
        """Let the next push send what it sends to workers that do not answer by themselves."""

    def slots(self) -> int:
        """Buffers that pushes rotate over; 1 where they write in place."""
        return 1

    def finish(self) -> None:
        """Before the workers end."""

    def close(self) -> None:
        """After the workers have ended."""

    # --- in a worker

    def join(self, stand_in: StandIn) -> None:
        """Meet `connect`."""
        raise NotImplementedError

    def leave(self) -> None:
        """Before the worker's end."""
