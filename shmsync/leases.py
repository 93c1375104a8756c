"""Kernel locks: open file description (OFD) locks on single bytes of CTL.

The kernel ends them when the process dies, however it dies. They belong to the open file description: each publisher
and subscriber opens its own, never maps it (a mapping would keep it alive), and never hands it on.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from . import wire

_FLOCK = struct.Struct("hhqqi4x")


class Locks:
    """Byte locks on one description; slots and the owner by name.

    Contract: no call blocks; a lock that this description holds already is granted again (the kernel does not count).
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._cache: dict[tuple[int, int], bytes] = {}

    def try_exclusive(self, slot: int) -> bool:
        """Lock a slot for writing; needs a description opened for writing."""
        return self._set(fcntl.F_WRLCK, wire.OWNER_LOCK + 1 + slot)

    def try_shared(self, slot: int) -> bool:
        """Lock a slot for reading."""
        return self._set(fcntl.F_RDLCK, wire.OWNER_LOCK + 1 + slot)

    def unlock(self, slot: int) -> None:
        """Give a slot's lock back; nothing happens if there is none."""
        self._set(fcntl.F_UNLCK, wire.OWNER_LOCK + 1 + slot)

    def try_free(self, ring: int, slot: int) -> bool:
        """Lock a slot's memory in a device ring for freeing it; needs a description opened for writing."""
        return self._set(fcntl.F_WRLCK, _ring_byte(ring, slot))

    def try_mapping(self, ring: int, slot: int) -> bool:
        """Lock a slot's memory in a device ring as mapped here."""
        return self._set(fcntl.F_RDLCK, _ring_byte(ring, slot))

    def unlock_memory(self, ring: int, slot: int) -> None:
        """Give that lock back."""
        self._set(fcntl.F_UNLCK, _ring_byte(ring, slot))

    def own(self) -> bool:
        """Become the channel's owner."""
        return self._set(fcntl.F_WRLCK, wire.OWNER_LOCK)

    def owner_alive(self) -> bool:
        """Whether somebody else's description holds the owner lock."""
        return self._held_elsewhere(wire.OWNER_LOCK)

    def claim_line(self, line: int) -> bool:
        """Take a roster line; needs a description opened for writing."""
        return self._set(fcntl.F_WRLCK, wire.ROSTER_LOCKS + line)

    def line_alive(self, line: int) -> bool:
        """Whether a roster line's subscriber lives."""
        return self._held_elsewhere(wire.ROSTER_LOCKS + line)

    def close(self) -> None:
        """Close the description, which ends all of its locks."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _set(self, kind: int, byte: int) -> bool:
        try:
            fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, self._request(kind, byte))
        except (BlockingIOError, PermissionError):  # POSIX lets a conflict be EAGAIN or EACCES
            return False
        return True

    def _request(self, kind: int, byte: int) -> bytes:
        request = self._cache.get((kind, byte))
        if request is None:
            request = self._cache[kind, byte] = _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0)
        return request

    def _held_elsewhere(self, byte: int) -> bool:
        answer = fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, self._request(fcntl.F_WRLCK, byte))
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def holders(fd: int) -> dict[int, set[int]]:
    """Which processes of this user hold shared locks on which slots, by slot; ``fd``: any descriptor of CTL.

    Contract: reads /proc/<pid>/fdinfo of all processes, so it takes milliseconds: for errors and tools.
    """
    inode = os.fstat(fd).st_ino
    found: dict[int, set[int]] = {}
    for path in Path("/proc").glob("[0-9]*/fdinfo/*"):
        try:
            text = path.read_text()
        except OSError:  # gone, or another user's
            continue
        for first in _shared_locks(text, inode):
            slot = first - wire.OWNER_LOCK - 1
            if 0 <= slot < wire.MAX_SLOTS:
                found.setdefault(slot, set()).add(int(path.parts[2]))
    return found


def _shared_locks(fdinfo: str, inode: int) -> Iterator[int]:
    """The first bytes of the shared locks that a description has on a file."""
    for line in fdinfo.splitlines():
        # lock: 1: OFDLCK ADVISORY READ -1 00:01:1027 1099511627777 1099511627777
        parts = line.split()
        if len(parts) == 9 and parts[2] == "OFDLCK" and parts[4] == "READ" and parts[6].endswith(f":{inode}"):
            # Locks on neighbouring bytes are one line.
            last = wire.OWNER_LOCK + wire.MAX_SLOTS if parts[8] == "EOF" else int(parts[8])
            yield from range(int(parts[7]), min(last, wire.OWNER_LOCK + wire.MAX_SLOTS) + 1)


def _ring_byte(ring: int, slot: int) -> int:
    return wire.RING_LOCKS + ring * wire.MAX_SLOTS + slot
