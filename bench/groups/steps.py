"""Steps of collectors while pushes go on without pause: how many saw two versions, and how many have a wrong stamp."""

from __future__ import annotations

from dataclasses import dataclass

from ..interleave import crew
from ..processes import Child
from ..results import Key, Results
from ..stepping import WAYS, StepHost


@dataclass(frozen=True)
class Cell:
    """One way to push, shmsync and torchrl in turn: ``rounds`` of `seconds` each."""

    way: str
    rounds: int
    seconds: float = 3.0


def run(cell: Cell, results: Results) -> None:
    """Rounds of both."""
    members = {rival: (StepHost, cell.way, rival) for rival in WAYS[cell.way]}
    with crew(results, f"steps, {cell.way}", members) as made:
        made.in_order("start")
        made.rounds(cell.rounds, lambda name, child: _watch(cell, results, name, child))


def _watch(cell: Cell, results: Results, name: str, child: Child) -> None:
    counts = child.call("watch", cell.seconds)
    where = Key("steps", cell.way, 2, name, "")
    for metric, unit, value in (
        ("mixed steps", "1", counts["mixed"] / max(1, counts["steps"])),
        ("wrong stamps", "1", counts["misstamped"] / max(1, counts["steps"])),
        ("steps", "1", counts["steps"]),
        ("pushes", "1", counts["pushes"]),
    ):
        results.add(where._replace(metric=metric), unit, value)
