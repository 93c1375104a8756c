"""The bell: a word in CTL that the publisher raises after the rows have moved, and on which others sleep (a futex).

It saves time and nothing else: whoever misses a ring finds the news by its rows, at its next look.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import secrets
import time

from . import wire
from .segment import Mapping

# asm/unistd.h of each architecture; elsewhere waiting is looking every now and then.
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98}.get(platform.machine())
has_futex = _SYS_FUTEX is not None
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1  # not the private kind: waiter and waker are different processes
_EVERYBODY = 2**31 - 1
_LOOK_SECONDS = 1e-3
_NO_FAULT = (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class Bell:
    """One channel's bell, in a mapping of CTL that may be written. Contract: it keeps the mapping alive.

    ``offset``: of the word; there is another one, by which subscribers call the publisher.
    """

    def __init__(self, mapping: Mapping, offset: int = wire.CTL_BELL_OFFSET) -> None:
        self._buffer = mapping.buffer
        self._word = ctypes.c_uint32.from_buffer(mapping.buffer, offset)
        self._address = ctypes.c_void_p(ctypes.addressof(self._word))

    @property
    def count(self) -> int:
        """How often it has rung, modulo 2**32. Read it before looking at the rows, and wait for it to change."""
        return self._word.value

    def ring(self) -> None:
        """Wake everybody who waits, and all who are about to. For one process alone. Contract: one system call."""
        self._word.value += 1
        self.stir()

    def call(self) -> None:
        """As `ring`, for a word that several processes raise: two at once may not come to the same number."""
        self._word.value = secrets.randbits(32)
        self.stir()

    def stir(self) -> None:
        """Wake everybody who waits, without news: they look around and wait again."""
        if _SYS_FUTEX is not None:
            _libc.syscall(_SYS_FUTEX, self._address, _FUTEX_WAKE, _EVERYBODY, None, None, 0)

    def wait(self, count: int, seconds: float) -> None:
        """Sleep until it has rung after `count` was read, or for that long, or until a signal has been handled."""
        if _SYS_FUTEX is None:
            if self.count == count:
                time.sleep(min(seconds, _LOOK_SECONDS))
            return
        limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        arguments = (self._address, _FUTEX_WAIT, ctypes.c_uint32(count), ctypes.byref(limit), None, 0)
        if _libc.syscall(_SYS_FUTEX, *arguments) and ctypes.get_errno() not in _NO_FAULT:
            time.sleep(min(seconds, _LOOK_SECONDS))  # a sandbox that does not let us
