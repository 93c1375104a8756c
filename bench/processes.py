"""Child processes that serve an object's methods over a pipe and never outlive their parent.

They are forked from a process that has imported everything and started no thread, so that eight workers of eight rivals
start at once and share what they have imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import random
import resource
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_fork = multiprocessing.get_context("fork")


class ChildFailed(RuntimeError):
    """A child raised, or ended, or did not answer in time. The message holds its traceback."""


class Child:
    """A process that makes ``factory(*args)`` and serves its methods, ``close()`` last.

    Contract: `call` blocks for the answer; the process ends with `end()`, or with its parent.
    """

    def __init__(self, name: str, factory: Callable[..., Any], *args: Any) -> None:
        self.name = name
        self._pipe, theirs = _fork.Pipe()
        # Output that is still in a buffer would be written by both processes.
        sys.stdout.flush()
        self._process = _fork.Process(target=_serve, args=(theirs, factory, args), name=name)
        with warnings.catch_warnings():
            # Some library's idle thread is enough for Python 3.12 to warn; nothing here has used one yet.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid or 0

    def send(self, method: str, *args: Any) -> None:
        """Ask without waiting."""
        try:
            self._pipe.send((method, args))
        except OSError as error:
            with contextlib.suppress(OSError):
                if self._pipe.poll(0):
                    self.receive()  # what it said before it ended
            raise ChildFailed(f"{self.name} (pid {self.pid}) is gone") from error

    def receive(self, timeout: float = 120.0) -> Any:
        """The answer to the oldest open question. Raises ChildFailed."""
        try:
            if not self._pipe.poll(timeout):
                raise ChildFailed(f"{self.name} (pid {self.pid}) did not answer within {timeout} s")
            good, answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise ChildFailed(f"{self.name} (pid {self.pid}) ended without an answer") from error
        if not good:
            raise ChildFailed(f"{self.name} (pid {self.pid}): {answer}")
        return answer

    def call(self, method: str, *args: Any, timeout: float = 120.0) -> Any:
        """Ask and wait."""
        self.send(method, *args)
        return self.receive(timeout)

    def end(self, timeout: float = 15.0) -> None:
        """Let it close what it has; kill it if that takes too long."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(timeout)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()


def _serve(pipe: Any, factory: Callable[..., Any], args: tuple[Any, ...]) -> None:
    die_with_parent()
    _raise_descriptor_limit()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us in order
    served: Any = None
    try:
        served = factory(*args)
        while (question := pipe.recv()) is not None:
            method, arguments = question
            pipe.send(_answer(getattr(served, method), arguments))
    except EOFError:
        pass
    except BaseException:
        _try_send(pipe, (False, _trace()))
    try:
        if hasattr(served, "close"):
            served.close()
    finally:
        # Past the shutdown of foreign libraries' threads, which is not what is measured here.
        sys.stderr.flush()
        os._exit(0)


def _trace() -> str:
    """The traceback of the error that is being handled, with paths as the repository has them: results are shared."""
    return traceback.format_exc().replace(f"{Path(__file__).resolve().parents[1]}{os.sep}", "")


def _answer(method: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return True, method(*arguments)
    except Exception:
        return False, _trace()


def _try_send(pipe: Any, message: object) -> None:
    with contextlib.suppress(OSError):
        pipe.send(message)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends, however that happens."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _raise_descriptor_limit() -> None:
    """torch passes one descriptor per shared tensor; 2000 of them are more than many soft limits."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def free_port() -> int:
    """A TCP port on loopback that nobody uses now, below those that the system gives to outgoing connections."""
    choose = random.SystemRandom()
    while True:
        port = choose.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as sock:
            sock.bind(("127.0.0.1", port))
            return port
