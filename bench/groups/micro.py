"""The small costs of shmsync, in turn within one pair of processes. Their roofline is the call of a bare module."""

from __future__ import annotations

from dataclasses import dataclass

from ..interleave import crew
from ..micro import MicroPublisher
from ..processes import Child
from ..results import ROOFLINE, Key, Results


@dataclass(frozen=True)
class Cell:
    """``rounds`` of everything."""

    rounds: int


def run(cell: Cell, results: Results) -> None:
    """Rounds of overheads, switches and attachments."""
    with crew(results, "micro", {"shmsync": (MicroPublisher,)}) as made:
        made.together("start")
        made.rounds(1, lambda name, child: _measure(Results(), child))
        made.rounds(cell.rounds, lambda name, child: _measure(results, child))


def _measure(results: Results, child: Child) -> None:
    for method in ("overheads", "switches", "attaches"):
        for metric, seconds in child.call(method).items():
            rival = ROOFLINE if metric == "call" else "shmsync"
            results.add(Key("micro", "-", 1, rival, metric), "s", seconds)
