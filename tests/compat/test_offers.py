"""What the installed torchrl release has, and which classes of shmsync can stand in for it."""

from __future__ import annotations

import inspect
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

import shmsync
from shmsync import ShmSyncError
from tests.helpers.releases import named, offered


def module(name: str) -> ModuleType | None:
    try:
        return import_module(name)
    except ImportError:
        return None


def has(name: str, attribute: str) -> bool:
    return hasattr(module(name), attribute)


def arguments_of_a_collector() -> set[str]:
    kind = named(import_module("torchrl.collectors"), "Collector")
    return set(inspect.signature(kind.__init__).parameters)


def test_the_release_has_what_is_promised_with_it() -> None:
    """So no test is left out because torchrl, or the table in tests/helpers/releases.py, lacks something. "stamps" show
    in batches only. Mutant: a set of the table without one of its words."""
    arguments = arguments_of_a_collector()
    found = {
        "updater": has("torchrl.collectors.distributed", "RPCWeightUpdater"),
        "schemes": has("torchrl.weight_update", "WeightSyncScheme") and "weight_recv_schemes" in arguments,
        "names": has("torchrl.weight_update.weight_sync_schemes", "register_weight_sync_backend"),
    }
    assert {word for word, there in found.items() if there} == offered() - {"stamps"}


def test_the_updater_is_torchrls() -> None:
    """An instance of the release's base class, which its collectors ask for. Mutant: register with the class that is
    imported by its newest name alone."""
    from torchrl.collectors import WeightUpdaterBase
    from torchrl.collectors.distributed import RPCWeightUpdater

    updater = shmsync.RPCWeightUpdater()
    assert isinstance(updater, WeightUpdaterBase)
    assert isinstance(updater, RPCWeightUpdater)
    updater.close()


SCHEMES = ("RPCWeightSyncScheme", "SharedMemWeightSyncScheme")


@pytest.mark.parametrize("name", SCHEMES)
def test_a_scheme_is_torchrls_or_an_error_that_names_the_release(name: str) -> None:
    """Made, not imported, since `from shmsync import *` must do everywhere. Mutants: import torchrl's base class where
    there is none; make a scheme all the same."""
    kind: Any = getattr(shmsync, name)
    if "schemes" in offered():
        scheme = kind()
        assert isinstance(scheme, import_module("torchrl.weight_update").WeightSyncScheme)
        scheme.shutdown()
        return
    with pytest.raises(ShmSyncError, match=r"needs torchrl 0\.11 to .*RPCWeightUpdater") as raised:
        kind()
    assert f"torchrl {import_module('importlib.metadata').version('torchrl')} is installed" in str(raised.value)
