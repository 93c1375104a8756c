"""Weights by RPC, for workers that can't map the channel: what the trainer sends, and what takes it in a worker."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from tensordict import TensorDict, TensorDictBase

from .. import remote
from ..errors import ChannelUnreachable, NothingPublished
from ..handle import Handle
from ..subscriber import Subscriber

_log = logging.getLogger("shmsync")

# (owner, function, arguments, timeout) → a future, or the error that there was at once.
Call = Callable[[Any, Callable[..., Any], "tuple[Any, ...]", float], Any]


# ── In the trainer ──────────────────────────────────────────────────────────────────────────────────────────────────


class Elsewhere(NamedTuple):
    """A worker that can't map the channel: through which RRef it is reached, and who reads the weights for it here."""

    rref: Any
    reader: Subscriber


class NothingToSend:
    """The answer of a worker for which there is nothing yet."""

    nbytes = 0

    def done(self) -> bool:
        return True

    def wait(self) -> tuple[int, int]:
        return 0, 0


class Sending:
    """Weights on their way to a worker."""

    def __init__(self, future: Any, nbytes: int) -> None:
        self._future, self.nbytes = future, nbytes

    def done(self) -> bool:
        return bool(self._future.done())

    def wait(self) -> Any:
        return self._future.wait()


class ByRpc:
    """The workers that can't map the channel, and the way by which they get each version that is addressed to them.

    Contract: what is sent are the bytes of the leased slot, so nothing is copied here but by RPC; one version at a time
    is on its way to a worker.
    """

    def __init__(self, handle: Handle, call: Call) -> None:
        self._handle, self._call = handle, call
        self._workers: dict[int, Elsewhere] = {}
        self._sending: dict[int, Sending] = {}
        self._in_use: dict[int, int] = {}

    def __contains__(self, worker: int) -> bool:
        return worker in self._workers

    @property
    def in_use(self) -> dict[int, int]:
        """By worker, the version that it has said to use; 0 = none yet."""
        return {worker: self._in_use.get(worker, 0) for worker in self._workers}

    def rref_of(self, worker: int) -> Any:
        """Through which RRef a worker is reached; None if it is none of these."""
        return self._workers[worker].rref if worker in self._workers else None

    def admit(self, worker: int, rref: Any, reason: BaseException) -> None:
        """From now on it gets the weights by RPC; the log says so and why."""
        reader = Subscriber(self._handle, worker_id=worker, name=f"worker-{worker} by RPC")
        self._workers[worker] = Elsewhere(rref, reader)
        _log.warning(
            "Worker %d can't map the channel and gets the weights by RPC from now on, all of them at every push, "
            "without a guarantee that a forward sees one version only. %s",
            worker,
            reason,
        )

    def drop(self, worker: int) -> None:
        """It is another object now, which may be able to map the channel."""
        known = self._workers.pop(worker, None)
        self._in_use.pop(worker, None)
        self._sending.pop(worker, None)
        if known is not None:
            known.reader.close()

    def send(self, worker: int, timeout: float) -> Any:
        """The newest version that is addressed to it, after what is still on its way: what will have its answer."""
        deadline = time.monotonic() + timeout
        if worker in self._sending:
            with contextlib.suppress(Exception):  # its own timeout ends it
                self._sending[worker].wait()
        known = self._workers[worker]
        try:
            with known.reader.lease() as lease:
                version, weights = lease.version, lease.weights
                arguments = (known.rref, str(self._handle), worker, version, weights)
                future = self._call(known.rref.owner(), take, arguments, max(deadline - time.monotonic(), 1e-3))
                nbytes = sum(leaf.numel() * leaf.element_size() for leaf in weights.values(True, True))
        except NothingPublished:
            return NothingToSend()
        if isinstance(future, BaseException):
            return future
        self._sending[worker] = Sending(future, nbytes)
        return self._sending[worker]

    def confirmed(self, worker: int, version: int) -> None:
        """It has said that it uses a version."""
        self._in_use[worker] = version

    def close(self) -> None:
        """Nobody gets anything any more."""
        for worker in list(self._workers):
            self.drop(worker)


# ── In a worker ─────────────────────────────────────────────────────────────────────────────────────────────────────


def reachable(handle_text: str, worker_id: int) -> bool:
    """Whether this process can map the channel. What else may be wrong with it shows when that is done."""
    try:
        Subscriber(Handle.parse(handle_text), worker_id=worker_id, listed=False).close()
    except ChannelUnreachable:
        return False
    except Exception:
        return True
    return True


class Taking:
    """Stands where an attachment would: writes the weights that come by RPC into the target, as torchrl does.

    Contract: versions never go back; a forward that runs meanwhile may see parts of two.
    """

    inner: tuple[int, ...] = ()

    def __init__(self, target: Any, subscribe: remote.Subscribe) -> None:
        self.target = target
        self._lock = threading.Lock()
        self._version = 0

    def take(self, version: int, weights: TensorDictBase) -> None:
        """Use these from now on, unless there are newer ones."""
        with self._lock:
            if version > self._version:
                if not weights.is_empty():
                    _write(self.target, weights)
                self._version = version
                tracker = getattr(self.target, "policy_version_tracker", None)
                if hasattr(tracker, "version"):
                    tracker.version = version  # type: ignore[union-attr]

    @property
    def newest(self) -> int:
        """The version in use."""
        return self._version

    def notified(self) -> tuple[int, int]:
        return self._version, self._version

    def listen(self) -> None:
        """There is no bell here."""

    def close(self) -> None:
        """The target keeps what it has."""


def take(
    rref: Any, handle_text: str, worker_id: int, version: int, weights: TensorDictBase
) -> remote.Answer | remote.Failure:
    """RPC entry: the weights of a version, for the object that `rref` owns here."""

    def taken() -> remote.Attachment:
        attached = remote.attach_object(rref.local_value(), handle_text, worker_id, Taking)
        if isinstance(attached, Taking):  # else it maps the channel, and has them
            attached.take(version, weights)
        return attached

    return remote.answer(taken)


def _write(target: Any, weights: TensorDictBase) -> None:
    """To whatever device and dtype the target's own have."""
    update = getattr(target, "update_policy_weights_", None)
    if update is not None:
        update(weights)
    else:
        TensorDict.from_module(remote.policy_of(target)).data.update_(weights)
