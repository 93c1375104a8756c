"""`python -m shmsync run`: a program, unchanged, in which torchrl's names mean shmsync's classes."""

from __future__ import annotations

import builtins
import importlib.machinery
import io
import os
import pkgutil
import runpy
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

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
    if arguments and arguments[0].startswith("-m") and arguments[0] != "-m":  # as Python takes it too
        arguments = ["-m", arguments[0].removeprefix("-m"), *arguments[1:]]
    as_module = arguments[:1] == ["-m"]
    program, *rest = arguments[as_module:] or [""]
    if program in ("-h", "--help"):
        print(_HELP)
        return 0
    if not program or not (as_module or os.path.exists(program)):
        print(f"shmsync: {_nothing(program)}" if program else f"usage: {USAGE}", file=sys.stderr)
        return _WRONG
    try:
        install()
    except ShmSyncError as error:
        print(f"shmsync: {error}", file=sys.stderr)
        return 1
    _run(program, rest, as_module)
    return 0


def _nothing(program: str) -> str:
    hint = "; Python's own options go before `-m shmsync`, and a module after `-m`" if program[0] == "-" else ""
    return f"there is no script {program}{hint}"


def _run(program: str, rest: list[str], as_module: bool) -> None:
    sys.argv[:] = [program, *rest]
    main = _fresh_main()
    try:
        if as_module:
            runpy._run_module_as_main(program)  # type: ignore[attr-defined] # what `python -m` itself calls
        elif pkgutil.get_importer(program) is not None:  # a folder or an archive
            _leave_current()
            sys.path.insert(0, os.path.abspath(program))
            runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        else:
            if _leave_current():
                sys.path.insert(0, str(Path(program).resolve().parent))
            _run_file(program, main)
    except SystemExit:
        raise
    except BaseException:
        _hide_runners()
        raise


def _fresh_main() -> types.ModuleType:
    """The module that the program becomes, and stays: it is needed for pickling until the very end."""
    main = types.ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __annotations__={})
    # multiprocessing has the other name for it, by which children send back what they make of its classes.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    return main


def _run_file(script: str, main: types.ModuleType) -> None:
    """As runpy.run_path, but as Python itself has it: with an absolute ``__file__``, since a program may change its
    folder, and sys.argv[0] as it was given."""
    path = os.path.join(os.getcwd(), script)  # which Python does not normalise either
    with io.open_code(path) as file:
        text = file.read()  # of a pipe too, which can be read once
        code = pkgutil.read_code(io.BytesIO(text))  # of a compiled script
        if code is None:
            code = compile(text, path, "exec", dont_inherit=True)  # the program has its own `__future__`
            loader: Any = importlib.machinery.SourceFileLoader("__main__", path)
        else:
            loader = importlib.machinery.SourcelessFileLoader("__main__", path)
    vars(main).update(__file__=path, __cached__=None, __loader__=loader)
    exec(code, vars(main))


def _leave_current() -> bool:
    """Take the current folder from the path's start, if `python -m` has put it there: Python's -P does not allow it."""
    if getattr(sys.flags, "safe_path", False):
        return False
    current = sys.path.pop(0)
    if Path(current).resolve() == Path(__file__).resolve().parents[1]:
        sys.path.append(current)  # workers look for shmsync there
    return True


def _hide_runners() -> None:
    """Let the traceback begin where the program does."""
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename in _RUNNERS:
            trace = trace.tb_next
        show(kind, error.with_traceback(trace), trace)

    sys.excepthook = hook
