"""Builds the fake CUDA runtime (`cudart.cpp`) once for each state of its sources."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Whose gather kernel it runs: the device's code, compiled for the host.
CSRC = HERE.parents[1] / "csrc"
# Its soname is the real one's, so that a lookup among the loaded libraries finds it.
FLAGS = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-fPIC", "-shared"]
FLAGS += ["-Wl,-soname,libcudart.so.13", f"-I{CSRC}"]


def compiler() -> str:
    found = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if found is None:
        raise RuntimeError("Expected a C++ compiler for the fake CUDA runtime, got none in PATH")
    return found


def library(*defines: str, headers: Path | None = None) -> Path:
    """The library, compiled with those macros defined; of another process's making, if that has been here before.

    headers: a folder whose headers come before those of csrc. Contract: blocks while it compiles (some seconds). Any
    number of processes may call it at the same time.
    Raises RuntimeError without a compiler, or with what the compiler says.
    """
    flags = [*([f"-I{headers}"] if headers else []), *FLAGS, *(f"-D{name}" for name in defines)]
    path = _cache() / f"{_digest(flags)}.so"
    if not path.exists():
        _compile(flags, path)
    return path


def _digest(flags: list[str]) -> str:
    ours = sorted(p for p in HERE.iterdir() if p.suffix in (".cpp", ".h"))
    sources = [*ours, CSRC / "device" / "gather.h", CSRC / "copy" / "kind.h", CSRC / "copy" / "convert.h"]
    digest = hashlib.sha256(" ".join([compiler(), *flags]).encode())
    for source in sources:
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:24]


def _cache() -> Path:
    """A folder that only this user can write to: what is in it is run."""
    path = Path(tempfile.gettempdir()) / f"shmsync-fakes-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if path.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise RuntimeError(f"Expected a folder of user {os.getuid()} that no other can write to - at {path}")
    return path


def _compile(flags: list[str], path: Path) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".partial")
    os.close(handle)
    # A sanitizer that was loaded into this process is not for the compiler.
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    try:
        command = [compiler(), *flags, str(HERE / "cudart.cpp"), "-o", name]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        if run.returncode != 0:
            raise RuntimeError(f"Expected the fake CUDA runtime to compile, got\n{run.stderr}")
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
