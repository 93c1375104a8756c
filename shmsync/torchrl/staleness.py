"""How many versions workers are behind, and what a push does about those that are too far."""

from __future__ import annotations

import logging
import numbers
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from ..errors import LagExceeded, LagTimeout, ShmSyncError
from ..publisher import Publisher
from .report import Lag

_log = logging.getLogger("shmsync")

ON_LAG = ("wait", "warn", "raise")
_LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 50e-6, 1e-3
# Who was in a forward when it was notified, and rests since then, needs to be told again.
_NUDGE_SECONDS, _LONGEST_NUDGE_SECONDS = 0.05, 1.0

Look = Callable[[], "Mapping[int, Behind]"]


class Behind(NamedTuple):
    """One worker: the oldest version that is in use there, by which process, and the newest that is addressed to it.

    ``where``: what to call the process in an error.
    """

    used: int
    addressed: int
    where: str

    @property
    def versions(self) -> int:
        """How many it is behind."""
        return max(0, self.addressed - self.used)

    def __str__(self) -> str:
        return f"{self.where} uses version {self.used}, {self.versions} behind version {self.addressed}"


def measure(publisher: Publisher, confirmed: Mapping[int, int]) -> dict[int, Behind]:
    """Each attached worker, by what its subscribers say on the roster; the slowest of several counts.

    ``confirmed``: the versions in use of workers that have no line there, by their last answers.
    Contract: a look, not a lock.
    """
    found: dict[int, Behind] = {}
    nothing = publisher.first_version - 1
    for line in publisher.subscribers():
        worker = line.worker_id
        if worker is None or worker in confirmed:
            continue
        now = Behind(line.used or nothing, publisher.addressed(worker), f"pid {line.pid}")
        if worker not in found or now.versions > found[worker].versions:
            found[worker] = now
    for worker, used in confirmed.items():
        found[worker] = Behind(used or nothing, publisher.addressed(worker), "its process, which gets weights by RPC,")
    return dict(sorted(found.items()))


def summary(found: Mapping[int, Behind]) -> Lag:
    """Of all workers and of each."""
    lags = {worker: behind.versions for worker, behind in found.items()}
    values = list(lags.values()) or [0]
    return Lag(min(values), sum(values) / len(values), max(values), lags)


def is_awaited(notify: str, max_lag: int | None, on_lag: str) -> bool:
    """Whether pushes wait for workers, which then must take the news when they rest."""
    return notify == "rpc" or (max_lag is not None and on_lag == "wait")


class Staleness:
    """The bound on how far a worker may be behind what is addressed to it.

    ``max_lag``: in versions; None = no bound. ``on_lag``: what happens to a push that finds a worker beyond it. Raises
    ShmSyncError for anything else.
    """

    def __init__(self, max_lag: int | None, on_lag: str) -> None:
        if max_lag is not None and not _is_count(max_lag):
            raise ShmSyncError(f"Expected max_lag as a number of versions from 0 on, or None, got {max_lag!r}")
        if on_lag not in ON_LAG:
            raise ShmSyncError(f"Expected on_lag as one of {ON_LAG}, got {on_lag!r}")
        self.max_lag, self.on_lag = None if max_lag is None else int(max_lag), on_lag
        self._warned: dict[int, int] = {}  # by worker, which version it was told to be behind

    def enforce(
        self, look: Look, nudge: Callable[[Collection[int]], None], workers: Collection[int], deadline: float
    ) -> dict[int, BaseException]:
        """See to it that none of these workers is too far behind, or say which are: their errors.

        ``nudge`` notifies workers once more. ``deadline``: of time.monotonic(), for "wait". With "warn" there are no
        errors, but one line in the log per worker until it has caught up.
        """
        if self.max_lag is None:
            return {}
        late = self._late(look(), workers)
        if late and self.on_lag == "wait":
            late = self._await(look, nudge, workers, deadline)
        if self.on_lag == "warn":
            self._warn(late, workers)
            return {}
        kind = LagTimeout if self.on_lag == "wait" else LagExceeded
        return {worker: kind(f"{behind}; max_lag is {self.max_lag}") for worker, behind in late.items()}

    def _await(
        self, look: Look, nudge: Callable[[Collection[int]], None], workers: Collection[int], deadline: float
    ) -> dict[int, Behind]:
        pause, patience = _LOOK_SECONDS, _NUDGE_SECONDS
        nudging = time.monotonic() + patience
        while (late := self._late(look(), workers)) and (now := time.monotonic()) < deadline:
            if now > nudging:
                nudge(late)
                patience = min(2 * patience, _LONGEST_NUDGE_SECONDS)
                nudging = now + patience
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_LOOK_SECONDS)
        return late

    def _late(self, found: Mapping[int, Behind], workers: Collection[int]) -> dict[int, Behind]:
        assert self.max_lag is not None
        return {w: behind for w, behind in found.items() if w in workers and behind.versions > self.max_lag}

    def _warn(self, late: Mapping[int, Behind], workers: Collection[int]) -> None:
        for worker in set(workers) - set(late):
            self._warned.pop(worker, None)
        for worker, behind in late.items():
            if worker not in self._warned or behind.used >= self._warned[worker]:
                _log.warning("Worker %d: %s; max_lag is %d", worker, behind, self.max_lag)
                self._warned[worker] = behind.addressed


def _is_count(value: Any) -> bool:
    """Numpy's whole numbers are some too."""
    return not isinstance(value, bool) and isinstance(value, numbers.Integral) and int(value) >= 0
