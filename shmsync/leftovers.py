"""What publishers that were killed have left of channels in files. Everything else stays where it is.

A channel is dead exactly if nobody holds its owner lock: a live one has its name only while it is locked, and the
kernel ends the lock with the process, whatever its pid is now and in which container it was.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from . import files, wire
from .errors import ChannelError
from .leases import Locks


@dataclass(frozen=True)
class Leftover:
    """Files of one dead channel: their path without endings, the pid that its publisher had, and bytes of memory."""

    path: str
    pid: int | None
    nbytes: int


def remove(where: Path) -> list[Leftover]:
    """Remove the dead channels' files from a directory; what was removed.

    Contract: another's files, symbolic links, live channels and files that only look alike are not touched. Processes
    that still have a dead channel's weights keep them.
    """
    found: list[Leftover] = []
    for nonce, stem in files.named(where, files.CTL).items():
        with suppress(OSError, ChannelError):  # gone meanwhile, or not a channel's
            found += _remove_dead(nonce, stem)
    for nonce, stem in files.named(where, files.DATA).items():
        # DATA is made after CTL and removed before it: one without CTL is dead.
        if not os.path.lexists(stem + files.CTL) and (nbytes := _remove_data(nonce, stem)):
            found.append(Leftover(stem, None, nbytes))
    return found


def _remove_dead(nonce: bytes, stem: str) -> list[Leftover]:
    with _opened(stem + files.CTL) as ctl:
        head = wire.parse_ctl(os.pread(ctl, wire.PAGE, 0), os.fstat(ctl).st_size)
        if head.nonce != nonce or Locks(ctl).owner_alive():
            return []
        # DATA first: if this is interrupted, CTL still says that the rest is dead.
        nbytes = _remove_data(nonce, stem) + _nbytes(ctl)
        if os.path.lexists(stem + files.DATA):
            return []  # it can't be trusted, and without CTL nobody would know what it is
        files.remove(stem + files.CTL, ctl)
        return [Leftover(stem, head.pid, nbytes)]


def _remove_data(nonce: bytes, stem: str) -> int:
    """Remove it if it is that channel's; how much memory it had."""
    nbytes = 0
    with suppress(OSError, ChannelError), _opened(stem + files.DATA) as data:
        if wire.data_nonce(os.pread(data, wire.PAGE, 0)) == nonce:
            nbytes = _nbytes(data)
            files.remove(stem + files.DATA, data)
    return nbytes


@contextmanager
def _opened(path: str) -> Iterator[int]:
    """A file of this user's. Raises OSError or ChannelError if it is none."""
    fd = files.open_file(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def _nbytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512
