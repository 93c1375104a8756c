"""Several models under one version: schemes that share one channel, and are sent as one."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..errors import ShmSyncError

# Where torchrl's collectors send one model after the other.
_SENDING = ("_weight_update_impl", "update_policy_weights_")
Push = Callable[[dict[str, Any], Any, bool], None]


class _Call(threading.local):
    """What a thread's call of the collector has brought so far; None outside of one."""

    sent: dict[str, Any] | None = None
    worker_ids: Any = None


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
        self._call = _Call()

    def add_source(self, name: str, source: Any) -> dict[str, Any] | None:
        """The weights of one model to begin with; those of all of them, when the last has come."""
        self._sources[name] = source
        return dict(self._sources) if len(self._sources) == len(self.names) else None

    def send(self, name: str, weights: Any, worker_ids: Any, push: Push) -> None:
        """Push one model's weights: now, or with the others of this call of the collector."""
        call = self._call
        if call.sent is None:
            push({name: weights}, worker_ids, True)
            return
        call.sent[name], call.worker_ids = weights, worker_ids

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
        call = self._call
        sent: dict[str, Any] = {}
        call.sent = sent
        try:
            yield
        finally:
            call.sent = None
        if sent:
            push(sent, call.worker_ids, len(sent) < len(self.names))

    def __getstate__(self) -> dict[str, Any]:
        return {"names": self.names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.names = state["names"]
        self._begin()
