"""Two results files: has shmsync become slower, or anything else worse, beyond the spread?

Times are compared as ratios to the roofline of their own file, so that another machine or another day matters less.
Only shmsync's own series count; the rivals' are not ours to keep fast.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .names import OURS
from .results import Results, Series
from .stats import Spread, ratios, spread

# A change below this share is not worth a red run, however small the spread.
TOLERANCE = 0.05
# Memory differs a little from run to run: allocators, threads.
_TOLERANCE_NBYTES = 256 << 10
# Fewer samples than this of a time say nothing about its spread.
_ENOUGH = 5
# What depends on how the benchmark was run, or follows from other series.
_IGNORED = ("forwards while pushing", "pushes without pause", "messages", "messages, workers silent")

SAME, BETTER, WORSE, GONE, NEW = "no difference resolved", "better", "worse", "no longer measured", "new"


@dataclass(frozen=True)
class Change:
    """One series in both files. ``old``, ``new``: what is compared, None where it is missing."""

    series: Series
    old: Spread | None
    new: Spread | None
    verdict: str

    @property
    def line(self) -> str:
        """One row of the report."""
        group, workload, workers, rival, metric = self.series.key
        name = f"{group} {workload} x{workers} {rival}: {metric}"
        return f"{self.verdict:24} {name:72} {_text(self.old, self.series)} -> {_text(self.new, self.series)}"


def compare(old: Results, new: Results) -> list[Change]:
    """All changes of shmsync's series, the worst first."""
    before = {series.key: series for series in _ours(old)}
    after = {series.key: series for series in _ours(new)}
    changes = [_change(series, old, after.get(key), new) for key, series in before.items()]
    changes += [Change(series, None, _measure(series, new), NEW) for key, series in after.items() if key not in before]
    order = (WORSE, GONE, BETTER, NEW, SAME)
    return sorted(changes, key=lambda change: order.index(change.verdict))


def main(old: Path, new: Path) -> int:
    """Print the changes. 1 if something is worse beyond the spread, or no longer measured by a run of the same kind."""
    a, b = Results.load(old), Results.load(new)
    changes = compare(a, b)
    for line in report(changes, b):
        print(line)
    for failure in b.failures:
        print(f"failed in {new}: {failure.strip().splitlines()[-1]}")
    same_kind = a.about.get("quick") == b.about.get("quick")
    bad = {WORSE, GONE} if same_kind else {WORSE}
    return int(any(change.verdict in bad for change in changes))


def report(changes: Sequence[Change], new: Results) -> Iterable[str]:
    """What is to be said, line by line."""
    yield "times as ratios to the roofline of the same file; median (quartiles)"
    for change in changes:
        if change.verdict != SAME:
            yield change.line
    counts = {verdict: sum(c.verdict == verdict for c in changes) for verdict in (WORSE, GONE, BETTER, NEW, SAME)}
    yield ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    if not changes:
        yield "the files have no series in common"


def _ours(results: Results) -> list[Series]:
    return [s for s in results if s.rival in OURS and s.metric not in _IGNORED and s.samples]


def _change(series: Series, old: Results, other: Series | None, new: Results) -> Change:
    before = _measure(series, old)
    if other is None:
        return Change(series, before, None, GONE)
    after = _measure(other, new)
    if before is None or after is None:  # one file has no roofline for it
        return Change(series, before, after, SAME)
    timed = series.unit in ("s", "1/s")
    too_few = timed and min(len(series.samples), len(other.samples)) < _ENOUGH
    return Change(series, before, after, SAME if too_few else _verdict(series, before, after))


def _measure(series: Series, results: Results) -> Spread | None:
    """Ratios to the reference for times and rates; bytes and shares as they are."""
    if series.unit not in ("s", "1/s"):
        return series.spread
    reference = results.reference_of(series)
    return spread(ratios(series.samples, reference.samples)) if reference else None


def _verdict(series: Series, old: Spread, new: Spread) -> str:
    slack = _TOLERANCE_NBYTES if series.unit == "B" and series.metric != "message bytes" else 0.0
    differs = abs(new.median - old.median) > max(TOLERANCE * abs(old.median), slack)
    if not differs or old.overlaps(new):
        return SAME
    more_is_better = series.unit == "1/s"
    return BETTER if (new.median > old.median) == more_is_better else WORSE


def _text(found: Spread | None, series: Series) -> str:
    if found is None:
        return "-"
    unit = {"s": "x", "1/s": "x", "B": "B"}.get(series.unit, "")
    return f"{found.median:.4g}{unit} ({found.low:.4g} - {found.high:.4g})"
