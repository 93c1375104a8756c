"""The releases of torchrl that the drop-ins can stand in for, and one error for all others.

A release is known by what it has. Its number is for the text of the error only.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, NamedTuple

from ..errors import ShmSyncError

# The newest that the tests run with. A later one is taken as long as it has what is needed.
NEWEST = "0.14"


class Need(NamedTuple):
    """What a drop-in stands in for: `name` in `module` of torchrl, since which release, with these attributes."""

    module: str
    name: str
    since: str
    parts: tuple[str, ...] = ()


UPDATER = Need("torchrl.collectors.distributed", "RPCWeightUpdater", "0.9")
SCHEME = Need(
    "torchrl.weight_update",
    "WeightSyncScheme",
    "0.11",
    (
        *("_init_on_sender_impl", "_setup_connection_and_weights_on_sender_impl", "send", "prepare_weights"),
        *("_init_on_receiver_impl", "_setup_connection_and_weights_on_receiver_impl", "receive"),
        *("context", "model", "model_id", "initialized_on_sender", "synchronized_on_sender", "shutdown"),
    ),
)


class Found(NamedTuple):
    """torchrl's class, or why there is none: `lacks` is empty where torchrl is not installed."""

    its: Any = None
    lacks: str = ""
    cause: ImportError | None = None


@functools.cache
def look(need: Need) -> Found:
    """What the installed torchrl has. Contract: imports torchrl, without its warnings about its own classes."""
    if find_spec("torchrl") is None:
        return Found()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            its = getattr(importlib.import_module(need.module), need.name, None)
    except ImportError as error:
        return Found(lacks=need.module, cause=error)
    if its is None:
        return Found(lacks=f"{need.module}.{need.name}")
    lacks = [part for part in need.parts if not hasattr(its, part)]
    return Found(lacks=f"{need.name}.{lacks[0]}") if lacks else Found(its)


def refusal(need: Need) -> ShmSyncError | None:
    """The error for a torchrl that is not installed, or that lacks what is needed; None if it is there."""
    found = look(need)
    if found.its is not None:
        return None
    installed = f"torchrl {_version()} is installed, which has no {found.lacks}" if found.lacks else "there is none"
    other = " With 0.9 and 0.10 weight_updater=RPCWeightUpdater does the same." if need.module == SCHEME.module else ""
    error = ShmSyncError(
        f"This needs torchrl {need.since} to {NEWEST}, but {installed}"
        f"{f' ({found.cause})' if found.cause else ''}: pip install 'torchrl>={need.since}'.{other} "
        "Publisher and Subscriber need no torchrl"
    )
    error.__cause__ = found.cause
    return error


def require_updater() -> None:
    """Raise ShmSyncError if a torchrl is installed that RPCWeightUpdater can't stand in for. Without torchrl it serves
    plain RPC."""
    error = refusal(UPDATER)
    if error is not None and look(UPDATER).lacks:
        raise error


def scheme_base() -> Any:
    """torchrl's WeightSyncScheme; where there is none that will do, a class whose instances can't be made."""
    return look(SCHEME).its or _Refused


class _Refused:
    """What stands in for a base class that torchrl lacks, so that shmsync's modules can be imported all the same."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        error = refusal(SCHEME)
        assert error is not None
        raise error


def _version() -> str:
    # torchrl.__version__ is "0.0.0+unknown" in some releases.
    try:
        return version("torchrl")
    except PackageNotFoundError:
        return "of an unknown version"
