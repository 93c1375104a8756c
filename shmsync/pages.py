"""Private pages: finding and dropping what a worker wrote into its copy-on-write mapping."""

from __future__ import annotations

import ctypes
import fcntl
import os

import numpy as np

from .segment import MADV_DONTNEED, Mapping

_PAGE = os.sysconf("SC_PAGE_SIZE")
# Documentation/admin-guide/mm/pagemap.rst: 63 = present, 62 = swapped, 61 = belongs to a file or shared memory.
_THERE = np.uint64((1 << 63) | (1 << 62))
_FROM_FILE = np.uint64(1 << 61)

# Documentation/admin-guide/mm/pagemap.rst, "IOCTL" (Linux 6.7): asks for ranges instead of reading every entry.
_PAGEMAP_SCAN = 0xC0606610
_IS_FILE, _IS_PRESENT, _IS_SWAPPED = 1 << 2, 1 << 3, 1 << 4
_MOST_RANGES = 512


_SCAN_FIELDS = (
    *("size", "flags", "start", "end", "walk_end", "ranges", "ranges_len", "max_pages"),
    *("inverted", "all_of", "any_of", "returned"),
)


class _ScanRequest(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in _SCAN_FIELDS]


class PrivatePages:
    """Reads this process's page table. Contract: one descriptor, opened at first use, until close()."""

    def __init__(self) -> None:
        self._fd: int | None = None
        self._pid = 0

    def find(self, mapping: Mapping) -> np.ndarray | None:
        """Offsets in bytes of the mapping's private pages (of the first of each run); None if the kernel
        does not say."""
        try:
            return self._scan(mapping)
        except OSError:
            return self._read(mapping)

    def _scan(self, mapping: Mapping) -> np.ndarray:
        ranges = np.zeros((_MOST_RANGES, 3), np.uint64)
        end = mapping.address + -(-mapping.nbytes // _PAGE) * _PAGE
        request = _ScanRequest(
            size=ctypes.sizeof(_ScanRequest),
            start=mapping.address,
            end=end,
            ranges=ranges.ctypes.data,
            ranges_len=_MOST_RANGES,
            inverted=_IS_FILE,
            all_of=_IS_FILE,
            any_of=_IS_PRESENT | _IS_SWAPPED,
            returned=_IS_PRESENT | _IS_SWAPPED,
        )
        found = fcntl.ioctl(self._open(), _PAGEMAP_SCAN, request)
        return ranges[:found, 0].astype(np.int64) - mapping.address

    def _read(self, mapping: Mapping) -> np.ndarray | None:
        count = -(-mapping.nbytes // _PAGE)
        try:
            raw = os.pread(self._open(), 8 * count, mapping.address // _PAGE * 8)
        except OSError:
            return None
        entries = np.frombuffer(raw, np.uint64)
        if len(entries) < count:
            return None
        return np.flatnonzero((entries & _THERE != 0) & (entries & _FROM_FILE == 0)) * _PAGE

    def drop(self, mapping: Mapping) -> np.ndarray | None:
        """Drop the private pages, so that the mapping shows the segment again; what was there, as `find` says it.

        Where the kernel does not tell, all pages are dropped, which costs their faults. Raises OSError if the
        drop fails (locked pages): the mapping would be stale.
        """
        found = self.find(mapping)
        if found is None or len(found):
            mapping.advise(MADV_DONTNEED)
        return found

    def _open(self) -> int:
        if self._fd is None or self._pid != os.getpid():
            # After a fork /proc/self/pagemap of the parent would still be read: the file belongs to who opened it.
            self.close()
            self._fd, self._pid = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC), os.getpid()
        return self._fd

    def close(self) -> None:
        """Close the descriptor."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
