"""Frames per second of a real RPCCollector whose policy is pushed to after every batch."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
import warnings
from functools import partial
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import nn

from .processes import die_with_parent, free_port

WORKERS = 2
FRAMES_PER_BATCH = 400
HIDDEN = 1024  # 4 MB
UPDATERS = ("shmsync", "shmsync-memory", "torchrl-updater", "torchrl-rpc-scheme")


class Actor(nn.Module):
    """An MLP of 4 MB whose output also tells which push its weights come from."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Linear(4, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 2))
        )
        self.marker = nn.Parameter(torch.zeros(1))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Action and marker."""
        return self.net(observation), self.marker.expand(*observation.shape[:-1], 1).clone()


class StaleBatch(RuntimeError):
    """A batch was collected with other weights than the ones pushed before it."""


class CollectorHost:
    """Served by a child process: a collector with one of `UPDATERS`."""

    def __init__(self, updater: str) -> None:
        self._updater = updater
        self._pushed = 0

    def start(self) -> int:
        """Start collector and workers; the first batch."""
        torch.set_num_threads(1)
        os.environ.update(GLOO_SOCKET_IFNAME="lo", TP_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
        warnings.simplefilter("ignore")
        policy = TensorDictModule(Actor(), in_keys=["observation"], out_keys=["action", "marker"])
        self._policy, self._collector = policy, _collector(policy, self._updater)
        self._batches = iter(self._collector)
        self.collect(1)
        return 0

    def collect(self, batches: int) -> float:
        """Batches, each followed by a push: frames per second. Raises StaleBatch."""
        begin = time.perf_counter()
        frames = 0
        for data in itertools.islice(self._batches, batches):
            frames += data.numel()
            if not bool((data["marker"] == self._pushed).all()):
                raise StaleBatch(f"Expected a batch of push {self._pushed}, got {data['marker'].unique().tolist()}")
            self._push()
        return frames / (time.perf_counter() - begin)

    def _push(self) -> None:
        self._pushed += 1
        with torch.no_grad():
            for parameter in self._policy.parameters():
                parameter.mul_(0.999)
            self._policy.module.marker.fill_(self._pushed)
        if self._updater == "torchrl-rpc-scheme":
            self._collector.update_policy_weights_()
        else:
            self._collector.weight_updater.push_weights()

    def close(self) -> None:
        """End the workers."""
        end(self._collector)


def end(collector: Any) -> None:
    """End a collector, and the workers that it leaves."""
    try:
        collector.shutdown()
    finally:
        for child in multiprocessing.active_children():
            child.kill()


def _collector(policy: nn.Module, updater: str) -> Any:
    from torchrl.collectors.distributed import RPCCollector

    collector = RPCCollector(
        [make_env] * WORKERS,
        policy,
        frames_per_batch=FRAMES_PER_BATCH,
        total_frames=1 << 40,
        sync=True,
        launcher="mp",
        tcp_port=free_port(),
        weight_updater=_updater(updater),
    )
    if updater == "torchrl-updater":  # nobody else does
        collector.weight_updater.collector_rrefs = collector.collector_rrefs
        collector.weight_updater.policy_weights = collector.policy_weights
    return collector


def _updater(name: str) -> Any:
    if name == "torchrl-rpc-scheme":
        return None  # torchrl's default
    if name == "torchrl-updater":
        from torchrl.collectors import Collector
        from torchrl.collectors.distributed import RPCWeightUpdater as Theirs

        return lambda: Theirs(None, Collector, None, None, WORKERS)
    from shmsync import RPCWeightUpdater

    return partial(RPCWeightUpdater, notify="memory") if name == "shmsync-memory" else RPCWeightUpdater


def make_env() -> Any:
    """In a worker: without gymnasium, and cheap, so that weights matter."""
    die_with_parent()
    torch.set_num_threads(1)
    from .env import Pole

    return Pole()
