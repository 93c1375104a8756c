"""The survey: which channels there are on this machine, and what can be seen of one from outside.

Only this user's channels can be opened. Looking takes no line of the roster and, but for `verify`, no lease.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from . import files, segment, slots, wire
from .errors import ChannelError
from .handle import Handle
from .layout import Layout
from .leases import Locks
from .roster import RosterLine
from .subscriber import Subscriber

_CTL = "/memfd:shmsync-ctl"


@dataclass(frozen=True)
class SlotState:
    """One slot that has held a version: the version (0 = incomplete) and the pids of who say that they use it."""

    slot: int
    version: int
    pids: list[int]


@dataclass(frozen=True)
class Survey:
    """What is seen of one channel at one moment. ``age_seconds`` since it was made; ``nbytes`` of memory in use."""

    pid: int
    handle: str
    alive: bool
    age_seconds: float
    version: int
    nbytes: int
    slot_nbytes: int
    checksum: bool
    layout: Layout | None
    slots: list[SlotState]
    subscribers: list[RosterLine]

    @property
    def lag(self) -> int:
        """The most versions that a subscriber is behind what it has been offered."""
        return max((line.lag for line in self.subscribers), default=0)


def handles(pid: int | None = None) -> list[Handle]:
    """The channels that live processes of this user own; of one process if ``pid`` is given."""
    found: dict[str, Handle] = {}
    for stem in files.named(files.folder(), files.CTL).values():
        with suppress(OSError, ChannelError):
            in_files, alive = at(stem)
            if alive and pid in (None, in_files.pid):
                found[in_files.nonce] = in_files
    for folder in [Path(f"/proc/{pid}")] if pid is not None else sorted(Path("/proc").glob("[0-9]*")):
        try:
            descriptors = sorted((folder / "fd").iterdir(), key=lambda path: int(path.name))
        except OSError:  # gone, or another user's
            continue
        for path in descriptors:
            handle = _handle(int(folder.name), path)
            if handle is not None:
                found.setdefault(handle.nonce, handle)
    return list(found.values())


def at(path: str) -> tuple[Handle, bool]:
    """The handle of the channel whose files are there, with or without an ending, and whether its publisher lives.

    Raises what opening it raises.
    """
    stem = path.removesuffix(files.CTL).removesuffix(files.DATA)
    fd = files.open_file(stem + files.CTL, os.O_RDONLY)
    try:
        head = wire.parse_ctl(os.pread(fd, wire.PAGE, 0), os.fstat(fd).st_size)
        return Handle.of(head.pid, -1, head.nonce, head.epoch, stem), Locks(fd).owner_alive()
    finally:
        os.close(fd)


def _handle(pid: int, path: Path) -> Handle | None:
    """The handle of the channel whose CTL a process has open there, if it is the process's own."""
    try:
        if not os.readlink(path).startswith(_CTL):
            return None
        fd = segment.open_remote(pid, int(path.name), os.O_RDONLY)
    except (OSError, ChannelError):
        return None
    try:
        head = wire.parse_ctl(os.pread(fd, wire.PAGE, 0), os.fstat(fd).st_size)
    except ChannelError:
        return None
    finally:
        os.close(fd)
    return Handle.of(pid, int(path.name), head.nonce, head.epoch) if head.pid == pid else None


def look(handle: Handle, now: float) -> Survey:
    """Look at a channel; ``now``: wall time in seconds. Raises what opening it raises."""
    with Subscriber(handle, listed=False) as watcher:
        layout, lines, data = watcher.layout, watcher.peers(), watcher._data
        states: list[SlotState] = []
        nbytes = slot_nbytes = 0
        if data is not None:
            slot_nbytes = data.head.slot_mapped_nbytes
            nbytes = os.fstat(data.fd).st_blocks * 512
            versions = ((slot, data.slot_version(slot)) for slot in range(data.head.slots))
            states = [
                SlotState(slot, version, [line.pid for line in lines if line.used == version])
                for slot, version in versions
                if version
            ]
        return Survey(
            pid=handle.pid,
            handle=str(handle),
            alive=watcher.publisher_alive(),
            age_seconds=now - handle.epoch / 1e9,
            version=max((slots.version_of(word) for word in data.rows), default=0) if data is not None else 0,
            nbytes=nbytes,
            slot_nbytes=slot_nbytes,
            checksum=data is not None and data.head.checksum,
            layout=layout,
            slots=states,
            subscribers=lines,
        )
