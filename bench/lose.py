"""Where we lose: paragraphs made from the numbers, so that it can't be forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .names import OURS, TITLES, UNCONFIRMED
from .results import ROOFLINE, Key, Results, Series
from .workloads import ALL

# Less is better in each of these.
_TIMES = {
    "push": "the time until the trainer may go on",
    "push, busy workers": "the same with busy workers",
    "first new forward": "the time until the last worker's first new forward",
}
_MEMORY = {
    "worker private": "a worker's private memory",
    "all processes": "the memory of all processes beyond the trainer's own weights",
}
# The threads and buffers of an RPC agent take as much, whatever the weights.
_NEGLIGIBLE_NBYTES = 4 << 20


@dataclass(frozen=True)
class Duel:
    """The best of ours against the best of the others, in one metric of one comparison."""

    ours: Series
    theirs: Series

    @property
    def lost(self) -> bool:
        """Beyond the spread, and by something that matters."""
        mine, other = self.ours.spread, self.theirs.spread
        slack = _NEGLIGIBLE_NBYTES if self.ours.unit == "B" else 0
        return other.median + slack < mine.median and not other.overlaps(mine)

    @property
    def tied(self) -> bool:
        """The quartiles overlap."""
        return self.ours.spread.overlaps(self.theirs.spread)

    @property
    def text(self) -> str:
        """Who against whom."""
        series = self.ours
        where = f"{ALL[series.workload].title} to {series.workers}"
        sides = (f"{TITLES[s.rival]} {quantity(s.spread.median, s.unit)}" for s in (self.theirs, self.ours))
        return f"{where} ({', '.join(sides)})"


def paragraphs(results: Results) -> list[str]:
    """What rivals do better beyond the spread, what is so by design, and where no difference was resolved."""
    found = {metric: list(_duels(results, metric)) for metric in (*_TIMES, *_MEMORY)}
    lost = {metric: [duel.text for duel in duels if duel.lost] for metric, duels in found.items()}
    tied = {metric: [duel.text for duel in duels if duel.tied and not duel.lost] for metric, duels in found.items()}
    return [*_lost(lost), *_standing(results), *_tied(tied)]


def _duels(results: Results, metric: str) -> Iterator[Duel]:
    """Those who confirm against each other, and those who don't."""
    cells = dict.fromkeys((s.workload, s.workers) for s in results.where(group="push"))
    for workload, workers in cells:
        found = results.where(group="push", workload=workload, workers=workers, metric=metric)
        found = [series for series in found if series.rival != ROOFLINE]
        fields = [[s for s in found if (s.rival in UNCONFIRMED) == which] for which in (False, True)]
        for field in fields if metric.startswith("push") else [found]:
            ours = min((s for s in field if s.rival in OURS), key=_median, default=None)
            theirs = min((s for s in field if s.rival not in OURS), key=_median, default=None)
            if ours is not None and theirs is not None:
                yield Duel(ours, theirs)


def _lost(lost: dict[str, list[str]]) -> Iterator[str]:
    if not any(lost.values()):
        yield "In no comparison of this run did a rival beat shmsync beyond the spread."
    for metric, texts in lost.items():
        if texts:
            yield f"A rival is ahead, beyond the spread, in {(_TIMES | _MEMORY)[metric]}: {'; '.join(texts)}."


def _standing(results: Results) -> Iterator[str]:
    """What is so by design, with this run's numbers."""
    cost = results.find(Key("subscribers", "leaves200", 8, "shmsync", "trainer shared"))
    if cost is not None:
        yield (
            f"The trainer holds every slot: {quantity(cost.spread.median, 'B')} of shared memory for 105 MB of weights "
            "with 8 subscribers, where an RPC push keeps nothing in the trainer and a shared module one copy."
        )
    small = results.find(Key("push", "cartpole", 2, "shmsync", "push"))
    quiet = results.find(Key("push", "cartpole", 2, "shmsync-memory", "push"))
    if small is not None and quiet is not None:
        yield (
            f"For a tiny policy (18 KB) an awaited push takes {quantity(small.spread.median, 's')}: sleeping workers "
            f"wake up to answer. Without answers (notify=memory) it takes {quantity(quiet.spread.median, 's')}."
        )


def _tied(tied: dict[str, list[str]]) -> Iterator[str]:
    texts = [f"{_TIMES[metric]}: {'; '.join(tied[metric])}" for metric in _TIMES if tied[metric]]
    if texts:
        yield f"No difference resolved (quartiles overlap) with the best rival in {'. In '.join(texts)}."


def quantity(value: float, unit: str) -> str:
    """A number with a unit that people read."""
    if unit == "s":
        for factor, name in ((1.0, "s"), (1e3, "ms")):
            if abs(value) * factor >= 1:
                return f"{_digits(value * factor)} {name}"
        return f"{_digits(value * 1e6)} µs"
    if unit == "B":
        for nbytes, name in ((2**30, "GB"), (2**20, "MB"), (2**10, "KB")):
            if abs(value) >= nbytes:
                return f"{_digits(value / nbytes)} {name}"
        return f"{value:.0f} B"
    return f"{_digits(value)}{'' if unit == '1' else ' ' + unit}"


def _digits(value: float) -> str:
    """Three of them, never as a power of ten."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _median(series: Series) -> float:
    return series.spread.median
