"""Segments that are files, for processes that can't look into each other's /proc: containers with one /dev/shm, say.

A file appears under its name complete and with its owner's lock held, or not at all: it is made without a name and then
linked. No symbolic link is followed, and nothing is opened that another user could have made or could read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from pathlib import Path

from .errors import ChannelCorrupt, ChannelError, ChannelUnreachable, OutOfSharedMemory, PublisherGone
from .segment import reserve

_VARIABLE = "SHMSYNC_DIR"
_PATH_MAX = 4096
_PREFIX = "shmsync-"
_NAME = _PREFIX + "([0-9a-f]{32})"
CTL, DATA = ".ctl", ".data"


def folder() -> Path:
    """Where files are made: SHMSYNC_DIR, else /dev/shm."""
    return Path(os.path.abspath(os.environ.get(_VARIABLE) or "/dev/shm"))


def stem(where: Path, nonce: bytes) -> str:
    """The path of a channel's files, without their endings."""
    return str(where / f"{_PREFIX}{nonce.hex()}")


def named(where: Path, ending: str) -> dict[bytes, str]:
    """What has the name of a channel's file there, whatever it is: paths without endings, by the nonces in them."""
    try:
        names = sorted(os.listdir(where))
    except OSError:
        return {}
    nonces = (re.fullmatch(_NAME + re.escape(ending), name) for name in names)
    return {bytes.fromhex(found[1]): stem(where, bytes.fromhex(found[1])) for found in nonces if found}


def check_folder(where: Path) -> None:
    """Raise ChannelError unless files can be made there that no other user can take away."""
    try:
        info = where.stat()
    except OSError as error:
        raise ChannelError(
            f"storage='file' needs the directory {where}: {error.strerror}. Make it (mode 0700), or let {_VARIABLE} "
            "name another one"
        ) from None
    safe = info.st_uid in (0, os.getuid()) and (not info.st_mode & 0o022 or info.st_mode & stat.S_ISVTX)
    if not stat.S_ISDIR(info.st_mode) or not safe:
        raise ChannelError(
            f"storage='file' needs a directory of its user or of root in which others cannot rename files; {where} is "
            f"{stat.filemode(info.st_mode)} of uid {info.st_uid}. Set {_VARIABLE} to another one (on tmpfs)"
        )


def check_length(path: str) -> None:
    """Raise ChannelError if the kernel takes no path as long as this one."""
    if len(os.fsencode(path)) >= _PATH_MAX:
        raise ChannelError(
            f"storage='file' needs paths shorter than {_PATH_MAX} bytes, got {len(os.fsencode(path))}: let {_VARIABLE} "
            "name a directory with a shorter one"
        )


def create(where: Path, nbytes: int, used: int) -> int:
    """A new file without a name, 0600 and sparse, whose first `used` bytes have memory. Raises OutOfSharedMemory."""
    try:
        fd = os.open(where, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ChannelError(
            f"storage='file' cannot make a file in {where}: {error.strerror}. Set {_VARIABLE} to a directory on tmpfs"
        ) from None
    try:
        check_room(where, used, "A new channel")
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, nbytes)
        reserve(fd, 0, used)
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            check_room(where, used, "A new channel", most=0)
        raise
    return fd


def show(fd: int, path: str) -> None:
    """Give a file that has no name this one. Raises OSError if there is something."""
    place, name = os.path.split(path)
    here = os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Only with directories given does Python follow /proc's link to the file.
        os.link(f"/proc/self/fd/{fd}", name, src_dir_fd=here, dst_dir_fd=here, follow_symlinks=True)
    finally:
        os.close(here)


def open_file(path: str, flags: int) -> int:
    """A channel's file. Raises PublisherGone (it is not there), ChannelUnreachable (not permitted) or ChannelCorrupt
    (it is no file that only this user can write). Contract: never blocks, whatever it finds."""
    try:
        _check_ours(os.lstat(path), path)  # opening a device may do something
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        if not os.path.isdir(os.path.dirname(path)):
            raise ChannelUnreachable(
                f"There is no directory {os.path.dirname(path)} where process {os.getpid()} runs; let its container "
                "share the publisher's"
            ) from None
        raise PublisherGone(f"The publisher has closed the channel, or it has ended: there is no {path}") from None
    except PermissionError as error:
        raise ChannelUnreachable(
            f"Process {os.getpid()} (uid {os.getuid()}) may not open {path}: {error.strerror}. "
            "Publisher and subscriber need the same user"
        ) from None
    except OSError as error:
        raise ChannelCorrupt(f"Expected a file that can be opened as {path}: {error.strerror}") from None
    try:
        _check_ours(os.fstat(fd), path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def remove(path: str, fd: int) -> None:
    """Take the name away from the file that is open as `fd`; whatever else has that name now keeps it."""
    with contextlib.suppress(FileNotFoundError):
        there, ours = os.lstat(path), os.fstat(fd)
        if (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino):
            os.unlink(path)


def check_room(where: Path, nbytes: int, what: str, most: int | None = None) -> None:
    """Raise OutOfSharedMemory if the file system there has no room for `nbytes` more; ``most``: it has said so."""
    found = os.statvfs(where)
    free = found.f_bavail * found.f_frsize if most is None else most
    unlimited = most is None and not found.f_blocks  # a tmpfs with size=0 has no numbers
    if nbytes > free and not unlimited:
        raise OutOfSharedMemory(
            f"{what} needs {nbytes} bytes in {where}, but {free} are free there; make room (a larger tmpfs, "
            f"--shm-size), set {_VARIABLE} to another directory, or use storage='memfd', fewer slots (max_slots=) or a "
            "smaller dtype (dtype=)"
        )


def _check_ours(info: os.stat_result, path: str) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise ChannelCorrupt(f"Expected a regular file as {path}, got {stat.filemode(info.st_mode)}")
    if info.st_uid != os.getuid():
        raise ChannelCorrupt(f"Expected a file of uid {os.getuid()} as {path}, got one of uid {info.st_uid}")
    if stat.S_IMODE(info.st_mode) != 0o600:
        raise ChannelCorrupt(
            f"Expected {path} to be for its owner alone (0600), got {stat.S_IMODE(info.st_mode):04o}: do not trust it"
        )
