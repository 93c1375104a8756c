"""Several models under one version: schemes that share one channel, and are sent as one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..errors import ShmSyncError

# Where torchrl's collectors send one model after the other.
_SENDING = ("_weight_update_impl", "update_policy_weights_")
Push = Callable[[dict[str, Any], Any, bool], None]


class Together:
    """The models of one channel, by the ids that torchrl has for them.

    Contract: pickles with the schemes that refer to it as the names alone.
    """

    def __init__(self, names: Sequence[str]) -> None:
        if len(set(names)) != len(names) or not names:
            raise ShmSyncError(f"Expected model ids, each once, got {list(names)}")
        self.names = tuple(names)
        self._begin()

    def _begin(self) -> None:
        self.owner: Any = None  # the scheme that has the channel
        self.models: dict[str, Any] = {}
        self._sources: dict[str, Any] = {}
        self._sent: dict[str, Any] | None = None
        self._worker_ids: Any = None

    def add_source(self, name: str, source: Any) -> dict[str, Any] | None:
        """The weights of one model to begin with; those of all of them, when the last has come."""
        self._sources[name] = source
        return dict(self._sources) if len(self._sources) == len(self.names) else None

    def send(self, name: str, weights: Any, worker_ids: Any, push: Push) -> None:
        """Push one model's weights: now, or with the others of this call of the collector."""
        if self._sent is None:
            push({name: weights}, worker_ids, True)
            return
        self._sent[name], self._worker_ids = weights, worker_ids

    def watch(self, collector: Any, push: Push) -> None:
        """Let a collector's update of several models be one push."""
        name = next((one for one in _SENDING if hasattr(type(collector), one)), None)
        if name is None or name in vars(collector):
            return
        method, reference = getattr(type(collector), name), weakref.ref(collector)

        def update(*args: Any, **kwargs: Any) -> Any:
            with self._as_one(push):
                return method(reference(), *args, **kwargs)

        vars(collector)[name] = update

    @contextmanager
    def _as_one(self, push: Push) -> Iterator[None]:
        self._sent = {}
        try:
            yield
            sent = self._sent
        finally:
            self._sent = None
        if sent:
            push(sent, self._worker_ids, len(sent) < len(self.names))

    def __getstate__(self) -> dict[str, Any]:
        return {"names": self.names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.names = state["names"]
        self._begin()
