"""The trainer process of one rival: owns the weights, starts the workers, pushes, and checks what has arrived."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from . import memory
from .board import Board
from .counting import counted
from .policy import ProbePolicy, value_of
from .rivals.base import Rival
from .workloads import ALL


class WrongWeights(RuntimeError):
    """A worker does not have the weights that were pushed."""


class Host:
    """Served by a child process. Its methods answer with seconds, bytes and counts."""

    def __init__(self, make_rival: type[Rival], workload: str, workers: int) -> None:
        self._workload = ALL[workload]
        self.rival = make_rival(self._workload, workers)
        self._board = Board(workers)
        self._version = 0
        self.rival.prepare()
        # Forked before this process touches the weights or starts a thread.
        self.workers = [self.rival.start_worker(index, self._board) for index in range(workers)]
        self._random = random.Random(0)

    def start(self) -> int:
        """Connect the workers. Returns this process's id."""
        policy = ProbePolicy(self._workload)
        policy.fill(0)
        self._policy = policy
        self._before = memory.usage()
        for worker in self.workers:
            worker.send("join")
        self.rival.connect(policy)
        self._receive_all()
        self.push()
        return self.rival.slots()

    # --- what is measured

    def push(self) -> float:
        """Push the next version to workers that wait, and check it. Seconds until the trainer may go on."""
        self._fill_next()
        begin = time.perf_counter()
        self.rival.send()
        seconds = time.perf_counter() - begin
        self.check()
        self.rival.settle()
        return seconds

    def push_busy(self, pushes: int) -> list[tuple[float, float]]:
        """Push to workers that run forwards: seconds until the trainer may go on, and until the last worker has ended
        its first forward on the new version."""
        with self._busy():
            samples = [self._push_one_busy() for _ in range(pushes)]
        self.check()
        return samples

    def push_steadily(self, seconds: float) -> dict[str, int]:
        """Push all the time while the workers run forwards: pushes, forwards, and forwards that saw two versions."""
        with self._busy():
            forwards, mixed, pushes = self._board.forwards(), self._board.mixed(), 0
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                self._fill_next()
                self.rival.send()
                pushes += 1
            counts = {
                "pushes": pushes,
                "forwards": int((self._board.forwards() - forwards).sum()),
                "mixed": int((self._board.mixed() - mixed).sum()),
            }
        self.check()
        return counts

    def messages(self, doubt: bool = False) -> dict[str, float] | None:
        """Messages of one push, and their bytes; None if this rival's can't be counted here. ``doubt``: as if no worker
        had answered the push before."""
        if not self.rival.countable:
            return None
        if doubt:
            self.rival.doubt()
        self._fill_next()
        with counted() as counter:
            self.rival.send()
        self.check()
        return {"messages": counter.messages, "nbytes": counter.nbytes}

    def memory(self) -> dict[str, Any]:
        """What synchronisation has cost the trainer, and policy and synchronisation each worker."""
        for worker in self.workers:
            worker.send("memory")
        return {"trainer": memory.grown(self._before), "workers": self._receive_all()}

    def check(self) -> None:
        """Every worker's next forward must find the pushed version in every element. Raises WrongWeights."""
        for worker in self.workers:
            worker.send("forward")
        expected = float(value_of(self._version))
        found = self._receive_all()
        if any(pair != (expected, expected) for pair in found):
            raise WrongWeights(
                f"Expected version value {expected} in all workers of {self.rival.title!r} after push {self._version}, "
                f"got (least, greatest) {found}"
            )

    def close(self) -> None:
        """End the workers, then what this process has."""
        self._board.set_running(False)
        self.rival.finish()
        for worker in self.workers:
            worker.end()
        self.rival.close()

    # --- how

    def _fill_next(self) -> None:
        self._version += 1
        self._policy.fill(self._version)

    @contextmanager
    def _busy(self) -> Iterator[None]:
        self._board.set_running(True)
        forwards = self._board.forwards()
        for worker in self.workers:
            worker.send("loop")
        try:
            self._board.wait_forwards(forwards, 2)
            yield
        finally:
            self._board.set_running(False)
            self._receive_all()

    def _push_one_busy(self) -> tuple[float, float]:
        self._fill_next()
        time.sleep(self._random.uniform(0.0, 0.02))  # not in step with the workers' forwards
        begin = time.monotonic_ns()
        self.rival.send()
        pushed = time.monotonic_ns()
        seen = self._board.wait_seen(value_of(self._version))
        return (pushed - begin) / 1e9, (seen - begin) / 1e9

    def _receive_all(self) -> list[Any]:
        return [worker.receive() for worker in self.workers]
