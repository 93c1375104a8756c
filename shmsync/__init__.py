"""Policy weights in shared memory: one copy per push, and no forward that mixes two versions."""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from . import errors
from .binding import Binding
from .copying import has_extension
from .errors import (
    BindingError,
    BindingLost,
    ChannelClosed,
    ChannelCorrupt,
    ChannelError,
    ChannelUnreachable,
    LagExceeded,
    LagTimeout,
    LayoutError,
    LayoutMismatch,
    LimitError,
    NotAttached,
    NothingPublished,
    NotThePublisher,
    OutOfSharedMemory,
    PublisherGone,
    PushError,
    PushTimeout,
    ShmSyncError,
    SlotsExhausted,
    SubscribersExhausted,
    TiedLeavesDiffer,
    UnsupportedLeaf,
    WaitTimeout,
    WorkerIdError,
)
from .handle import Handle
from .layout import Layout
from .lease import Lease
from .publisher import Publication, Publisher
from .subscriber import Subscriber
from .torchrl.install import install, uninstall

if TYPE_CHECKING:
    from .torchrl.schemes import RPCWeightSyncScheme, SharedMemWeightSyncScheme
    from .torchrl.updater import RPCWeightUpdater

__all__ = [
    "__version__",
    "Binding",
    "BindingError",
    "BindingLost",
    "ChannelClosed",
    "ChannelCorrupt",
    "ChannelError",
    "ChannelUnreachable",
    "errors",
    "Handle",
    "has_extension",
    "install",
    "LagExceeded",
    "LagTimeout",
    "Layout",
    "LayoutError",
    "LayoutMismatch",
    "Lease",
    "LimitError",
    "NothingPublished",
    "NotAttached",
    "NotThePublisher",
    "OutOfSharedMemory",
    "Publication",
    "Publisher",
    "PublisherGone",
    "PushError",
    "PushTimeout",
    "RPCWeightSyncScheme",
    "RPCWeightUpdater",
    "SharedMemWeightSyncScheme",
    "ShmSyncError",
    "SlotsExhausted",
    "Subscriber",
    "SubscribersExhausted",
    "TiedLeavesDiffer",
    "uninstall",
    "UnsupportedLeaf",
    "WaitTimeout",
    "WorkerIdError",
]


def __getattr__(name: str) -> object:
    # Late: with torchrl installed, this import takes seconds.
    if name == "RPCWeightUpdater":
        from .torchrl.updater import RPCWeightUpdater

        return RPCWeightUpdater
    if name in ("RPCWeightSyncScheme", "SharedMemWeightSyncScheme"):
        from .torchrl import schemes

        return getattr(schemes, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


try:
    __version__ = version("shmsync")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+unknown"
