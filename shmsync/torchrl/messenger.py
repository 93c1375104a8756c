"""Notifications: one small RPC to each worker's process, all in parallel, awaited within one timeout."""

from __future__ import annotations

import builtins
import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Any

from torch.distributed import rpc
from torch.distributed.rpc.internal import PythonUDF, serialize

from .. import errors, remote
from ..errors import NotAttached
from ..handle import Handle
from . import collector
from .report import WorkerReport

_TIMED_OUT = "ran for more than set timeout"


class Messenger:
    """Attaches workers at their first message and notifies them from then on.

    ``rref_of(worker)`` gives the RRef of a worker's collector. Contract: the messages carry a channel id and numbers.
    """

    def __init__(self, handle: Handle, rref_of: Callable[[int], Any]) -> None:
        self._handle, self._rref_of = handle, rref_of
        self._attached: set[int] = set()
        self._sizes: dict[int, int] = {}

    def send(self, workers: Iterable[int], version: int, timeout: float) -> dict[int, Any]:
        """Send to all of them without waiting; the futures by worker. What can't be sent is an exception in
        its place."""
        return {worker: self._send(worker, version, timeout) for worker in workers}

    def collect(self, futures: dict[int, Any], version: int, deadline: float) -> dict[int, WorkerReport]:
        """Wait for all of them. A worker that has been started anew is attached again, in the time that is left."""
        reports = {worker: self._result(worker, future) for worker, future in futures.items()}
        lost = [
            w for w, report in reports.items() if isinstance(report.error, NotAttached) and deadline > time.monotonic()
        ]
        for worker, future in self.send(lost, version, deadline - time.monotonic()).items():
            reports[worker] = self._result(worker, future)
        return reports

    def peek(self, futures: dict[int, Any]) -> dict[int, WorkerReport]:
        """What has been answered so far."""
        return {
            worker: self._result(worker, future)
            if isinstance(future, BaseException) or future.done()
            else WorkerReport()
            for worker, future in futures.items()
        }

    def unattached(self, workers: Iterable[int]) -> list[int]:
        """Those that have not confirmed an attachment yet."""
        return [worker for worker in workers if worker not in self._attached]

    def message_nbytes(self, version: int) -> int:
        """Bytes of one notification as RPC pickles it; measured again when the number gets longer."""
        digits = version.bit_length() // 8
        if digits not in self._sizes:
            call = PythonUDF(remote.notify, (self._handle.nonce, 0, version), {})
            self._sizes[digits] = len(serialize(call)[0])
        return self._sizes[digits]

    def detach(self, timeout: float) -> None:
        """Tell the attached workers that the channel ends; those that can't be reached find out by themselves."""
        calls = [(worker, (remote.detach, (self._handle.nonce, worker))) for worker in sorted(self._attached)]
        futures = [self._call(worker, function, arguments, timeout) for worker, (function, arguments) in calls]
        for future in futures:
            if not isinstance(future, BaseException):
                _outcome(future)
        self._attached.clear()

    def _send(self, worker: int, version: int, timeout: float) -> Any:
        if worker in self._attached:
            return self._call(worker, remote.notify, (self._handle.nonce, worker, version), timeout)
        try:
            rref = self._rref_of(worker)
        except Exception as error:
            return error
        return self._call(worker, collector.attach, (rref, str(self._handle), worker), timeout)

    def _call(self, worker: int, function: Callable[..., Any], arguments: tuple[Any, ...], timeout: float) -> Any:
        try:
            # RPC takes 0 for "for ever".
            return rpc.rpc_async(self._rref_of(worker).owner(), function, args=arguments, timeout=max(timeout, 1e-3))
        except Exception as error:  # a dead peer may be refused at once
            return error

    def _result(self, worker: int, future: Any) -> WorkerReport:
        answer = future if isinstance(future, BaseException) else _outcome(future)
        if isinstance(answer, BaseException):
            self._attached.discard(worker)
            return WorkerReport(error=answer)
        self._attached.add(worker)
        return WorkerReport(in_use=answer[0], seen=answer[1])


def _outcome(future: Any) -> Any:
    try:
        answer = future.wait()
    except Exception as error:
        return TimeoutError(str(error)) if _TIMED_OUT in str(error) else error
    return _rebuilt(*answer) if answer and isinstance(answer[0], str) else answer


def _rebuilt(kind: str, text: str) -> Exception:
    """The error that a worker reported, as the class it had there if that can be built from its text."""
    found = getattr(errors, kind, None) or getattr(builtins, kind, None)
    if isinstance(found, type) and issubclass(found, Exception):
        with contextlib.suppress(TypeError):
            return found(text)
    return RuntimeError(f"{kind}: {text}")
