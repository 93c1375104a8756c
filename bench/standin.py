"""What stands in a worker for a torchrl collector: the members by which weights reach it, and a loop of forwards.

A real collector needs seconds to start and an environment to run; what is measured here is its weights. The members
do what torchrl 0.14.1's ``Collector`` does, line by line where it matters: how pushed weights are written, and that a
scheme's receiver writes them and then hands them on to ``update_policy_weights_``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensordict import TensorDict

from .board import Board
from .policy import ProbePolicy


class StandIn:
    """A worker's collector. ``next()`` runs forwards until the board says stop."""

    def __init__(self, worker_idx: int, policy: ProbePolicy, board: Board) -> None:
        self.worker_idx, self.policy = worker_idx, policy
        self._board = board
        self._receiver_schemes: dict[str, Any] = {}
        # The attribute in whose place shmsync puts its gate, and which a rollout reads at every step.
        self._wrapped_policy_maybe_compiled: Callable[..., Any] = policy

    @property
    def _wrapped_policy(self) -> Callable[..., Any]:
        return self._wrapped_policy_maybe_compiled

    def forward(self) -> tuple[float, float]:
        """One forward; the least and the greatest version it saw."""
        low, high = self._wrapped_policy_maybe_compiled(None).tolist()
        return low, high

    def next(self) -> None:
        """A batch: forwards, each noted on the board."""
        while self._board.running():
            self._board.note(self.worker_idx, *self.forward())

    def shutdown(self) -> None:
        """Nothing runs here."""

    def get_model(self, model_id: str) -> ProbePolicy:
        """The only model there is."""
        return self.policy

    def update_policy_weights_(
        self, policy_or_weights: Any = None, *, model_id: str | None = None, worker_ids: Any = None
    ) -> None:
        """As ``Collector._maybe_fallback_update``: write into the parameters, whatever runs meanwhile."""
        TensorDict.from_module(self.policy).data.update_(policy_or_weights.data)

    def register_scheme_receiver(self, schemes: dict[str, Any]) -> None:
        """As ``BaseCollector.register_scheme_receiver``."""
        for model_id, scheme in schemes.items():
            if not scheme.initialized_on_receiver:
                scheme.init_on_receiver(model_id=model_id, context=self, worker_idx=self.worker_idx)
            self._receiver_schemes[model_id] = scheme
            if not scheme.synchronized_on_receiver:
                scheme.connect(worker_idx=self.worker_idx)

    def _receive_weights_scheme(self) -> None:
        for scheme in self._receiver_schemes.values():
            scheme.receive()
