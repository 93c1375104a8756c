"""The handle: the small address of a channel, for an RPC, a queue, a pickle or an environment variable."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote_to_bytes

from .errors import ChannelError, ChannelUnreachable

_PREFIX = "shmsync1"


@dataclass(frozen=True)
class Handle:
    """Where a channel is: the owner's pid, its descriptor of CTL, and how to know that it is the right one.

    With ``storage="file"`` it is found by ``path``, that of its files without their endings; else that is empty.

    ``str(handle)`` and ``Handle.parse`` turn it into one word of text and back.
    Contract: immutable, picklable, under 300 bytes and the path; holding it keeps nothing alive.
    """

    pid: int
    fd: int
    nonce: str
    epoch: int
    host: str
    boot_id: str
    pid_namespace: str
    path: str = ""

    @classmethod
    def here(cls, fd: int, nonce: bytes, epoch: int, path: str = "") -> Handle:
        """The handle of a CTL segment that this process holds open as `fd`."""
        return cls.of(os.getpid(), fd, nonce, epoch, path)

    @classmethod
    def of(cls, pid: int, fd: int, nonce: bytes, epoch: int, path: str = "") -> Handle:
        """The handle of a CTL segment that a process of this host holds open as `fd`, or that is a file there."""
        return cls(pid, fd, nonce.hex(), epoch, _hostname(), _boot_id(), _pid_namespace(), path)

    @classmethod
    def parse(cls, text: str) -> Handle:
        """The inverse of ``str``. Raises ChannelError for other text."""
        parts = text.split(":")
        try:
            prefix, pid, fd, nonce, epoch, boot_id, namespace, host, *path = parts
            if prefix != _PREFIX or len(bytes.fromhex(nonce)) != 16 or len(path) > 1:
                raise ValueError
            paths = [os.fsdecode(unquote_to_bytes(one)) for one in path]
            if any(not os.path.isabs(one) or "\0" in one for one in paths):
                raise ValueError
            return cls(int(pid), int(fd), nonce, int(epoch), host, boot_id, namespace, *paths)
        except ValueError:
            raise ChannelError(
                f"Expected the text of a shmsync handle, got {text!r}; pass str(publisher.handle)"
            ) from None

    def __str__(self) -> str:
        return ":".join(
            (
                _PREFIX,
                str(self.pid),
                str(self.fd),
                self.nonce,
                str(self.epoch),
                self.boot_id,
                self.pid_namespace,
                self.host,
                *([quote(os.fsencode(self.path))] if self.path else []),
            )
        )

    def check_reachable(self) -> None:
        """Raise ChannelUnreachable, naming both sides, unless this process is on the publisher's host and, if the
        channel is not in files, in its pid namespace."""
        here = (_boot_id(), _pid_namespace())
        if here == (self.boot_id, self.pid_namespace) or (self.path and here[0] == self.boot_id):
            return
        what = "host" if here[0] != self.boot_id else "pid namespace"
        raise ChannelUnreachable(
            f"Process {os.getpid()} on host {_hostname()} (pid namespace {here[1]}) cannot map the channel of process "
            f"{self.pid} on host {self.host} (pid namespace {self.pid_namespace}): another {what}. "
            "Publisher and subscriber need the same host and the same pid namespace; for containers on one host make "
            "the publisher with storage='file' in a directory that they share"
        )


def _hostname() -> str:
    return socket.gethostname().replace(":", "_")


def _boot_id() -> str:
    """Tells two hosts apart even if they share a name."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid").partition("[")[2].rstrip("]")
