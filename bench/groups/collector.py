"""Frames per second of a real RPCCollector that is updated after every batch."""

from __future__ import annotations

from dataclasses import dataclass

from ..collecting import UPDATERS, WORKERS, CollectorHost
from ..interleave import crew
from ..processes import Child
from ..results import Key, Results


@dataclass(frozen=True)
class Cell:
    """``rounds`` of `batches` batches each."""

    rounds: int
    batches: int


def run(cell: Cell, results: Results) -> None:
    """Rounds of a collector with each updater."""
    with crew(results, "collector", {name: (CollectorHost, name) for name in UPDATERS}) as made:
        made.together("start")
        made.rounds(1, lambda name, child: child.call("collect", 1))
        made.rounds(cell.rounds, lambda name, child: _collect(cell, results, name, child))


def _collect(cell: Cell, results: Results, name: str, child: Child) -> None:
    rate = child.call("collect", cell.batches)
    results.add(Key("collector", "-", WORKERS, name, "frames per second"), "1/s", rate)
