"""Memory of one process, from /proc: private and shared, without what it shares by having been forked."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

Usage = dict[str, int]


def usage() -> Usage:
    """Bytes of this process: ``anon`` (its own), ``shmem`` (shared memory that it has touched), ``pss`` and
    ``pss_shmem`` (with shared pages divided among those who map them).

    Contract: collects garbage and gives free heap back to the system first.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = table("/proc/self/status")
    rollup = table("/proc/self/smaps_rollup")
    return {
        "anon": status["RssAnon"],
        "shmem": status["RssShmem"],
        "pss": rollup["Pss"],
        "pss_shmem": rollup.get("Pss_Shmem", 0),
    }


def grown(before: Usage) -> Usage:
    """How much each of these has grown since `before`."""
    now = usage()
    return {key: now[key] - before[key] for key in now}


def table(path: str) -> dict[str, int]:
    """The lines of a file in /proc that are in kB, in bytes."""
    lines = (line.split() for line in Path(path).read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[2:] == ["kB"]}


def available_nbytes() -> int:
    """What the system could give without swapping."""
    return table("/proc/meminfo")["MemAvailable"]
