"""Where we lose: a paragraph made from the numbers, so that it can't be forgotten."""

from __future__ import annotations

from collections.abc import Iterator

from .names import OURS, TITLES
from .results import ROOFLINE, Key, Results, Series

# Less is better in each of these.
_METRICS = {
    "push": "until the trainer may go on",
    "push, busy workers": "until the trainer may go on, workers busy",
    "first new forward": "until the last worker's first new forward",
    "worker private": "private memory of a worker",
    "trainer private": "private memory of the trainer beyond its own weights",
    "trainer shared": "shared memory held by the trainer",
    "all processes": "memory of all processes beyond the trainer's own weights",
}


def paragraphs(results: Results) -> list[str]:
    """Sentences about every comparison in which some rival beats the better of ours beyond the spread, and ties."""
    lost, tied = [], []
    for cell, metric, series in _comparisons(results):
        ours = min((s for s in series if s.rival in OURS), key=_median, default=None)
        others = [s for s in series if s.rival not in OURS]
        if ours is None or not others:
            continue
        best = min(others, key=_median)
        if best.spread.median < ours.spread.median and not best.spread.overlaps(ours.spread):
            lost.append(_sentence(cell, metric, ours, best))
        elif best.spread.overlaps(ours.spread):
            tied.append(f"{cell}, {_METRICS[metric]}: {TITLES[ours.rival]} and {TITLES[best.rival]}")
    return [*_lost(lost), *_standing(results), *_tied(tied)]


def _comparisons(results: Results) -> Iterator[tuple[str, str, list[Series]]]:
    cells = dict.fromkeys((s.workload, s.workers) for s in results.where(group="push"))
    for workload, workers in cells:
        for metric in _METRICS:
            found = results.where(group="push", workload=workload, workers=workers, metric=metric)
            yield f"{workload} to {workers}", metric, [s for s in found if s.rival != ROOFLINE]


def _sentence(cell: str, metric: str, ours: Series, best: Series) -> str:
    mine, theirs = ours.spread.median, best.spread.median
    return (
        f"{cell}, {_METRICS[metric]}: {TITLES[best.rival]} {quantity(theirs, best.unit)}, "
        f"{TITLES[ours.rival]} {quantity(mine, ours.unit)}"
    )


def _lost(lost: list[str]) -> list[str]:
    if not lost:
        return ["In no comparison of this run did a rival beat shmsync beyond the spread."]
    return ["A rival is ahead, beyond the spread, in: " + "; ".join(lost) + "."]


def _standing(results: Results) -> list[str]:
    """What is so by design, with this run's numbers."""
    found = []
    cost = results.find(Key("subscribers", "leaves200", 8, "shmsync", "trainer shared"))
    if cost is not None:
        found.append(
            f"The trainer holds every slot: {quantity(cost.spread.median, 'B')} of shared memory for 105 MB of weights "
            "with 8 subscribers, where an RPC push keeps nothing in the trainer and a shared module one copy."
        )
    small = results.find(Key("push", "cartpole", 2, "shmsync", "push"))
    quiet = results.find(Key("push", "cartpole", 2, "shmsync-memory", "push"))
    if small is not None and quiet is not None:
        found.append(
            f"For a tiny policy (18 KB) an awaited push is the time of an RPC, {quantity(small.spread.median, 's')}; "
            f"only notify=memory avoids that ({quantity(quiet.spread.median, 's')}), and then nobody confirms."
        )
    return found


def _tied(tied: list[str]) -> list[str]:
    return (
        ["No difference resolved (quartiles overlap) with the best rival in: " + "; ".join(tied) + "."] if tied else []
    )


def quantity(value: float, unit: str) -> str:
    """A number with a unit that people read."""
    if unit == "s":
        for factor, name in ((1.0, "s"), (1e3, "ms")):
            if abs(value) * factor >= 1:
                return f"{value * factor:.3g} {name}"
        return f"{value * 1e6:.3g} µs"
    if unit == "B":
        for factor, name in ((2**30, "GB"), (2**20, "MB"), (2**10, "KB")):
            if abs(value) >= factor:
                return f"{value / factor:.3g} {name}"
        return f"{value:.0f} B"
    return f"{value:.3g}{'' if unit == '1' else ' ' + unit}"


def _median(series: Series) -> float:
    return series.spread.median
