"""Populated memory of the kind that slots are in: memfd, mapped shared."""

from __future__ import annotations

import mmap
import os

_MADV_POPULATE_WRITE = 23


def populated(nbytes: int) -> mmap.mmap:
    """A mapping of `nbytes` (at least a page) that is backed and faulted in."""
    size = max(nbytes, mmap.PAGESIZE)
    fd = os.memfd_create("bench-roofline")
    try:
        os.posix_fallocate(fd, 0, size)
        mapping = mmap.mmap(fd, size)
    finally:
        os.close(fd)
    try:
        mapping.madvise(_MADV_POPULATE_WRITE)
    except OSError:  # kernels before 5.14
        mapping[:] = bytes(size)
    return mapping
