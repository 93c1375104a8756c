"""What the tests of the extension share: arrays with room around them, rows, and Python in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
GUARD = 0xA5
# What the extension was built with, by the library that has to be loaded before it then.
_PRELOADED = os.environ.get("LD_PRELOAD", "")
SANITIZER = "address" if "libasan" in _PRELOADED else "thread" if "libtsan" in _PRELOADED else ""

# Code that makes the extension `c` without shmsync, whose import of torch takes seconds and starts threads.
_SPEC = importlib.util.find_spec("shmsync._C")
LOAD = f"""
import importlib.machinery as machinery, importlib.util as util
loader = machinery.ExtensionFileLoader("shmsync._C", {_SPEC.origin if _SPEC else None!r})
c = util.module_from_spec(util.spec_from_loader("shmsync._C", loader))
loader.exec_module(c)
"""


class Arena:
    """Bytes at a chosen distance from a 64-byte boundary, with guard bytes on both sides."""

    def __init__(self, nbytes: int, misaligned: int = 0) -> None:
        self.whole = np.full(nbytes + 256, GUARD, dtype=np.uint8)
        self.start = 64 + -(self.whole.ctypes.data + 64) % 64 + misaligned
        self.bytes = self.whole[self.start : self.start + nbytes]

    @property
    def address(self) -> int:
        return self.whole.ctypes.data + self.start

    def check_guards(self) -> None:
        """Nothing was written beside the bytes."""
        before, after = self.whole[: self.start], self.whole[self.start + self.bytes.size :]
        assert (before == GUARD).all()
        assert (after == GUARD).all()


def random_bytes(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def python(code: str, *, timeout: float = 100, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter, where the environment variables and the threads are its own."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def check_output(code: str, **environment: str) -> str:
    run = python(code, **environment)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()
