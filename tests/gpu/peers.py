"""Other processes that do what a test tells them to, one call after the other.

They are spawned: CUDA does not survive a fork. What they run must be importable, so it lies in `work.py` and not in the
tests. A process takes seconds to start, so a run starts all of them at once, before the first test, and lends them.
"""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

# No process lives longer than this, whatever happens to the one that started it.
LIFETIME_SECONDS = 420
_PR_SET_PDEATHSIG = 1
_spawn = multiprocessing.get_context("spawn")


class RemoteTraceback(Exception):
    """The cause of an exception that came from another process: where it was raised there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Peer:
    """Another process. `call(function, *args)` runs `function(state, *args)` there and gives its result.

    `state` is a namespace that stays there from call to call. Warnings raised there are collected in `warnings`.
    ``env``: variables that the process starts with, on top of this one's.
    """

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self._pipe, theirs = _spawn.Pipe()
        self._process = _spawn.Process(target=serve, args=(theirs,), daemon=True)
        with _environment(env or {}):
            self._process.start()
        theirs.close()
        self.warnings: list[str] = []
        self.busy = False

    @property
    def pid(self) -> int:
        pid = self._process.pid
        assert pid is not None
        return pid

    def alive(self) -> bool:
        return self._process.is_alive()

    def call(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> Any:
        self.start(function, *args)
        return self.result(timeout)

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Begin a call; `result` waits for its end."""
        assert not self.busy, f"process {self.pid} is in the middle of another call"
        self._pipe.send((function, args))
        self.busy = True

    def result(self, timeout: float = 60.0) -> Any:
        if not self._pipe.poll(timeout):
            self._show_stack()
            raise AssertionError(f"Expected an answer of process {self.pid} within {timeout} s, got none")
        try:
            ok, value, trace, warned = self._pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            self._process.join(10)
            text = f"Expected an answer of process {self.pid}, got its end, exit code {self._process.exitcode}"
            raise AssertionError(text) from error
        self.busy = False
        self.warnings += warned
        if not ok:
            raise value from RemoteTraceback(trace)
        return value

    def kill(self) -> None:
        """SIGKILL, and wait until the kernel has torn the process down."""
        os.kill(self.pid, signal.SIGKILL)
        self._process.join(30)
        assert self._process.exitcode == -signal.SIGKILL, f"process {self.pid}: {self._process.exitcode}"

    def let_go(self) -> None:
        """Tell the process that nothing more is asked of it."""
        self._pipe.close()

    def end(self) -> None:
        """Let the process end by itself, without an error; if it doesn't, kill it and say so."""
        self.let_go()
        self._process.join(30)
        if self._process.is_alive():
            self.kill()
            raise AssertionError(f"Expected process {self.pid} to end by itself, got nothing within 30 s")
        code = self._process.exitcode
        assert code in (0, -signal.SIGKILL), f"Expected process {self.pid} to end with 0, got {code}"

    def _show_stack(self) -> None:
        """Have it write to stderr where it hangs, before it is killed."""
        if self.alive():
            os.kill(self.pid, signal.SIGUSR1)
            time.sleep(0.5)


class Crew:
    """The processes of a run, started together. Those that are lent stay usable; a spare one is the borrower's to end.

    They are lent by name: the numbered ones have a CUDA context, "on host" could have one but works on the CPU only,
    "blind" sees no device.
    """

    MEMBERS, SPARES = 4, 3

    def __init__(self) -> None:
        self._env: dict[str, dict[str, str]] = {str(number): {} for number in range(self.MEMBERS)}
        self._env |= {"on host": {}, "blind": {"CUDA_VISIBLE_DEVICES": ""}}
        self._peers = {name: Peer(env) for name, env in self._env.items()}
        self._spares = deque(Peer() for _ in range(self.SPARES))

    def member(self, name: str) -> Peer:
        """One of them; another in its place if it was killed."""
        if not self._peers[name].alive():
            self._peers[name] = Peer(self._env[name])
        return self._peers[name]

    def spare(self) -> Peer:
        return self._spares.popleft() if self._spares else Peer()

    def end(self) -> None:
        peers = [*self._peers.values(), *self._spares]
        for peer in peers:
            if peer.busy and peer.alive():
                peer.kill()
            peer.let_go()
        for peer in peers:
            peer.end()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """A spawned process starts with what is in os.environ; this process has read what it wanted of it long ago."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]


def serve(pipe: Connection) -> None:
    """What a peer's process runs."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.alarm(LIFETIME_SECONDS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the test's process ends it in order
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    import torch

    torch.set_num_threads(1)
    state = SimpleNamespace()
    while True:
        try:
            function, args = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        _answer(pipe, state, function, args)


def _answer(pipe: Connection, state: SimpleNamespace, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            reply: tuple[bool, Any, str] = (True, function(state, *args), "")
        except Exception as error:  # the test's process raises it
            reply = (False, error, traceback.format_exc())
            del error
    warned = [f"{w.category.__name__}: {w.message}" for w in caught]
    try:
        pipe.send((*reply, warned))
    except BrokenPipeError:
        return
    except Exception as error:  # what cannot be pickled
        pipe.send((False, AssertionError(f"no answer: {error!r} for {reply[1]!r}"), reply[2], warned))
