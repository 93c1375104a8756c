"""A process that plays the trainer: a test starts it, lets it run functions, and it ends with all that it started.

torch's RPC can be started once per process, so every RPC world gets a trainer of its own. The trainer's children are
forked from a server that has imported everything already, but has never opened a channel: like spawned processes they
share nothing with the trainer, and they start in milliseconds instead of seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from multiprocessing import forkserver, util
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# A trainer to which nobody has spoken for so long ends by itself, and all its children with it.
LIFETIME_SECONDS = 300
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class RemoteTraceback(Exception):
    """The cause of an exception that came from a trainer: where it was raised there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


_RUNS = None  # an exit code that is not there yet


class _Template:
    """A process that has imported what trainers need, which takes seconds, and is copied for each of them.

    It never opens a channel, and ends when this process does.
    """

    def __init__(self, modules: tuple[str, ...]) -> None:
        self._socket, theirs = socket.socketpair()
        call = f"from tests.helpers.trainers import copy_on_request; copy_on_request({theirs.fileno()}, {modules!r})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", call],
            cwd=ROOT,
            env={**os.environ, **_ONE_THREAD},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        atexit.register(self._end)

    def _end(self) -> None:
        self._socket.close()
        self._process.wait()

    def fork(self, pipe: int, log: int, start_method: str) -> int:
        """Start a trainer; its pid."""
        socket.send_fds(self._socket, [start_method.encode()], [pipe, log])
        return self._answer()

    def code(self, pid: int) -> int | None:
        """The exit code of one, minus the signal's number if one has ended it; None while it runs."""
        self._socket.send(str(pid).encode())
        code = self._answer()
        return None if code == _STILL_RUNS else code

    def _answer(self) -> int:
        answer = self._socket.recv(64)
        assert answer, "the template of trainers has died: what it said is in the output of the tests"
        return int(answer)


_STILL_RUNS = 1 << 20


@functools.cache
def _template(modules: tuple[str, ...]) -> _Template:
    return _Template(modules)


def copy_on_request(fd: int, modules: tuple[str, ...]) -> None:
    """What a template runs; in each of its copies it returns when the trainer has come to its end."""
    import torch

    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchrl warns about its own classes when it is imported
        for module in modules:
            importlib.import_module(module)
    asked = socket.socket(fileno=fd)
    while True:
        request, fds, *_ = socket.recv_fds(asked, 64, 2)
        if not request:
            return  # the tests are over
        if not fds:
            asked.send(str(_exit_code(int(request))).encode())
            continue
        pid = os.fork()
        if not pid:
            break
        for number in fds:
            os.close(number)
        asked.send(str(pid).encode())
    asked.close()
    os.setsid()
    pipe, log = fds
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    serve(pipe, request.decode())


def _exit_code(pid: int) -> int:
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else _STILL_RUNS


class Trainer:
    """`do(function, *args)` runs `function(world, *args)` in the trainer and gives its result or raises its error.

    `world` is a namespace that stays there from call to call. `start_method`: how its children come to be. `modules`:
    what is imported before the first call. Everything that goes to and fro is pickled; functions go by their name.
    """

    def __init__(self, modules: Iterable[str] = (), start_method: str = "forkserver") -> None:
        self._pipe, theirs = Pipe()
        self._log, self._output = tempfile.TemporaryFile(), ""  # noqa: SIM115 - closed by close()
        self._template = _template(tuple(modules))
        self._pid, self._code = self._template.fork(theirs.fileno(), self._log.fileno(), start_method), _RUNS
        theirs.close()

    def do(self, function: Callable[..., Any], *args: Any, _seconds: float = 90.0, **kwargs: Any) -> Any:
        """Run a module-level function there, for at most `_seconds`; all other arguments are the function's."""
        self._pipe.send_bytes(pickle.dumps((function, args, kwargs)))
        if not self._pipe.poll(_seconds):
            self.close()
            raise AssertionError(f"{function.__name__} has not ended in {_seconds} s. Its output:\n{self.output()}")
        try:
            value, error, trace = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            raise AssertionError(f"The trainer died in {function.__name__}. Its output:\n{self.output()}") from None
        if error is not None:
            raise error from RemoteTraceback(trace)
        return value

    def output(self) -> str:
        """What the trainer and its children have written to stdout and stderr so far."""
        if not self._log.closed:
            self._log.seek(0)
            self._output = self._log.read().decode(errors="replace")
        return self._output

    def processes(self) -> list[int]:
        """The pids of its session that still run: itself and what it started."""
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _session(pid) == self._pid]

    def end(self, timeout: float = 30.0) -> int:
        """Let it end by itself, as a script does at its last line; its exit code."""
        self._pipe.send_bytes(pickle.dumps(None))
        return int(wait_for(self._ended, "the end of a trainer", timeout)[0])

    def _ended(self) -> tuple[int] | None:
        if self._code is _RUNS:
            self._code = self._template.code(self._pid)
        return None if self._code is _RUNS else (self._code,)

    def close(self) -> None:
        """Kill it with all its children. A second call does nothing."""
        if self._code is _RUNS:
            # Not waited for yet, so the number of its process group cannot be anybody else's.
            with contextlib.suppress(ProcessLookupError):  # it has not begun one
                os.killpg(self._pid, signal.SIGKILL)
            os.kill(self._pid, signal.SIGKILL)
            wait_for(self._ended, "the end of a trainer", 30.0)
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.output()
        self._log.close()
        self._pipe.close()


