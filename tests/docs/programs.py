"""The programs of a page, by the rules in CONTRIBUTING.md: written as files, run, and what they print compared."""

from __future__ import annotations

import difflib
import doctest
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.docs.markdown import ROOT, blocks

PROGRAM = "program.py"
TIMEOUT_SECONDS = 60.0
# Languages whose blocks are only to be read.
READ = {"diff", "console"}


class WrongPage(ValueError):
    """A page that does not keep the rules for blocks."""


@dataclass
class Step:
    """Something to run, at a line of its page, and what it should print; None = that is not shown."""

    command: list[str]
    line: int
    expected: str | None = None

    def expects(self, text: str) -> None:
        """It should print this too."""
        self.expected = (self.expected or "") + text


@dataclass
class Page:
    """The files that a page tells to write, and the steps that it tells to take."""

    files: dict[str, str]
    steps: list[Step]


def page(text: str) -> Page:
    """Read a page. Raises WrongPage, naming the line."""
    files: dict[str, str] = {}
    steps: list[Step] = []
    last: Step | None = None
    for block in blocks(text):
        if block.language == "python":
            name = block.title or PROGRAM
            if name == PROGRAM and name not in files:
                steps.append(Step([sys.executable, PROGRAM], block.line))
            last = steps[0] if name == PROGRAM else None
            files[name] = files.get(name, "") + block.text + "\n"
        elif block.language == "bash":
            last = Step(["bash", "-euo", "pipefail", "-c", block.text], block.line)
            steps.append(last)
        elif block.language == "text":
            if last is None and steps:
                raise WrongPage(f"line {block.line}: this output follows a file that is not run by itself")
            if last is not None:
                last.expects(block.text)
        elif block.language not in READ and not block.language.startswith("{"):
            raise WrongPage(f"line {block.line}: expected python, bash, text or one of {READ}, got {block.language!r}")
    _check(files, steps)
    return Page(files, steps)


def _check(files: dict[str, str], steps: list[Step]) -> None:
    if PROGRAM in files and steps[0].command[-1] != PROGRAM:
        raise WrongPage(f"line {steps[0].line}: commands come after the page's program")
    shown = "\n".join(step.command[-1] for step in steps)
    idle = [name for name in files if name not in shown]
    if idle:
        raise WrongPage(f"nothing runs {idle}")


def run(page: Page, folder: Path) -> None:
    """Write the files and take the steps. Raises AssertionError for one that fails, or prints something else."""
    for name, text in page.files.items():
        (folder / name).write_text(text)
    for step in page.steps:
        printed = _run(step, folder)
        if step.expected is not None:
            compare(step, printed)


def _run(step: Step, folder: Path) -> str:
    output, errors = folder / "stdout", folder / "stderr"
    with output.open("w") as out, errors.open("w") as err:
        process = subprocess.Popen(
            step.command,
            cwd=folder,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            code = process.wait(TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    ended = "did not end in time" if code is None else f"ended with {code}"
    assert code == 0, f"line {step.line}: {ended}\n{output.read_text()}\n{errors.read_text()}"
    return output.read_text()


def _environment() -> dict[str, str]:
    """As a user has it, with this shmsync, this Python, and no more threads than there are processes."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


def compare(step: Step, printed: str) -> None:
    """Compare as doctest does: `...` stands for any text."""
    expected = step.expected or ""
    if not doctest.OutputChecker().check_output(expected, printed, doctest.ELLIPSIS):
        lines = difflib.unified_diff(
            expected.splitlines(), printed.splitlines(), "the page", "the program", lineterm=""
        )
        raise AssertionError(f"line {step.line}: another output\n" + "\n".join(lines))
