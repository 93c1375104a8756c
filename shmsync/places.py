"""Where a channel's two segments are: anonymous memory of the publisher's process, or files for other containers."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from . import files, segment
from .handle import Handle

STORAGES = ("memfd", "file")
CTL, DATA = files.CTL, files.DATA


class Place(Protocol):
    """What makes a publisher's segments, and lets others find them."""

    def create(self, ending: str, nbytes: int, used: int) -> int:
        """A new segment as a descriptor; its first `used` bytes can be written without a signal. Raises
        OutOfSharedMemory."""

    def show(self, ending: str, fd: int) -> None:
        """Now others may find it."""

    def hide(self, ending: str, fd: int) -> None:
        """Nobody finds it any more."""

    def handle(self, ctl: int, nonce: bytes, epoch: int) -> Handle:
        """The address of the channel whose CTL is open as `ctl`."""

    def check_room(self, nbytes: int, what: str) -> None:
        """Raise OutOfSharedMemory if there can't be so many bytes more."""


class Memory:
    """memfds: without a name, gone with their last user, found through /proc."""

    def create(self, ending: str, nbytes: int, used: int) -> int:
        return segment.create(ending.lstrip("."), nbytes)

    def show(self, ending: str, fd: int) -> None:
        """Whoever has the handle finds it."""

    def hide(self, ending: str, fd: int) -> None:
        """It goes with its descriptor."""

    def handle(self, ctl: int, nonce: bytes, epoch: int) -> Handle:
        return Handle.here(ctl, nonce, epoch)

    def check_room(self, nbytes: int, what: str) -> None:
        """No other limits than those of all memory."""


class Files:
    """Files in a directory. They stay after a SIGKILL, until the next publisher there or `gc` removes them."""

    def __init__(self, where: Path, nonce: bytes) -> None:
        files.check_folder(where)
        self._where, self._stem = where, files.stem(where, nonce)
        files.check_length(self._stem + DATA)

    def create(self, ending: str, nbytes: int, used: int) -> int:
        return files.create(self._where, nbytes, used)

    def show(self, ending: str, fd: int) -> None:
        files.show(fd, self._stem + ending)

    def hide(self, ending: str, fd: int) -> None:
        files.remove(self._stem + ending, fd)

    def handle(self, ctl: int, nonce: bytes, epoch: int) -> Handle:
        return Handle.here(ctl, nonce, epoch, self._stem)

    def check_room(self, nbytes: int, what: str) -> None:
        files.check_room(self._where, nbytes, what)


def of(storage: str, nonce: bytes) -> Place:
    """The place that `storage=` names."""
    return Memory() if storage == "memfd" else Files(files.folder(), nonce)


def open_ctl(handle: Handle, flags: int) -> int:
    """CTL of a channel. Raises PublisherGone, ChannelUnreachable, ChannelCorrupt. Contract: never blocks."""
    if handle.path:
        return files.open_file(handle.path + CTL, flags)
    return segment.open_remote(handle.pid, handle.fd, flags)


def open_data(handle: Handle, word: int, flags: int) -> int:
    """DATA of a channel, by the word in CTL that names it; as `open_ctl`."""
    if handle.path:
        return files.open_file(handle.path + DATA, flags)
    return segment.open_remote(handle.pid, word - 1, flags)
