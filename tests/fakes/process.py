"""Python in processes that have the fake CUDA runtime: `c` is the extension, `cuda` its submodule, `fake` the fake."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import textwrap
from typing import Any

from tests.extension.support import LOAD, ROOT, check_output
from tests.fakes.fake import environment

CUDA = (
    LOAD
    + """
import ctypes, mmap, os, random, threading
from array import array
from tests.fakes.fake import Fake, Seen, uuid
cuda = c.cuda
fake = Fake(os.environ["SHMSYNC_CUDART"]) if "fakes" in os.environ.get("SHMSYNC_CUDART", "") else None

def raised(call, *arguments):
    try:
        call(*arguments)
    except cuda.CudaError as error:
        return error
    raise AssertionError(f"expected CudaError, got none from {call}")

def text_of(address, nbytes):
    return ctypes.string_at(address, nbytes)

# Shared memory of the host: `host` keeps it, `at` is where it is.
class Host:
    def __init__(self, nbytes):
        self.host = mmap.mmap(-1, nbytes)
        self.at = ctypes.addressof(ctypes.c_char.from_buffer(self.host))
"""
)


def run(code: str, **settings: Any) -> str:
    """What the code prints, in a process with the fake; settings: as in `environment`. Fails if the code does."""
    return check_output(CUDA + textwrap.dedent(code), **environment(**settings))


class Peer:
    """A process with the fake that does what it is told, line by line, until it is closed or killed."""

    LOOP = """
import sys
for line in sys.stdin:
    code = eval(line)
    try:
        print(repr(eval(code, globals())), flush=True)
    except SyntaxError:
        exec(code, globals())
        print(None, flush=True)
"""

    def __init__(self, **settings: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CUDA + self.LOOP],
            cwd=ROOT,
            env=os.environ | environment(**settings),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, code: str) -> Any:
        """The value of an expression, or None of statements. Raises EOFError if they end the process."""
        self.process.stdin.write(repr(code) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise EOFError(f"Expected a value of {code!r}, got the end of the process")
        return ast.literal_eval(line)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(timeout=30)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=30)
