"""What a run measures: everything, or in under five minutes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from .groups import collector, copy, micro, push, subscribers
from .groups import steps as stepping
from .results import Results
from .rivals import PUSHING
from .stepping import WAYS

# Rivals need many seconds for a push to busy workers on a small machine; a run must end all the same.
PHASE_SECONDS = {True: 20.0, False: 180.0}


@dataclass(frozen=True)
class Step:
    """One comparison of a group."""

    group: str
    title: str
    run: Callable[[Results], None]


def steps(quick: bool, rivals: list[str] | None = None) -> list[Step]:
    """The comparisons in their order."""
    names = rivals or list(PUSHING)
    cells = _QUICK if quick else _FULL
    return [_step(cell, names) for cell in cells]


def _step(cell: Any, rivals: list[str]) -> Step:
    if isinstance(cell, push.Cell):
        return Step("push", cell.where, partial(push.run, cell, wanted=rivals))
    if isinstance(cell, copy.Cell):
        return Step("copy", f"{cell.group} {cell.workload}", partial(copy.run, cell))
    if isinstance(cell, subscribers.Cell):
        return Step("subscribers", f"publish to {cell.counts}", partial(subscribers.run, cell))
    if isinstance(cell, micro.Cell):
        return Step("micro", "small costs", partial(micro.run, cell))
    if isinstance(cell, stepping.Cell):
        return Step("steps", f"steps of collectors, {cell.way}", partial(stepping.run, cell))
    return Step("collector", "RPCCollector", partial(collector.run, cell))


_QUICK: list[Any] = [
    copy.Cell("copy", "kb200", 15),
    copy.Cell("copy", "mlp4", 15),
    copy.Cell("copy", "leaves200", 7),
    copy.Cell("copy", "pieces2000", 7),
    push.Cell("cartpole", 2, 9),
    push.Cell("mlp4", 2, 15, busy=3, steady=1, steady_seconds=1.0),
    push.Cell("transformer38", 2, 5, busy=1),
    push.Cell("leaves200", 8, 5, busy=2, busy_pushes=1, steady=1, steady_seconds=1.5),
    subscribers.Cell("leaves200", (1, 8, 32), 7),
    micro.Cell(7),
    collector.Cell(3, 3),
]

_FULL: list[Any] = [
    copy.Cell("copy", "kb200", 41),
    copy.Cell("copy", "mlp4", 41),
    copy.Cell("copy", "leaves200", 25),
    copy.Cell("copy", "pieces2000", 25),
    copy.Cell("copy", "gb1", 11),
    copy.Cell("cast", "gb1", 9),
    push.Cell("cartpole", 2, 31, busy=5, steady=2),
    push.Cell("mlp4", 2, 31, busy=8, steady=3),
    push.Cell("atari", 2, 21, busy=5),
    push.Cell("transformer340", 2, 9, busy=3),
    push.Cell("leaves200", 8, 15, busy=8, steady=3, steady_seconds=3.0),
    push.Cell("pieces2000", 2, 9, busy=3),
    push.Cell("gb1", 1, 5, busy=2, busy_pushes=1),
    subscribers.Cell("leaves200", (1, 8, 32), 25),
    micro.Cell(25),
    collector.Cell(5, 5),
    *(stepping.Cell(way, 3) for way in WAYS),
]
