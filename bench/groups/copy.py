"""The copy alone: publish against plain copies of the same bytes into the same kind of memory, and casts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..copies import ListCopy, Publish, Roofline
from ..interleave import crew
from ..memory import available_nbytes
from ..processes import Child
from ..results import ROOFLINE, Key, Results
from ..workloads import ALL

# (source + buffers) of each member, in multiples of the weights; a half for bf16.
_FOOTPRINT = {"copy": 6 + 4 + 4, "cast": 4 + 4}
_CHECKSUM_FOOTPRINT = 4


@dataclass(frozen=True)
class Cell:
    """One comparison: ``group`` "copy" or "cast" (fp32 to bf16)."""

    group: str
    workload: str
    rounds: int


def run(cell: Cell, results: Results) -> None:
    """Rounds of all members. The number of buffers is the number of slots that shmsync takes."""
    room = 0.8 * available_nbytes() / ALL[cell.workload].nbytes
    if _FOOTPRINT[cell.group] > room:
        results.notes.append(f"{cell.group} {cell.workload}: left out, memory is too short")
        return
    members = _members(cell)
    if _FOOTPRINT[cell.group] + _CHECKSUM_FOOTPRINT > room and members.pop("shmsync-checksum", None):
        results.notes.append(f"{cell.group} {cell.workload}: without checksums, memory is too short")
    with crew(results, f"{cell.group} {cell.workload}", members) as made:
        made.rounds(3, lambda name, child: child.call("copy", 2))
        slots = made.children["shmsync"].call("slots") if "shmsync" in made.children else 2
        made.rounds(cell.rounds, lambda name, child: _copy(cell, results, name, child, slots))


def _members(cell: Cell) -> dict[str, Any]:
    if cell.group == "cast":
        return {"shmsync": (Publish, cell.workload, torch.bfloat16), "torch": (ListCopy, cell.workload, torch.bfloat16)}
    return {
        ROOFLINE: (Roofline, cell.workload),
        "shmsync": (Publish, cell.workload),
        "shmsync-checksum": (Publish, cell.workload, None, True),
        "torch": (ListCopy, cell.workload),
    }


def _copy(cell: Cell, results: Results, name: str, child: Child, slots: int) -> None:
    for metric, seconds in child.call("copy", slots).items():
        results.add(Key(cell.group, cell.workload, 0, name, metric), "s", seconds)
