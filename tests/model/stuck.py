"""States from which nobody can bring the end about any more: deadlocks, and loops without a way out."""

from __future__ import annotations

from array import array

import numpy as np


def first_stuck(states: int, sources: array, targets: array, final: list[int]) -> int | None:
    """The first state (they come in order of distance) from which no final one can be reached; None = no such."""
    reaches = np.zeros(states, bool)
    reaches[final] = True
    begin, end = np.frombuffer(sources, np.int64), np.frombuffer(targets, np.int64)
    order = np.argsort(end, kind="stable")
    into, first = begin[order], np.searchsorted(end[order], np.arange(states + 1))
    front = np.flatnonzero(reaches)
    while len(front):
        before = np.concatenate([into[first[s] : first[s + 1]] for s in front.tolist()] or [np.empty(0, np.int64)])
        front = np.unique(before[~reaches[before]])
        reaches[front] = True
    stuck = np.flatnonzero(~reaches)
    return int(stuck[0]) if len(stuck) else None
