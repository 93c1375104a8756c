"""Every instruction set of this machine, with both kinds of stores, passes the tests of the plan and the casts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.extension.support import LOAD, ROOT, check_output, python

_C = pytest.importorskip("shmsync._C")

HERE = Path(__file__).parent
SHOW = LOAD + "print(c.isa(), c.stream_min_bytes(), c.Plan([1], None, [1]).streaming)"


def machine_has(isa: str) -> bool:
    return python(SHOW, SHMSYNC_ISA=isa).returncode == 0


@pytest.mark.parametrize("stores", ["cached", "streaming"])
@pytest.mark.parametrize("isa", ["avx512", "avx2", "plain"])
def test_every_path_passes_the_tests(isa: str, stores: str) -> None:
    """Mutants: an error in the kernels that this machine does not choose by itself."""
    if not machine_has(isa):
        assert isa != "plain"
        pytest.skip(f"this machine has no {isa}")
    environment = os.environ | {
        "SHMSYNC_ISA": isa,
        "SHMSYNC_STREAM_MIN_BYTES": "0" if stores == "streaming" else "999999999999",
    }
    assert check_output(SHOW, **environment).split() == [
        isa,
        environment["SHMSYNC_STREAM_MIN_BYTES"],
        str(stores == "streaming"),
    ]
    tests = [str(HERE / "test_plan.py"), str(HERE / "test_casts.py")]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    assert "skipped" not in run.stdout


def test_the_best_is_chosen() -> None:
    best = next(isa for isa in ("avx512", "avx2", "plain") if machine_has(isa))
    assert check_output(SHOW, SHMSYNC_ISA="").split()[0] == best


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("SHMSYNC_ISA", "avx1024", "Expected one of .*plain, which this machine has, got 'avx1024'"),
        ("SHMSYNC_STREAM_MIN_BYTES", "64M", "Expected a whole number from 0 to [0-9]+, got '64M'"),
        ("SHMSYNC_THREADS", "0", "Expected a whole number from 1 to 1024, got '0'"),
        ("SHMSYNC_THREADS", "-2", "Expected a whole number from 1 to 1024, got '-2'"),
        ("SHMSYNC_THREADS", "9" * 30, "Expected a whole number from 1 to 1024"),
    ],
)
def test_a_bad_variable_is_an_error_of_the_call_and_not_of_the_import(name: str, value: str, expected: str) -> None:
    """Mutant: read when the module is loaded, where the extension would seem not to be there."""
    code = f"""
{LOAD}
import re
for _ in range(2):
    try:
        print(c.isa(), c.stream_min_bytes(), c.threads())
    except ValueError as error:
        assert re.search({expected!r} + ".* - in the environment variable {name}", str(error)), error
    else:
        raise SystemExit("no error")
"""
    check_output(code, **{name: value})
