"""The interface of torchrl's WeightUpdaterBase, provided here so that the updater works without torchrl."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from tensordict import TensorDictBase

from ..errors import ShmSyncError


class UpdaterBase:
    """Collector registration, post hooks, and the extension points that subclasses override."""

    def __init__(self) -> None:
        self._collector_ref: weakref.ref[Any] | None = None
        self._hooks: list[Callable[[], Any]] = []

    @property
    def collector(self) -> Any:
        """The registered collector, or None if there is none or it is out of scope."""
        return self._collector_ref() if self._collector_ref is not None else None

    @property
    def collectors(self) -> list[Any] | None:
        """The registered collector in a list, or None."""
        return None if self._collector_ref is None else [self.collector]

    def register_collector(self, collector: Any) -> None:
        """Register the collector that this updater serves; another one is refused with ShmSyncError."""
        known = self.collector
        if known is not None and known is not collector:
            raise ShmSyncError(
                f"This updater serves another collector already ({type(known).__qualname__}); make a new one"
            )
        self._collector_ref = weakref.ref(collector)

    @property
    def post_hooks(self) -> list[Callable[[], Any]]:
        """The hooks that run after every push, in their order."""
        return self._hooks

    def register_post_hook(self, hook: Callable[[], Any]) -> None:
        """Run `hook()` after every push."""
        self._hooks.append(hook)

    def increment_version(self) -> None:
        """As torchrl's base class: hand it to the registered collector, where that counts versions."""
        increment = getattr(self.collector, "increment_version", None)
        if increment is not None:
            increment()

    def _skip_update(self, worker_id: int) -> bool:
        """Whether to leave a worker out of a push; subclasses override it."""
        return False

    def _maybe_map_weights(self, server_weights: Any) -> Any:
        """Transform the weights before they are published; subclasses override it."""
        return server_weights

    @staticmethod
    def _is_empty(weights: Any) -> bool:
        return weights is None or (isinstance(weights, TensorDictBase) and weights.is_empty())
