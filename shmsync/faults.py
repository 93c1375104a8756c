"""Faults on purpose: the step at which this process kills itself, for tests. Without SHMSYNC_CRASH_AT there is none.

`SHMSYNC_CRASH_AT=publish.store_row:2` ends the process with SIGKILL when it is about to make that step the second time.
The variable is read once, when this module is imported; objects made before have no steps to die at.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

_VARIABLE = "SHMSYNC_CRASH_AT"
_step, _left = "", 0
steps: set[str] = set()  # that an armed process has come by


def arm(text: str) -> None:
    """Die at a step, "name" or "name:number of times"; "" = live."""
    global _step, _left
    _step, _, times = text.partition(":")
    _left = int(times or 1)


def armed() -> bool:
    """Whether steps have to be said."""
    return bool(_step)


def at(step: str) -> None:
    """Say that a step is about to be made."""
    global _left
    if not _step:
        return
    steps.add(step)
    if step == _step:
        _left -= 1
        if not _left:
            os.kill(os.getpid(), signal.SIGKILL)


def watched(what: str, perform: Callable[[tuple[Any, ...]], Any]) -> Callable[[tuple[Any, ...]], Any]:
    """`perform` as it is, or with each of its operations as a step, "what.operation"."""
    if not _step:
        return perform

    def watching(operation: tuple[Any, ...]) -> Any:
        at(f"{what}.{operation[0]}")
        return perform(operation)

    return watching


arm(os.environ.get(_VARIABLE, ""))
