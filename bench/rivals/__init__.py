"""The rivals of a push, each in its own processes behind the adapter in ``base``."""

from __future__ import annotations

from .base import Rival
from .gloo import GlooBroadcast
from .lock import SharedUnderLock
from .ray_store import RayObjectStore
from .shmsync_updater import ShmSync, ShmSyncMemory
from .torchrl_queues import TorchRLMultiProcess, TorchRLSharedMem
from .torchrl_rpc import TorchRLRPCScheme, TorchRLUpdater

# By the names that results use.
PUSHING: dict[str, type[Rival]] = {
    "shmsync": ShmSync,
    "shmsync-memory": ShmSyncMemory,
    "torchrl-updater": TorchRLUpdater,
    "torchrl-rpc-scheme": TorchRLRPCScheme,
    "torchrl-shared-mem": TorchRLSharedMem,
    "torchrl-multi-process": TorchRLMultiProcess,
    "gloo": GlooBroadcast,
    "lock": SharedUnderLock,
    "ray": RayObjectStore,
}
