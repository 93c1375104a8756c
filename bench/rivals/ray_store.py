"""Ray's object store: the weights are put once, and each actor copies them into its policy.

Favourable to the rival: NumPy arrays, which an actor reads from shared memory without a copy of its own.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..board import Board
from ..policy import ProbePolicy
from ..standin import StandIn
from ..worker import Worker
from ..workloads import Workload
from .base import Rival

_ROOT = str(Path(__file__).resolve().parents[2])


class RayObjectStore(Rival):
    """``ray.put`` of a list of arrays, and a call to each actor with the reference."""

    title = "Ray object store"
    countable = False

    @classmethod
    def unavailable(cls) -> str | None:
        try:
            version("ray")
        except PackageNotFoundError:
            return "not installed (extra bench-ray)"
        return None

    def prepare(self) -> None:
        import ray

        self._actors: list[Any] = []
        size = max(200 << 20, 4 * self.workload.nbytes)
        env = {"PYTHONPATH": os.pathsep.join([_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])}
        ray.init(
            address="local",
            num_cpus=self.workers + 1,
            object_store_memory=size,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            runtime_env={"env_vars": env},
        )

    def start_worker(self, index: int, board: Board) -> Any:
        import ray

        actor = ray.remote(max_concurrency=2)(_Actor).remote(type(self), self.workload, self.workers, index, board.path)
        self._actors.append(actor)
        return _ActorHandle(actor)

    def connect(self, policy: ProbePolicy) -> None:
        self._leaves = list(policy.leaves())

    def send(self) -> None:
        import ray

        put = ray.put([leaf.numpy() for leaf in self._leaves])
        ray.get([actor.take.remote(put) for actor in self._actors])

    def close(self) -> None:
        import ray

        ray.shutdown()

    def join(self, stand_in: StandIn) -> None:
        self._own = list(stand_in.policy.leaves())

    def take(self, arrays: list[Any]) -> None:
        """In an actor: copy what was pushed."""
        torch._foreach_copy_(self._own, [torch.from_numpy(array) for array in arrays])


class _Actor:
    def __init__(self, rival: type[RayObjectStore], workload: Workload, workers: int, index: int, board: str) -> None:
        self._rival = rival(workload, workers)
        self._worker = Worker(self._rival, workload, index, Board(workers, board))

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self._worker, method)(*args)

    def take(self, arrays: list[Any]) -> None:
        self._rival.take(arrays)


class _ActorHandle:
    """An actor with the manners of a Child."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self._open: list[Any] = []

    def send(self, method: str, *args: Any) -> None:
        self._open.append(self.actor.call.remote(method, *args))

    def receive(self, timeout: float = 120.0) -> Any:
        import ray

        return ray.get(self._open.pop(0), timeout=timeout)

    def end(self) -> None:
        import ray

        ray.kill(self.actor)
