"""Other processes that do what a test tells them to, one call after the other.

They are forked from multiprocessing's fork server, which has imported torch and shmsync but never opened a channel: so
they share nothing with the test's process but the pipe, like a spawned worker, and start in milliseconds.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# A process that nobody talks to any more ends by itself after so long.
LIFETIME_SECONDS = 110
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "tensordict", "shmsync", "tests.helpers.workers"])


def stop(pid: int) -> None:
    """SIGSTOP, and wait until no thread of the process runs any more: the signal alone promises that for later."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 20
    while any(_state(task) != "T" for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.001)


def _state(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


class RemoteTraceback(Exception):
    """The cause of an exception that came from another process: where it was raised there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Peer:
    """Another process. `call(function, *args)` runs `function(state, *args)` there and gives its result.

    `state` is a namespace that stays there from call to call. Warnings raised there are collected in `warnings`.
    """

    def __init__(self) -> None:
        self._pipe, theirs = _context.Pipe()
        self._process = _context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self.warnings: list[str] = []

    @property
    def pid(self) -> int:
        pid = self._process.pid
        assert pid is not None
        return pid

    def call(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> Any:
        self.start(function, *args)
        return self.result(timeout)

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Begin a call; `result` waits for its end."""
        self._pipe.send((function, args))

    def done(self) -> bool:
        """Whether the call that was started has ended."""
        return self._pipe.poll()

    def result(self, timeout: float = 60.0) -> Any:
        if not self._pipe.poll(timeout):
            raise AssertionError(f"process {self.pid} has not answered within {timeout} s")
        ok, value, trace, warned = self._pipe.recv()
        self.warnings += warned
        if not ok:
            raise value from RemoteTraceback(trace)
        return value

    def tell(self, word: str) -> None:
        """Send a word to the function that is running there; it sees it through `state.told()`."""
        self._pipe.send(word)

    def kill(self) -> None:
        """SIGKILL, and wait until the kernel has torn the process down."""
        os.kill(self.pid, signal.SIGKILL)
        self._process.join(30)
        assert self._process.exitcode == -signal.SIGKILL

    def end(self) -> None:
        """Let the process end; it must do so by itself and without an error, unless it was killed."""
        self._pipe.close()
        self._process.join(30)
        if self._process.exitcode is None:
            self.kill()
            raise AssertionError(f"process {self.pid} did not end by itself")


def _serve(pipe: Connection) -> None:
    signal.alarm(LIFETIME_SECONDS)
    import torch

    torch.set_num_threads(1)
    state = SimpleNamespace(told=lambda: pipe.recv() if pipe.poll() else None)
    while True:
        try:
            message = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        if isinstance(message, str):  # a word for a function that had ended before it came
            continue
        _answer(pipe, state, *message)


def _answer(pipe: Connection, state: SimpleNamespace, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            reply: tuple[bool, Any, str] = (True, function(state, *args), "")
        except BaseException as error:  # the test's process raises it
            reply = (False, error, traceback.format_exc())
            del error
    warned = [f"{type(w.message).__name__}: {w.message}" for w in caught]
    try:
        pipe.send((*reply, warned))
    except BrokenPipeError:
        sys.exit(0)
    except Exception as error:  # what cannot be pickled
        pipe.send((False, AssertionError(f"no answer: {error!r} for {reply[1]!r}"), reply[2], warned))
