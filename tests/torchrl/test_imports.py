"""Importing the updater where torchrl is installed: whose instance it is, and who is warned."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shmsync import RPCWeightUpdater
from tests.helpers.trainers import ROOT

# torchrl's classes warn about themselves while torchrl is imported; that must not become a user's business with ours.
OURS = "-Werror::DeprecationWarning", "-Werror::UserWarning", "-Werror::FutureWarning"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_it_is_an_instance_of_torchrls_classes() -> None:
    """And its class a subclass of them. Mutant: do not register."""
    from torchrl.collectors import WeightUpdaterBase
    from torchrl.collectors.distributed import RPCWeightUpdater as Theirs

    for theirs in (WeightUpdaterBase, Theirs):
        assert isinstance(RPCWeightUpdater(), theirs)
        assert issubclass(RPCWeightUpdater, theirs)


@pytest.mark.parametrize(
    "program",
    [
        "from shmsync import RPCWeightUpdater; RPCWeightUpdater()",
        "import shmsync\nclass Mine(shmsync.RPCWeightUpdater): pass\nMine()",
        "import torchrl.collectors.distributed; from shmsync import RPCWeightUpdater as U\nclass Mine(U): pass\nMine()",
    ],
    ids=["import", "subclass", "after torchrl"],
)
def test_nobody_is_warned_of_deprecation(program: str) -> None:
    """Neither when it is imported nor when it is subclassed. Mutant: inherit from torchrl's class."""
    options = OURS if "torchrl.collectors" not in program else ("-Werror::DeprecationWarning:__main__", *OURS[1:2])
    done = run(*options, "-c", program)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")


def test_torchrls_own_class_does_warn() -> None:
    """So the test above can fail."""
    done = run("-Wdefault", "-c", "from torchrl.collectors.distributed import RPCWeightUpdater as U\nclass M(U): pass")
    assert "DeprecationWarning: Creating M" in done.stderr


def test_the_package_alone_does_not_import_torchrl() -> None:
    """It takes seconds. Mutant: import the updater in shmsync/__init__.py."""
    done = run("-c", "import shmsync, sys; print('torchrl' in sys.modules)")
    assert (done.returncode, done.stdout) == (0, "False\n")
