"""A publish against the number of plain subscribers, and what publisher and subscribers cost in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..copies import Roofline
from ..interleave import crew
from ..processes import Child
from ..results import ROOFLINE, Key, Results
from ..subscribers import PlainPublisher
from .push import add_memory


@dataclass(frozen=True)
class Cell:
    """One comparison: a publisher for each number of subscribers, in turn."""

    workload: str
    counts: tuple[int, ...]
    rounds: int


def run(cell: Cell, results: Results) -> None:
    """Rounds of all publishers and the roofline."""
    members: dict[str, Any] = {ROOFLINE: (Roofline, cell.workload)}
    members |= {str(count): (PlainPublisher, cell.workload, count) for count in cell.counts}
    with crew(results, f"publish {cell.workload}", members) as made:
        slots = made.in_order("start").get(str(cell.counts[0]), 2)
        made.rounds(1, lambda name, child: _publish(cell, Results(), name, child, slots))
        made.rounds(cell.rounds, lambda name, child: _publish(cell, results, name, child, slots))
        made.rounds(1, lambda name, child: _memory(cell, results, name, child))


def _publish(cell: Cell, results: Results, name: str, child: Child, slots: int) -> None:
    if name == ROOFLINE:
        for method, seconds in child.call("copy", slots).items():
            results.add(Key("subscribers", cell.workload, 0, ROOFLINE, method), "s", seconds)
    else:
        results.add(Key("subscribers", cell.workload, int(name), "shmsync", "publish"), "s", child.call("publish"))


def _memory(cell: Cell, results: Results, name: str, child: Child) -> None:
    if name == ROOFLINE:
        return
    found = child.call("memory")
    where = Key("subscribers", cell.workload, int(name), "shmsync", "")
    add_memory(results, where, found)
    trainer = found["trainer"]
    results.add(
        where._replace(metric="trainer beside its slots"),
        "B",
        trainer["anon"] + trainer["shmem"] - found["slots_nbytes"],
    )