def _session(pid: int) -> int | None:
    try:
        state, _, _, session = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
    except (OSError, ValueError):
        return None
    return None if state == "Z" else int(session)


def serve(fd: int, start_method: str) -> None:
    """What a trainer runs: calls, one after the other, in its main thread."""
    caught: list[str] = []
    _record_warnings(caught)
    multiprocessing.set_start_method(start_method, force=True)
    if start_method == "forkserver":
        _fork_children()
    pipe, requests = Connection(fd), queue.SimpleQueue[bytes]()
    threading.Thread(target=_listen, args=(pipe, requests), daemon=True).start()
    world = SimpleNamespace(warnings=caught)
    while (request := pickle.loads(requests.get())) is not None:
        _answer(pipe, world, *request)


def _answer(pipe: Connection, world: SimpleNamespace, function: Any, args: Any, kwargs: Any) -> None:
    try:
        answer = pickle.dumps((function(world, *args, **kwargs), None, ""))
    except Exception as error:
        trace = traceback.format_exc()
        try:
            answer = pickle.dumps((None, error, trace))
            pickle.loads(answer)
        except Exception:
            answer = pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}"), trace))
    pipe.send_bytes(answer)


def _listen(pipe: Connection, requests: queue.SimpleQueue[bytes]) -> None:
    with contextlib.suppress(EOFError, ConnectionResetError):  # the test is gone
        while pipe.poll(LIFETIME_SECONDS):
            request = pipe.recv_bytes()
            requests.put(request)
            if request == pickle.dumps(None):
                return
    os.killpg(0, signal.SIGKILL)


def _record_warnings(caught: list[str]) -> None:
    def show(message: Any, category: type[Warning], filename: str, lineno: int, *rest: Any) -> None:
        caught.append(f"{category.__name__}: {message} ({filename}:{lineno})")

    warnings.simplefilter("always")
    warnings.showwarning = show


def _fork_children() -> None:
    """Start multiprocessing's fork server by a fork of this process instead of a new interpreter, so that it has the
    modules; and let its children use this one server too."""
    real, util.spawnv_passfds = util.spawnv_passfds, _fork_instead_of_exec
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = real


def _fork_instead_of_exec(executable: Any, arguments: list[str], descriptors: list[int]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd > 2 and fd not in descriptors:
                with contextlib.suppress(OSError):
                    os.close(fd)
        forkserver._forkserver.ensure_running = lambda: None
        exec(arguments[-1], {})  # the program that a new interpreter would run
    finally:
        os._exit(1)


def wait_for(condition: Callable[[], Any], what: str, timeout: float = 20.0) -> Any:
    """Ask again and again until `condition()` is true; what it gave."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout} s")
        time.sleep(0.01)
    return value


def segment_uses(pid: int) -> int:
    """How many descriptors and mappings of shmsync's segments a process has."""
    links = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            links.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return sum("memfd:shmsync" in line for line in [*links, *Path(f"/proc/{pid}/maps").read_text().splitlines()])
