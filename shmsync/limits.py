"""How much shared memory may still grow, asked before it grows.

Beyond a cgroup's limit the kernel answers posix_fallocate with the OOM killer, not with ENOSPC. So the need is
compared with every limit first, and a clear error is raised while it is still harmless.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

from .errors import OutOfSharedMemory

_UNLIMITED = 1 << 60


def check_growth(nbytes: int, what: str) -> None:
    """Raise OutOfSharedMemory if `nbytes` more of shared memory would exceed a limit of this process.

    Contract: reads /proc and /sys only; changes nothing.
    """
    for name, room in _rooms():
        if nbytes > room:
            raise OutOfSharedMemory(
                f"{what} needs {nbytes} bytes, but {name} leaves {max(room, 0)}; "
                "raise the limit, or use fewer slots (max_slots=) or a smaller dtype (dtype=)"
            )


def least_room() -> tuple[int, str]:
    """How many bytes of shared memory may still come, and which limit says so."""
    name, room = min(_rooms(), key=lambda pair: pair[1])
    return max(room, 0), name


def check_file_size(nbytes: int, what: str) -> None:
    """Raise OutOfSharedMemory if a segment of `nbytes` (sparse) exceeds RLIMIT_FSIZE."""
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if soft != resource.RLIM_INFINITY and nbytes > soft:
        raise OutOfSharedMemory(
            f"{what} spans {nbytes} bytes (sparse), but RLIMIT_FSIZE allows {soft}; "
            "raise it (ulimit -f unlimited), or set max_slots= or max_subscribers= lower"
        )


def check_end(end: int, what: str) -> None:
    """Raise OutOfSharedMemory if RLIMIT_FSIZE, which may be lower now, ends before byte `end` of a segment."""
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if soft != resource.RLIM_INFINITY and end > soft:
        raise OutOfSharedMemory(
            f"{what} ends at byte {end} of its segment, but RLIMIT_FSIZE allows {soft} bytes now; raise it "
            "(ulimit -f unlimited)"
        )


def _rooms() -> Iterator[tuple[str, int]]:
    yield "MemAvailable", _meminfo("MemAvailable")
    for folder in _cgroups():
        limit = _number(folder / "memory.max", folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current", folder / "memory.usage_in_bytes")
        if limit is not None and used is not None and limit < _UNLIMITED:
            yield f"cgroup {folder}", limit - used + _reclaimable(folder)


def _meminfo(field: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return _UNLIMITED


def _cgroups() -> Iterator[Path]:
    """The folder of this process's memory cgroup and of each of its ancestors, in either version."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = Path("/sys/fs/cgroup")
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
        else:
            continue
        folder = root / path.lstrip("/")
        yield from (f for f in (folder, *folder.parents) if f == root or root in f.parents)


def _number(*files: Path) -> int | None:
    for file in files:
        try:
            return int(file.read_text())
        except (OSError, ValueError):  # absent in this cgroup version, or "max"
            continue
    return None


def _reclaimable(folder: Path) -> int:
    """Page cache that the kernel gives up before it kills anybody; shared memory is not part of it."""
    try:
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return sum(int(stat.get(field, 0)) for field in ("inactive_file", "active_file"))
