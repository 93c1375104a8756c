"""A torchrl that shmsync can't stand in for: one error, where a class of ours is made, that says what to do.

Such releases are made up here, as packages of a few lines that hide the installed one. `make compat` also installs a
real one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.helpers.releases import offered
from tests.helpers.trainers import ROOT

COLLECTORS = "torchrl/collectors/distributed.py"
SCHEMES = "torchrl/weight_update.py"
# By version: the files of its package, and what of it the errors of the updater and the schemes name (None = no error).
MADE_UP: dict[str, tuple[dict[str, str], tuple[str | None, str | None]]] = {
    "0.8.1": (
        {COLLECTORS: "class RPCWeightUpdaterBase: ..."},
        ("torchrl.collectors.distributed.RPCWeightUpdater", "torchrl.weight_update"),
    ),
    "0.10.0": (
        {COLLECTORS: "import abc\nclass RPCWeightUpdater(abc.ABC): ..."},
        (None, "torchrl.weight_update"),
    ),
    "2.0": (
        {COLLECTORS: "import nowhere", SCHEMES: "class WeightSyncScheme:\n  def send(self): ..."},
        ("torchrl.collectors.distributed (No module named 'nowhere')", "WeightSyncScheme._init_on_sender_impl"),
    ),
}
PROGRAM = """
import shmsync
def refused(made):
    try:
        made()
    except shmsync.ShmSyncError as error:
        return str(error)
def imported():
    import torchrl
print(refused(shmsync.install))
print(refused(imported))
from shmsync import *
print(refused(RPCWeightUpdater))
for kind in (RPCWeightSyncScheme, SharedMemWeightSyncScheme):
    print(refused(kind))
    assert refused(kind) == refused(lambda: kind.together("policy", "critic"))
import torchrl
print(refused(install))
"""


def made_up(folder: Path, version: str, files: dict[str, str]) -> Path:
    for name, text in {"torchrl/__init__.py": "", "torchrl/collectors/__init__.py": "", **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    about = folder / f"torchrl-{version}.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text(f"Metadata-Version: 2.1\nName: torchrl\nVersion: {version}\n")
    return folder


def said(program: str, *paths: Path) -> list[str]:
    """The lines that a program prints; it has to end well."""
    path = os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("version", MADE_UP)
def test_what_a_release_lacks_is_one_error_where_ours_is_made(tmp_path: Path, version: str) -> None:
    """With the installed version, what it lacks, the range, and what to do; importing is no error. A release that has
    what the updater needs is no error for it. Mutants: import torchrl's class where shmsync's is imported; look at the
    number instead of at what there is; let an ImportError of torchrl's out."""
    files, (updater, scheme) = MADE_UP[version]
    at_once, imported, ours, *schemes, later = said(PROGRAM, made_up(tmp_path, version, files))
    for text, lacks, since in ((ours, updater, "0.9"), *((text, scheme, "0.11") for text in schemes)):
        if lacks is None:
            assert text == "None"
            continue
        assert f"torchrl {version} is installed, which has no {lacks}" in text
        assert f"needs torchrl {since} to 0.14" in text
        assert f"pip install 'torchrl>={since}'" in text
        assert "Publisher and Subscriber need no torchrl" in text
    assert (at_once, imported, later) == ("None", ours, ours)


def test_without_torchrl_schemes_are_refused_and_the_updater_is_not() -> None:
    """It serves plain RPC then. Mutant: refuse both."""
    program = PROGRAM.replace("import torchrl", "...")
    at_once, _, ours, one, another, _ = said(f"import sys; sys.modules['torchrl'] = None\n{program}")
    assert "torchrl is not installed" in at_once
    assert ours == "None"
    assert one == another
    assert "there is none" in one


if "updater" not in offered():

    def test_the_installed_release_is_refused() -> None:
        """As the made-up ones are."""
        at_once, imported, ours, one, another, later = said(PROGRAM)
        assert f"torchrl {metadata.version('torchrl')} is installed" in ours
        assert "needs torchrl 0.9 to 0.14" in ours
        assert one == another
        assert (at_once, imported, later) == ("None", ours, ours)
