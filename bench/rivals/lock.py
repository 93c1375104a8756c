"""A module in shared memory under a plain lock, as sample-factory does it.

The trainer writes the shared module under the lock and raises a version word. Before a forward a worker compares the
word with its own and, if it differs, copies the weights into its policy, under the same lock.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch

from ..policy import ProbePolicy
from ..standin import StandIn
from .base import Rival


class SharedUnderLock(Rival):
    """Workers copy at their next forward, one after the other."""

    title = "shared module under a lock"
    confirms = False

    @classmethod
    def footprint(cls, workers: int) -> int:
        return 2 + workers

    def prepare(self) -> None:
        context = multiprocessing.get_context("fork")
        self._lock = context.Lock()
        self._version = context.Value("q", 0, lock=False)
        self._shared = [torch.empty(shape).share_memory_() for shape in self.workload.shapes]

    def connect(self, policy: ProbePolicy) -> None:
        self._leaves = list(policy.leaves())

    def send(self) -> None:
        with self._lock:
            torch._foreach_copy_(self._shared, self._leaves)
            self._version.value += 1

    def join(self, stand_in: StandIn) -> None:
        self._own = list(stand_in.policy.leaves())
        self._seen = 0
        stand_in._wrapped_policy_maybe_compiled = self._looking_first(stand_in.policy)

    def _looking_first(self, policy: Callable[..., Any]) -> Callable[..., Any]:
        def forward(x: Any) -> Any:
            if self._version.value != self._seen:
                with self._lock:
                    self._seen = self._version.value
                    torch._foreach_copy_(self._own, self._shared)
            return policy(x)

        return forward
