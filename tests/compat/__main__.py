"""Runs these tests with several releases of torchrl: python -m tests.compat [RELEASE ...] [-- pytest's arguments].

Each release lies, with its own tensordict, in a folder of its own that comes before everything else on the path; torch
and all others come from the environment that this runs in.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Earlier releases are built for an earlier torch: they go on without their extension, which nothing here needs.
OPTIONS = ["-W", "ignore:Failed to import torchrl C++ binaries:UserWarning"]
INSTALLED = ROOT / ".venv" / "compat"


def main(arguments: list[str]) -> int:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    wanted, options = arguments[:at], arguments[at + 1 :]
    known = releases()
    unknown = [name for name in wanted if name not in known]
    if unknown:
        print(f"Expected releases among {' '.join(known)}, got {' '.join(unknown)}", file=sys.stderr)
        return 2
    results = [passes(name, known[name], options) for name in wanted or known]
    return 0 if all(results) else 1


def releases() -> dict[str, list[str]]:
    """Release → the packages to install."""
    lines = (HERE / "releases.txt").read_text().splitlines()
    return {name: packages for name, *packages in (line.split() for line in lines if line and not line.startswith("#"))}


def passes(name: str, packages: list[str], options: list[str]) -> bool:
    """Test one release; its line, after its output if something failed."""
    begin = time.monotonic()
    environment = dict(os.environ)
    if packages:
        environment["PYTHONPATH"] = str(install(name, packages))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--no-header", *OPTIONS, str(HERE), *options],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    summary = done.stdout.strip().rpartition("\n")[2].strip("= ")
    if done.returncode:
        print(done.stdout, flush=True)
    verdict = "FAILED" if done.returncode else "ok"
    print(f"torchrl {name:5} {verdict:7} {summary}, {time.monotonic() - begin:.0f} s in all", flush=True)
    return done.returncode == 0


def install(name: str, packages: list[str]) -> Path:
    """The folder with these packages; what is there already is taken, if it is complete."""
    folder = INSTALLED / name
    note = folder / "packages.txt"
    if note.exists() and note.read_text().split() == packages:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-q"]
    subprocess.run([*pip, "--no-deps", "--target", str(folder), *packages], stdin=subprocess.DEVNULL, check=True)
    note.write_text(" ".join(packages))
    return folder


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
