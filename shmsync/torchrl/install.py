"""shmsync's classes in the place of torchrl's, under torchrl's own names, and out of it again."""

from __future__ import annotations

import abc
import importlib
import sys
import threading
import warnings
from collections.abc import Iterator, MutableMapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

from ..errors import ShmSyncError
from .releases import SCHEME, UPDATER, refusal, require_updater

# Who makes objects by these names. A module that only asks `isinstance`, or derives a class, keeps torchrl's.
_PLACES = {
    "RPCWeightUpdater": ("torchrl.collectors.distributed", "torchrl.collectors.distributed.rpc"),
    "RPCWeightSyncScheme": ("torchrl.weight_update", "torchrl.weight_update._rpc"),
    "SharedMemWeightSyncScheme": (
        *("torchrl.weight_update", "torchrl.weight_update._shared"),
        "torchrl.collectors._multi_base",
    ),
}
# torchrl's table of schemes by the name of a backend, from 0.14 on.
_BACKENDS = ("torchrl.weight_update.weight_sync_schemes", "_WEIGHT_SYNC_SCHEMES")
_BY_BACKEND = {"rpc": "RPCWeightSyncScheme", "shared": "SharedMemWeightSyncScheme"}
_ABSENT = object()


class _Replaced(NamedTuple):
    """One name, in a module or in a table: what was there, and what is there in its place."""

    table: MutableMapping[str, Any]
    name: str
    before: Any
    ours: Any


_lock = threading.RLock()
_replaced: list[_Replaced] = []


def install() -> None:
    """Let torchrl's names mean shmsync's classes, in this process, until `uninstall()`.

    ``RPCWeightUpdater`` in torchrl.collectors.distributed, and the weight-sync schemes that shmsync has in
    torchrl.weight_update and by the name of their backend; so Hydra's targets, which are such names, too. If torchrl is
    not imported yet, that happens when it is. A name that was imported from torchrl before stays what it was.

    Raises ShmSyncError without torchrl, and with a release that has nothing to replace: at once or, if torchrl is not
    imported yet, out of its import. Contract: a second call does nothing; imports torchrl's collectors, if torchrl
    is there already, which takes seconds; processes that are started later are not touched (a worker gets what it needs
    from the trainer).
    """
    with _lock:
        if find_spec("torchrl") is None:
            raise ShmSyncError(
                "install() puts shmsync's classes in the place of torchrl's, but torchrl is not installed here: "
                "pip install torchrl"
            )
        if _replaced or _waiting in sys.meta_path:
            return
        if "torchrl" in sys.modules:
            _replace()
        else:
            sys.meta_path.insert(0, _waiting)


def uninstall() -> None:
    """Let torchrl's names mean torchrl's own again. What was made meanwhile stays what it is.

    Contract: what somebody else has put in such a place since then stays; without `install()` nothing happens.
    """
    with _lock:
        if _waiting in sys.meta_path:
            sys.meta_path.remove(_waiting)
        while _replaced:
            table, name, before, ours = _replaced.pop()
            if table.get(name) is not ours:
                continue
            if before is _ABSENT:
                del table[name]
            else:
                table[name] = before


def _replace() -> None:
    import shmsync

    for name, table, key in _places():
        if refusal(UPDATER if name == "RPCWeightUpdater" else SCHEME) is not None:
            continue
        ours = getattr(shmsync, name, None)
        before = table.get(key, _ABSENT)
        if ours is None or before is ours:
            continue
        if isinstance(before, abc.ABCMeta) and not issubclass(ours, before):
            before.register(ours)  # for `isinstance` with torchrl's own, wherever that is still known
        _replaced.append(_Replaced(table, key, before, ours))
        table[key] = ours
    if not _replaced:
        require_updater()


def _places() -> Iterator[tuple[str, MutableMapping[str, Any], str]]:
    """The name of a class of ours, and the table and key where torchrl keeps its own."""
    for name, modules in _PLACES.items():
        for table in map(_names_in, modules):
            if name in table:
                yield name, table, name
    module, attribute = _BACKENDS
    backends: MutableMapping[str, Any] | None = _names_in(module).get(attribute)
    if backends is not None:
        yield from ((name, backends, backend) for backend, name in _BY_BACKEND.items())


def _names_in(module: str) -> MutableMapping[str, Any]:
    """What a module of torchrl defines; nothing if this release has no such module, or can't import it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchrl warns about its own classes when it is imported
        try:
            return vars(importlib.import_module(module))
        except ImportError:
            return {}


class _Waiting(MetaPathFinder):
    """Finds torchrl as the other finders do, with a loader that replaces the names when torchrl is there.

    torchrl is not imported for it: that would take from the program what it may only do before (choosing how
    multiprocessing starts processes).
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torchrl":
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = None if finder is self or find is None else find(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _ReplacingLoader(spec.loader)
                return spec
        return None


class _ReplacingLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        with _lock:
            if _waiting in sys.meta_path:  # not uninstalled since then
                sys.meta_path.remove(_waiting)
                _replace()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


_waiting = _Waiting()
