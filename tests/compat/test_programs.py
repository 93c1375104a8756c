"""Whole programs, as a user starts them: torchrl's names made to mean shmsync's, and nobody warned of anything old."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.collectors import free_port
from tests.helpers.releases import offered
from tests.helpers.trainers import ROOT

STOCK = Path(__file__).with_name("programs") / "stock.py"
# The path at which the release under test may be comes after the repository's.
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "OMP_NUM_THREADS": "1",
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A Python with these arguments. If it does not end, it is killed with its workers, which would wait for it."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=100)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    finally:
        process.kill()
        process.wait()
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def deprecations(output: str) -> set[str]:
    """What was called deprecated, in any process, whatever the file and line."""
    return set(re.findall(r"DeprecationWarning: (.*)", output))


@pytest.fixture(scope="module")
def torchrls_own() -> set[str]:
    """What the import of torchrl alone warns of."""
    modules = "torchrl.collectors.distributed, torchrl.envs.libs.gym"
    done = run("-W", "default", "-c", f"import {modules}")
    assert done.returncode == 0, done.stderr
    return deprecations(done.stderr)


APIS = {"updater": "shmsync.torchrl.updater", "schemes": "shmsync.torchrl.schemes"}


@pytest.mark.parametrize("api", [api for api in APIS if api in offered()])
def test_a_program_runs_through_shmsync_and_is_warned_of_nothing_more(api: str, torchrls_own: set[str]) -> None:
    """Not a word of it knows shmsync; its workers are spawned. Mutants: leave the name in
    torchrl.collectors.distributed as it is; inherit from torchrl's updater."""
    done = run("-W", "default::DeprecationWarning", "-m", "shmsync", "run", str(STOCK), api, free_port())
    assert done.returncode == 0, done.stdout + done.stderr
    first, second, third, made_by = done.stdout.splitlines()
    assert first.startswith("batch 40 ")
    # What the first two pushes leave no doubt about.
    assert (second, third) == ("batch 40 [0]", "batch 40 [1]")
    assert made_by == APIS[api]
    assert deprecations(done.stderr) <= torchrls_own


def test_the_import_of_shmsyncs_classes_is_silent() -> None:
    """And making them; what torchrl says about its own while it is imported is kept from those who use ours. Mutant:
    import torchrl where its warnings are heard."""
    make = "shmsync.RPCWeightUpdater().close()"
    if "schemes" in offered():
        make += "; shmsync.RPCWeightSyncScheme().shutdown(); shmsync.SharedMemWeightSyncScheme().shutdown()"
    done = run("-W", "error::DeprecationWarning", "-c", f"import shmsync; {make}")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "DeprecationWarning" not in done.stderr
