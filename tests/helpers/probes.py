"""What the kernel says about this process: descriptors, mappings, memory."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path
from typing import NamedTuple

# A memfd, or a file under its name or, with its publisher, under the one that it had before it was linked.
SEGMENT = re.compile(r"/memfd:shmsync-|/shmsync-[0-9a-f]{32}[.](ctl|data)|/dev/shm/[^ ]*#[0-9]+ [(]deleted[)]")


class Footprint(NamedTuple):
    """Descriptors, mappings of segments, bytes of shared memory behind this process's channels; all mappings, and
    resident private bytes."""

    descriptors: int
    segment_mappings: int
    shared_nbytes: int
    mappings: int
    rss_nbytes: int


def footprint() -> Footprint:
    gc.collect()
    return Footprint(len(descriptors()), len(segment_maps()), shared_nbytes(), len(maps()), rss_nbytes())


def descriptors() -> dict[int, str]:
    """Open descriptor → what it is."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return found


def maps() -> list[str]:
    """The lines of /proc/self/maps."""
    return Path("/proc/self/maps").read_text().splitlines()


def segment_descriptors() -> list[int]:
    """Descriptors of shmsync's segments."""
    return [fd for fd, target in descriptors().items() if SEGMENT.search(target)]


def segment_maps() -> list[str]:
    """Mappings of shmsync's segments."""
    return [line for line in maps() if SEGMENT.search(line)]


def shared_nbytes() -> int:
    """Bytes that the segments open in this process have in memory, each counted once."""
    stats = {(s.st_dev, s.st_ino): s.st_blocks * 512 for s in map(os.stat, map(_proc_fd, segment_descriptors()))}
    return sum(stats.values())


def _proc_fd(fd: int) -> str:
    return f"/proc/self/fd/{fd}"


def rss_nbytes() -> int:
    """Resident memory without what belongs to files and shared memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")


def segment_memory() -> dict[str, int]:
    """Bytes by field of smaps (Pss, Private_Dirty, Private_Clean, Rss, ...), summed over shmsync's mappings."""
    totals: dict[str, int] = {}
    counting = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, _, rest = line.partition(" ")
        if "-" in head and not head.endswith(":"):
            counting = SEGMENT.search(rest) is not None
        elif counting and rest.strip().endswith("kB"):
            totals[head.rstrip(":")] = totals.get(head.rstrip(":"), 0) + int(rest.split()[0]) * 1024
    return totals
