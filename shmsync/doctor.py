"""The doctor: whether shmsync can do its main job on this machine, what will be slow, and how to mend it."""

from __future__ import annotations

import os
import platform
import resource
import sys
from dataclasses import dataclass

import torch

from . import bell, copying, device, files, limits
from .errors import ShmSyncError
from .publisher import Publisher
from .subscriber import Subscriber

GOOD, SLOW, NONE, BAD = "ok", "slow", "none", "FAILS"
_FEW_DESCRIPTORS = 256
_LITTLE_NBYTES = 1 << 30


@dataclass(frozen=True)
class Finding:
    """``state``: "ok", "slow" (works, but not as well as it could), "none" (not there, and not needed for the main job)
    or "FAILS" (the main job can't run)."""

    what: str
    state: str
    text: str


def examine() -> list[Finding]:
    """All checks, in an order that leads from the kernel to the package."""
    return [check() for check in (_system, _channel, _files, _memory, _descriptors, _extension, _futex, _cuda)]


def _system() -> Finding:
    text = f"{platform.system()} {platform.release()}, Python {sys.version.split()[0]}, torch {torch.__version__}"
    return Finding("system", GOOD if platform.system() == "Linux" else BAD, text)


def _channel() -> Finding:
    """memfd, seals, OFD locks, /proc and mapping."""
    try:
        good = _there_and_back("memfd")
    except (OSError, ShmSyncError) as error:
        return Finding("channel", BAD, f"{error}. Needed: memfd_create, OFD locks, and /proc/<pid>/fd of the same user")
    return Finding("channel", GOOD if good else BAD, "memfd, OFD locks, /proc and mappings work")


def _files() -> Finding:
    """Only for subscribers in other pid namespaces."""
    where, what = files.folder(), "file storage"
    try:
        good = _there_and_back("file")
    except (OSError, ShmSyncError) as error:
        return Finding(what, NONE, f"not possible, so no subscribers in other pid namespaces: {error}")
    room = os.statvfs(where)
    text = f"works in {where}, {room.f_bavail * room.f_frsize / 2**20:.0f} MiB free; for other pid namespaces only"
    return Finding(what, GOOD if good else NONE, text)


def _there_and_back(storage: str) -> bool:
    """A real channel of one number."""
    with Publisher({"x": torch.ones(1)}, storage=storage) as publisher, Subscriber(publisher.handle) as follower:
        publisher.publish()
        with follower.lease() as lease:
            return bool(lease.weights["x"] == 1)


def _memory() -> Finding:
    room, by = limits.least_room()
    text = f"{room / 2**30:.1f} GiB left for slots, by {by}; a run needs some three times its weights"
    return Finding("memory", GOOD if room > _LITTLE_NBYTES else SLOW, text)


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    state = GOOD if soft >= _FEW_DESCRIPTORS else SLOW
    return Finding("descriptors", state, f"{soft} (at most {hard}); a channel takes 3 of the trainer and 3 of a worker")


def _extension() -> Finding:
    if copying.has_extension:
        return Finding("extension", GOOD, f"built, {copying.engine.isa()}, {copying.engine.threads()} threads")
    return Finding("extension", SLOW, "not built: one thread copies. Install with a C++17 compiler (g++) at hand")


def _futex() -> Finding:
    if bell.has_futex:
        return Finding("futex", GOOD, "workers are woken by a push")
    return Finding("futex", SLOW, f"not known on {platform.machine()}: workers look for news every millisecond")


def _cuda() -> Finding:
    if not torch.cuda.is_available():
        return Finding("CUDA", GOOD, "none; weights stay on the host")
    count = f"{torch.cuda.device_count()} device(s)"
    torch.cuda.current_device()  # loads the runtime
    why = device.reason()
    if why:
        return Finding("CUDA", SLOW, f"{count}, whose workers copy from the host: {why}")
    if torch.cuda.get_device_name(0).find("MIG") >= 0:
        return Finding("CUDA", SLOW, f"{count}; parts of a GPU (MIG) can't share memory: workers copy from the host")
    return Finding("CUDA", GOOD, f"{count}, runtime {_cuda_version()} ({device.runtime.where()}); workers map by IPC")


def _cuda_version() -> str:
    version = device.runtime.runtime_version()
    return f"{version // 1000}.{version % 1000 // 10}"
