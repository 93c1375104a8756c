"""memmove with streaming stores, in a process of its own: ``python -m bench.streaming NBYTES THREADS``.

glibc chooses them by size, from a threshold that on large caches lies at hundreds of megabytes, and reads that only
when a process starts. Above its threshold it interleaves four pages, the fastest plain copy known here. Each line on
stdin (the number of buffers to rotate over) is answered by one on stdout (seconds, and 1 if the bytes are right).
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from .populated import populated

_THRESHOLD = 1 << 20
_ROOT = Path(__file__).resolve().parents[1]
_PIECE = 4096


class Memmove:
    """memmove split by bytes over a pool of threads, the caller among them. ctypes lets go of the GIL."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(max(1, threads - 1))

    def __call__(self, destination: int, source: int, nbytes: int) -> None:
        share = -(-nbytes // (self._threads * _PIECE)) * _PIECE
        starts = range(0, nbytes, share)
        waiting = [
            self._pool.submit(ctypes.memmove, destination + at, source + at, min(share, nbytes - at))
            for at in starts[1:]
        ]
        ctypes.memmove(destination, source, min(share, nbytes))
        for future in waiting:
            future.result()


class Streaming:
    """The process, seen from the one that measures."""

    def __init__(self, nbytes: int, threads: int) -> None:
        tunable = f"glibc.cpu.x86_non_temporal_threshold={_THRESHOLD}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.streaming", str(nbytes), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            env={**os.environ, "GLIBC_TUNABLES": tunable},
        )

    def copy(self, buffers: int) -> float:
        """Seconds of one copy. Raises RuntimeError if the process has ended or the bytes are wrong."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{buffers}\n")
        self._process.stdin.flush()
        seconds, right = (self._process.stdout.readline() or "0 0").split()
        if right != "1":
            raise RuntimeError(f"Expected the copied bytes from the streaming process, pid {self._process.pid}")
        return float(seconds)

    def close(self) -> None:
        """End it."""
        self._process.communicate(timeout=10)


def _main(nbytes: int, threads: int) -> None:
    source = np.empty(nbytes, np.uint8)
    made: list[np.ndarray] = []
    move: Callable[[int, int, int], None] = Memmove(threads)
    for turn, line in enumerate(sys.stdin, start=1):
        while len(made) < int(line):
            made.append(np.frombuffer(populated(nbytes), np.uint8)[:nbytes])
        destination = made[turn % int(line)]
        source.fill(turn % 251)
        begin = time.perf_counter()
        move(destination.ctypes.data, source.ctypes.data, nbytes)
        seconds = time.perf_counter() - begin
        print(seconds, int(np.array_equal(destination, source)), flush=True)


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]))
