"""`python -m shmsync run`: a program, unchanged, in which torchrl's names mean shmsync's classes."""

from __future__ import annotations

import builtins
import io
import os
import runpy
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from .errors import ShmSyncError
from .torchrl.install import install

USAGE = "python -m shmsync run [-h] (script.py | -m module) [arguments ...]"
_HELP = f"""usage: {USAGE}

Run a program of torchrl's as `python script.py` or `python -m module` would, after shmsync.install()."""
_WRONG = 2
# Frames that are not the program's.
_RUNNERS = {
    __file__,
    *(str(Path(__file__).with_name(name)) for name in ("cli.py", "__main__.py")),
    runpy.run_path.__code__.co_filename,
}


def run(arguments: Sequence[str]) -> int:
    """Install, and run what the arguments name as ``__main__``; exit codes and errors are the program's own.

    ``arguments``: those after `run`. Contract: as `install`; sys.argv and sys.path are the program's from then on.
    """
    as_module = arguments[:1] == ["-m"]
    program, *rest = arguments[1:] if as_module else arguments or [""]
    if program in ("-h", "--help"):
        print(_HELP)
        return 0
    if not program or not (as_module or os.path.exists(program)):
        print(f"shmsync: there is no script {program}" if program else f"usage: {USAGE}", file=sys.stderr)
        return _WRONG
    try:
        install()
    except ShmSyncError as error:
        print(f"shmsync: {error}", file=sys.stderr)
        return 1
    _run(program, rest, as_module)
    return 0


def _run(program: str, rest: list[str], as_module: bool) -> None:
    sys.argv[:] = [program, *rest]
    try:
        if as_module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        elif program.endswith(".py"):
            _look_beside(program)
            _run_file(program)
        else:  # compiled, a folder or an archive
            _look_beside(program)
            runpy.run_path(program, run_name="__main__")
    except SystemExit:
        raise
    except BaseException:
        _hide_runners()
        raise


def _run_file(script: str) -> None:
    """As runpy.run_path, but as Python itself has it: with an absolute ``__file__``, since a program may change its
    folder, and sys.argv[0] as it was given."""
    path = os.path.join(os.getcwd(), script)  # which Python does not normalise either
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec")
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main).update(__file__=path, __builtins__=builtins, __cached__=None)
    exec(code, vars(main))


def _look_beside(script: str) -> None:
    """A script's imports start in its own folder, where `python -m` has put the current one."""
    if getattr(sys.flags, "safe_path", False) or not os.path.isfile(script):
        return
    current, sys.path[0] = sys.path[0], str(Path(script).resolve().parent)
    if Path(current).resolve() == Path(__file__).resolve().parents[1]:
        sys.path.append(current)  # workers look for shmsync there


def _hide_runners() -> None:
    """Let the traceback begin where the program does."""
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename in _RUNNERS:
            trace = trace.tb_next
        show(kind, error.with_traceback(trace), trace)

    sys.excepthook = hook
