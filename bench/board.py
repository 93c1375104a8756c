"""The board: a few shared words by which busy workers say what they have seen, without a message.

Words are int64 in anonymous shared memory, or, for workers that are not forked, in a memfd that they open by path.
Each worker writes only its own line; the host writes the first.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable

import numpy as np

_WORDS = 8
_RUNNING = 0  # in line 0
_SEEN, _SEEN_NS, _FORWARDS, _MIXED = range(4)  # in a worker's line


class Board:
    """``workers`` lines; ``path`` opens the board of another process."""

    def __init__(self, workers: int, path: str | None = None) -> None:
        nbytes = (workers + 1) * _WORDS * 8
        if path is None:
            self._fd = os.memfd_create("bench-board")
            os.ftruncate(self._fd, nbytes)
        else:
            self._fd = os.open(path, os.O_RDWR)
        self.path = path or f"/proc/{os.getpid()}/fd/{self._fd}"
        self.workers = workers
        self._words = np.frombuffer(mmap.mmap(self._fd, nbytes), np.int64).reshape(workers + 1, _WORDS)

    # --- the host's side

    def set_running(self, running: bool) -> None:
        """Whether workers go on with their loop of forwards."""
        self._words[0, _RUNNING] = running

    def forwards(self) -> np.ndarray:
        """Forwards done, by worker."""
        return self._words[1:, _FORWARDS].copy()

    def mixed(self) -> np.ndarray:
        """Forwards that saw more than one version, by worker."""
        return self._words[1:, _MIXED].copy()

    def wait_forwards(self, since: np.ndarray, count: int, timeout: float = 60.0) -> None:
        """Until every worker has done `count` more forwards than `since`."""

        def done() -> bool:
            return bool((self._words[1:, _FORWARDS] >= since + count).all())

        self._wait(done, timeout, f"{count} forwards")

    def wait_seen(self, value: int, timeout: float = 60.0) -> int:
        """Until every worker has done a forward on `value`; when the last of them ended its first, in monotonic ns."""

        def done() -> bool:
            return bool((self._words[1:, _SEEN] == value).all())

        self._wait(done, timeout, f"a forward on version {value}")
        return int(self._words[1:, _SEEN_NS].max())

    def _wait(self, done: Callable[[], bool], timeout: float, what: str) -> None:
        deadline = time.monotonic() + timeout
        while not done():
            if time.monotonic() > deadline:
                seen, forwards = self._words[1:, _SEEN].tolist(), self._words[1:, _FORWARDS].tolist()
                raise TimeoutError(f"Expected {what} within {timeout} s; workers saw {seen} in {forwards} forwards")
            time.sleep(1e-4)

    # --- a worker's side

    def running(self) -> bool:
        """Whether to go on."""
        return bool(self._words[0, _RUNNING])

    def note(self, worker: int, low: float, high: float) -> None:
        """A forward has ended that found versions from `low` to `high`."""
        now = time.monotonic_ns()
        line = self._words[worker + 1]
        if low == high and line[_SEEN] != low:
            line[_SEEN_NS] = now
            line[_SEEN] = int(low)
        line[_MIXED] += low != high
        line[_FORWARDS] += 1
