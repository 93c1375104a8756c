"""Pushing to workers: idle ones, busy ones, all the time; messages and memory. All rivals and the roofline in turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..copies import Roofline
from ..host import Host
from ..interleave import crew
from ..memory import available_nbytes
from ..processes import Child
from ..results import ROOFLINE, Key, Results
from ..rivals import PUSHING
from ..workloads import ALL

# Who comes first where memory is too short for all at once.
_ORDER = (
    *("shmsync", "torchrl-updater", "torchrl-shared-mem", "torchrl-rpc-scheme", "lock", "gloo", "shmsync-memory"),
    *("torchrl-multi-process", "ray"),
)
_PROCESS_NBYTES = 40 << 20
_ROOFLINE_FOOTPRINT = 6


@dataclass(frozen=True)
class Cell:
    """One comparison. ``busy``: rounds of `busy_pushes` pushes to busy workers; ``steady``: rounds of pushing without
    pause for `steady_seconds`."""

    workload: str
    workers: int
    rounds: int
    busy: int = 0
    busy_pushes: int = 2
    steady: int = 0
    steady_seconds: float = 2.0

    @property
    def where(self) -> str:
        """For people."""
        return f"push {self.workload} to {self.workers}"


def run(cell: Cell, results: Results, wanted: list[str]) -> None:
    """All phases of one cell."""
    names = affordable(cell, wanted, results)
    members: dict[str, Any] = {ROOFLINE: (Roofline, cell.workload)}
    members |= {name: (Host, PUSHING[name], cell.workload, cell.workers) for name in names}
    with crew(results, cell.where, members) as made:
        slots = made.in_order("start").get("shmsync", 2)
        made.rounds(1, lambda name, child: _warm_up(name, child, slots))
        made.rounds(cell.rounds, lambda name, child: _push(cell, results, name, child, slots))
        made.rounds(cell.busy, lambda name, child: _busy(cell, results, name, child))
        made.rounds(cell.steady, lambda name, child: _steady(cell, results, name, child))
        made.rounds(1, lambda name, child: _messages(cell, results, name, child))
        made.rounds(1, lambda name, child: _memory(cell, results, name, child))


def affordable(cell: Cell, wanted: list[str], results: Results) -> list[str]:
    """The rivals that are installed and for which there is memory together; the others are noted."""
    size, names, short = ALL[cell.workload].nbytes, [], []
    left = int(0.8 * available_nbytes()) - _ROOFLINE_FOOTPRINT * size
    for name in sorted(wanted, key=_ORDER.index):
        why = PUSHING[name].unavailable()
        if why is not None:
            results.notes += [text for text in (f"{name}: {why}",) if text not in results.notes]
            continue
        need = PUSHING[name].footprint(cell.workers) * size + (cell.workers + 1) * _PROCESS_NBYTES
        if need <= left:
            names.append(name)
            left -= need
        else:
            short.append(name)
    if short:
        results.notes.append(f"{cell.where}: left out, since memory is too short for all at once: {', '.join(short)}")
    return sorted(names, key=list(PUSHING).index)


def _warm_up(name: str, child: Child, slots: int) -> None:
    if name == ROOFLINE:
        child.call("copy", slots)
    else:
        child.call("push")


def _push(cell: Cell, results: Results, name: str, child: Child, slots: int) -> None:
    if name == ROOFLINE:
        for method, seconds in child.call("copy", slots).items():
            results.add(Key("push", cell.workload, cell.workers, name, method), "s", seconds)
    else:
        results.add(Key("push", cell.workload, cell.workers, name, "push"), "s", child.call("push"))


def _busy(cell: Cell, results: Results, name: str, child: Child) -> None:
    if name == ROOFLINE:
        return
    for pushed, seen in child.call("push_busy", cell.busy_pushes):
        results.add(Key("push", cell.workload, cell.workers, name, "push, busy workers"), "s", pushed)
        results.add(Key("push", cell.workload, cell.workers, name, "first new forward"), "s", seen)


def _steady(cell: Cell, results: Results, name: str, child: Child) -> None:
    if name == ROOFLINE:
        return
    counts = child.call("push_steadily", cell.steady_seconds)
    shares = {
        ("mixed forwards", "1"): counts["mixed"] / max(1, counts["forwards"]),
        ("forwards while pushing", "1/s"): counts["forwards"] / cell.steady_seconds,
        ("pushes without pause", "1/s"): counts["pushes"] / cell.steady_seconds,
    }
    for (metric, unit), value in shares.items():
        results.add(Key("push", cell.workload, cell.workers, name, metric), unit, value)


def _messages(cell: Cell, results: Results, name: str, child: Child) -> None:
    for doubt, whose in ((False, ""), (True, ", workers silent")):
        counted = None if name == ROOFLINE or (doubt and name != "shmsync") else child.call("messages", doubt)
        if counted is not None:
            where = Key("push", cell.workload, cell.workers, name, "")
            results.add(where._replace(metric="messages" + whose), "1", counted["messages"])
            results.add(where._replace(metric="message bytes" + whose), "B", counted["nbytes"])


def _memory(cell: Cell, results: Results, name: str, child: Child) -> None:
    if name != ROOFLINE:
        add_memory(results, Key("push", cell.workload, cell.workers, name, ""), child.call("memory"))


def add_memory(results: Results, where: Key, found: dict[str, Any]) -> None:
    """The memory of a trainer and its workers, as series."""
    everybody = [found["trainer"], *found["workers"]]
    for usage in found["workers"]:
        results.add(where._replace(metric="worker private"), "B", max(0, usage["anon"]))
        results.add(where._replace(metric="worker shared"), "B", max(0, usage["shmem"]))
    results.add(where._replace(metric="trainer private"), "B", max(0, found["trainer"]["anon"]))
    results.add(where._replace(metric="trainer shared"), "B", max(0, found["trainer"]["shmem"]))
    results.add(
        where._replace(metric="all processes"),
        "B",
        max(0, sum(usage["anon"] + usage["pss_shmem"] for usage in everybody)),
    )
