"""A publisher and plain subscribers, without RPC: what a publish costs whatever their number, and memory."""

from __future__ import annotations

import time
from typing import Any

import torch

from . import memory
from .copies import timed
from .host import WrongWeights
from .policy import ProbePolicy, value_of
from .processes import Child
from .rivals.shmsync_updater import sweep_seconds
from .workloads import ALL, Workload

_WITH_WEIGHTS = 8


class PlainWorker:
    """Served by a child process: a policy bound to the channel."""

    def __init__(self, workload: Workload, with_weights: bool) -> None:
        torch.set_num_threads(1)
        self._workload, self._with_weights = workload, with_weights
        _bind_something_small()
        self._before = memory.usage()

    def attach(self, handle: str) -> None:
        """Bind a policy that had weights of its own."""
        from shmsync import Subscriber

        self._policy = ProbePolicy(self._workload)
        if self._with_weights:
            self._policy.fill(0)
        self._subscriber = Subscriber(handle)
        self._binding = self._subscriber.bind(self._policy)

    def forward(self) -> tuple[float, float]:
        """One forward; it takes the news."""
        low, high = self._policy(None).tolist()
        return low, high

    def memory(self) -> memory.Usage:
        """What policy and subscriber have cost this process."""
        return memory.grown(self._before)

    def close(self) -> None:
        """Leave the channel."""
        self._subscriber.close()


class PlainPublisher:
    """Served by a child process: the publisher of `subscribers` plain workers."""

    def __init__(self, workload: str, subscribers: int) -> None:
        self._workload = ALL[workload]
        self._workers = [
            # Weights that were never written have no memory: it takes long to fill those of many workers.
            Child(f"subscriber {n}", PlainWorker, self._workload, n < _WITH_WEIGHTS)
            for n in range(subscribers)
        ]
        self._version = 0

    def start(self) -> int:
        """Publish once and attach everybody."""
        from shmsync import Publisher

        self._policy = ProbePolicy(self._workload)
        self._policy.fill(0)
        _bind_something_small()
        self._before = memory.usage()
        self._publisher = Publisher(self._policy)
        self._publisher.publish()
        for worker in self._workers:
            worker.send("attach", str(self._publisher.handle))
        self._receive_all()
        self.publish()
        return self.slots()

    def publish(self) -> float:
        """Seconds of one publish; afterwards all subscribers run a forward, which must find it."""
        self._version += 1
        self._policy.fill(self._version)
        seconds = timed(self._publisher.publish)
        for worker in self._workers:
            worker.send("forward")
        expected = float(value_of(self._version))
        if any(pair != (expected, expected) for pair in self._receive_all()):
            raise WrongWeights(f"Expected version value {expected} in all subscribers")
        time.sleep(sweep_seconds(len(self._workers)))
        return seconds

    def memory(self) -> dict[str, Any]:
        """What the publisher has cost this process, its slots included, and policy and subscriber each worker."""
        trainer = memory.grown(self._before)
        for worker in self._workers:
            worker.send("memory")
        return {"trainer": trainer, "workers": self._receive_all(), "slots_nbytes": self._publisher.stats()["nbytes"]}

    def slots(self) -> int:
        """How many slots it rotates over."""
        return self._publisher.stats()["slots"]

    def close(self) -> None:
        """End the workers, then the channel."""
        for worker in self._workers:
            worker.end()
        self._publisher.close()

    def _receive_all(self) -> list[Any]:
        return [worker.receive() for worker in self._workers]


def _bind_something_small() -> None:
    """So that what a process loads at first use is not taken for the cost of the weights."""
    from shmsync import Publisher, Subscriber

    policy = ProbePolicy(ALL["cartpole"])
    policy.fill(0)
    with Publisher(policy) as publisher, Subscriber(publisher.handle) as subscriber:
        publisher.publish()
        subscriber.bind(policy)
        policy(None)
