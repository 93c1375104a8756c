"""Segments: anonymous shared memory, made, found again through /proc, and mapped.

Mappings are made through libc, because Python's mmap duplicates the descriptor for each of them. The memory of a
mapping is given back when the last tensor over it is gone, so no view can ever outlive its bytes.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import stat
import weakref

import torch
from torch import Tensor

from .errors import ChannelCorrupt, ChannelUnreachable, PublisherGone
from .layout import Layout, Leaf

PROT_READ, PROT_WRITE = 1, 2
MAP_SHARED, MAP_PRIVATE, MAP_NORESERVE = 1, 2, 0x4000
MADV_DONTNEED, MADV_DONTFORK, MADV_DONTDUMP = 4, 10, 16
MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MFD_NOEXEC_SEAL = 0x8

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)


def create(name: str, nbytes: int) -> int:
    """A new sealed memfd of `nbytes` (sparse), 0600, as a descriptor. Contract: gone with its last user."""
    try:
        fd = os.memfd_create(f"shmsync-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | _MFD_NOEXEC_SEAL)
    except OSError:  # kernels before 6.3 do not know MFD_NOEXEC_SEAL, hosts with vm.memfd_noexec=2 insist on it
        fd = os.memfd_create(f"shmsync-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def reopen(fd: int, flags: int) -> int:
    """Another open file description of the same segment: locks on it are its own."""
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)


def open_remote(pid: int, fd: int, flags: int) -> int:
    """A segment of another process of this user, by its descriptor number there.

    Raises PublisherGone (no such process or descriptor), ChannelUnreachable (not permitted, no /proc) or
    ChannelCorrupt (something else is open under that number). Contract: never blocks, whatever it finds.
    """
    path = f"/proc/{pid}/fd/{fd}"
    try:
        target = os.readlink(path)
        if not target.startswith("/memfd:shmsync-"):
            # A reused number may be a FIFO, which would block, or a device: look before opening.
            raise PublisherGone(
                f"Expected a shmsync segment under {path}, found {target!r}: pid {pid} closed the channel. "
                "Get a handle from the publisher that runs now"
            )
        opened = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise PublisherGone(
            f"The publisher, pid {pid}, has ended or closed the channel: nothing under {path}"
        ) from None
    except PermissionError as error:
        raise ChannelUnreachable(
            f"Process {os.getpid()} (uid {os.getuid()}) may not open {path}: {error.strerror}. "
            "Publisher and subscriber need the same user and the same pid namespace"
        ) from error
    try:
        _check_ours(opened, path)
    except BaseException:
        os.close(opened)
        raise
    return opened


def _check_ours(fd: int, path: str) -> None:
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid():
        raise ChannelCorrupt(f"Expected a segment of uid {os.getuid()} under {path}, got one of uid {info.st_uid}")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise ChannelCorrupt(f"Expected a sealed memfd under {path}, got a file that takes no seals") from None
    if seals & SEALS != SEALS:
        raise ChannelCorrupt(f"Expected a segment sealed against resizing under {path}, got seals {seals:#x}")


def reserve(fd: int, offset: int, nbytes: int) -> None:
    """Give a range of the segment real memory now. Raises OSError (ENOSPC) where there is none."""
    os.posix_fallocate(fd, offset, nbytes)


def punch(fd: int, offset: int, nbytes: int) -> None:
    """Give the memory of a range back; it reads as zeros afterwards."""
    if _libc.fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, nbytes):
        raise _error(f"Giving back {nbytes} bytes of shared memory failed")


class Mapping:
    """One mapped range of a segment.

    ``prot``, ``flags``: as for mmap; ``map_shared``, ``map_readonly`` and ``map_private`` are the three ways in use.
    Contract: the memory is unmapped when the mapping and the last tensor or memoryview over it are gone.
    """

    def __init__(self, fd: int, offset: int, nbytes: int, *, prot: int, flags: int) -> None:
        address = _libc.mmap(None, nbytes, prot, flags, fd, offset)
        if address in (None, ctypes.c_void_p(-1).value):
            raise _error(f"Mapping {nbytes} bytes of shared memory failed")
        self.address: int = address
        self.nbytes = nbytes
        self.buffer = (ctypes.c_ubyte * nbytes).from_address(address)
        end = weakref.finalize(self.buffer, _unmap, address, nbytes, os.getpid())
        end.atexit = False  # the process's end unmaps everything, and tensors may outlive the interpreter's hooks

    def advise(self, advice: int) -> None:
        """madvise for the whole range; raises OSError."""
        if _libc.madvise(self.address, self.nbytes, advice):
            raise _error(f"madvise({advice}) of {self.nbytes} bytes failed")

    def populate(self, advice: int) -> None:
        """Fault all pages in at once, where the kernel can (5.14); else they come one by one when touched."""
        _libc.madvise(self.address, self.nbytes, advice)

    def leave_to_parent(self) -> None:
        """In a forked child, unmap what it inherited of this. Contract: nobody may look there any more."""
        _libc.munmap(self.address, self.nbytes)

    def words(self, offset: int, count: int) -> memoryview:
        """`count` aligned u64 words at `offset`; each is loaded and stored in one go."""
        view = memoryview(self.buffer).cast("B")[offset : offset + 8 * count]
        return view.cast("Q")


def _unmap(address: int, nbytes: int, pid: int) -> None:
    # In a forked child the range may be something else's: publishers' mappings are not inherited.
    if os.getpid() == pid:
        _libc.munmap(address, nbytes)


def map_shared(fd: int, offset: int, nbytes: int) -> Mapping:
    """The publisher's mapping: writable, shared, not inherited by children, not part of core dumps."""
    mapping = Mapping(fd, offset, nbytes, prot=PROT_READ | PROT_WRITE, flags=MAP_SHARED)
    mapping.advise(MADV_DONTFORK)
    mapping.advise(MADV_DONTDUMP)
    return mapping


def map_readonly(fd: int, offset: int, nbytes: int) -> Mapping:
    """Header and rows of a subscriber: shared, so that they never freeze, and read-only."""
    return Mapping(fd, offset, nbytes, prot=PROT_READ, flags=MAP_SHARED)


def map_private(fd: int, offset: int, nbytes: int) -> Mapping:
    """A slot of a subscriber: private, so that a write harms nobody and kills nobody."""
    return Mapping(fd, offset, nbytes, prot=PROT_READ | PROT_WRITE, flags=MAP_PRIVATE | MAP_NORESERVE)


def views(buffer: object, layout: Layout) -> list[Tensor]:
    """One tensor per leaf over a slot's bytes. Each has a storage of just its own bytes, so pickling one stays small.

    Contract: copies nothing; the tensors keep `buffer` alive.
    """
    with torch.inference_mode(False), torch.no_grad():
        return [_view(buffer, leaf) for leaf in layout]


def _view(buffer: object, leaf: Leaf) -> Tensor:
    if leaf.nbytes == 0:
        return torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype)
    count = leaf.nbytes // leaf.dtype.itemsize
    flat = torch.frombuffer(buffer, dtype=leaf.dtype, count=count, offset=leaf.offset)
    return flat.as_strided(leaf.shape, leaf.stride)


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")
