"""What the issues ask for in numbers, each with what this run measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .results import ROOFLINE, Key, Results, Series
from .stats import Spread, ratios, spread

HOLDS, FAILS, UNKNOWN = "holds", "does not hold", "not measured"

_EIGHT = Key("push", "leaves200", 8, "shmsync", "push")
_TWO = Key("push", "mlp4", 2, "shmsync", "push")
_MICRO = Key("micro", "-", 1, "shmsync", "")
_PLAIN = Key("subscribers", "leaves200", 8, "shmsync", "")
_NBYTES = 200 * 375 * 350 * 4  # of leaves200


@dataclass(frozen=True)
class Requirement:
    """``limit`` and ``measured`` are text for people; ``verdict``: one of HOLDS, FAILS, UNKNOWN."""

    text: str
    limit: str
    measured: str = UNKNOWN
    verdict: str = UNKNOWN


@dataclass(frozen=True)
class Limit:
    """What is asked of a number: at most `value`, shown by `form` after `text`."""

    text: str
    value: float
    form: str
    shown: str

    def judge(self, found: Spread | None) -> Requirement:
        """By the median."""
        if found is None:
            return Requirement(self.text, self.shown)
        show: Callable[[float], str] = self.form.format
        measured = f"{show(found.median)} ({show(found.low)} – {show(found.high)})"
        return Requirement(self.text, self.shown, measured, HOLDS if found.median <= self.value else FAILS)


def check(results: Results) -> list[Requirement]:
    """All of them; those of the copy engine only where it was there."""
    found = [*_spine(results)]
    if results.about.get("has_extension"):
        found += _engine(results)
    return found


def _spine(results: Results) -> Iterator[Requirement]:
    """With the extension and without it."""
    yield _faster(results, "105 MB to 8 workers, awaited", _EIGHT, _EIGHT._replace(rival="torchrl-updater"), 12)
    yield _faster(results, "4 MB to 2 workers, awaited", _TWO, _TWO._replace(rival="torchrl-updater"), 4)
    yield _independent(results)
    beside = results.where(group="subscribers", rival="shmsync", metric="trainer beside its slots")
    most = max((series.spread for series in beside), key=lambda s: s.median, default=None)
    limit = Limit("trainer memory beside its slots", 1.0, "{:.2f} MB", "at most 1 MB")
    yield limit.judge(_times(most, 2**-20))
    private = results.find(_PLAIN._replace(metric="worker private"))
    limit = Limit("private memory of a worker, for 105 MB of weights", 2.0, "{:.2f} %", "under 2 %")
    yield limit.judge(_scaled(private, 100 / _NBYTES))
    yield _messages(results)
    for text, metric, microseconds in (
        *((f"forward with no news, {n} parameters", f"forward overhead, {n} parameters", 5) for n in (10, 200, 2000)),
        ("re-pointing 200 parameters, in a loop", "re-point kb200, in a loop", 100),
        ("re-pointing 200 parameters, pushes right after each other", "re-point kb200, warm", 100),
        ("re-pointing 200 parameters of 105 MB, out of the caches", "re-point leaves200", 100),
        ("whole switch of 105 MB to a mapped slot", "switch leaves200", 1000),
    ):
        limit = Limit(text, microseconds, "{:.1f} µs", f"under {microseconds} µs")
        yield limit.judge(_scaled(results.find(_MICRO._replace(metric=metric)), 1e6))
    yield _true_steps(results)


def _engine(results: Results) -> Iterator[Requirement]:
    """With the extension only."""
    for text, workload, factor in (
        ("publish 105 MB, by the roofline", "leaves200", 1.10),
        ("publish 1 GB, by the roofline", "gb1", 1.10),
        ("publish 4 MB, by the roofline", "mlp4", 1.25),
        ("publish 2000 x 50 KB, by the roofline of 100 MB", "pieces2000", 1.25),
    ):
        series = results.find(Key("copy", workload, 0, "shmsync", "publish"))
        yield Limit(text, factor, "{:.2f} x", f"at most {factor:.2f} x").judge(_by_roofline(results, series))
    pieces, cast = Key("copy", "pieces2000", 0, "shmsync", "publish"), Key("cast", "gb1", 0, "shmsync", "publish")
    torchs = {"rival": "torch", "metric": "foreach"}
    yield _faster(results, "publish 2000 x 50 KB", pieces, pieces._replace(**torchs), 3)
    copying = results.find(Key("copy", "kb200", 0, "shmsync", "copying"))
    yield Limit("copying in a publish of 200 x 1 KB", 30, "{:.0f} µs", "under 30 µs").judge(_scaled(copying, 1e6))
    yield _faster(results, "publish of 1 GB cast to bf16", cast, cast._replace(**torchs), 1.4)
    for rival, factor in (("torchrl-updater", 20), ("torchrl-rpc-scheme", 20), ("torchrl-shared-mem", 5)):
        yield _faster(results, "105 MB to 8 workers, awaited", _EIGHT, _EIGHT._replace(rival=rival), factor)
    theirs, memory = _TWO._replace(rival="torchrl-updater"), _TWO._replace(rival="shmsync-memory")
    yield _faster(results, "4 MB to 2 workers, awaited", _TWO, theirs, 6)
    yield _faster(results, "4 MB to 2 workers, notify=memory", memory, theirs, 15)
    yield _no_worse(results)
    yield _never_mixed(results)


def _independent(results: Results) -> Requirement:
    text, limit = "publish of 105 MB to 1, 8, 32 plain subscribers", "within 15 %"
    found = results.where(group="subscribers", workload="leaves200", rival="shmsync", metric="publish")
    if len(found) < 2:
        return Requirement(text, limit)
    medians = [series.spread.median for series in sorted(found, key=lambda s: s.workers)]
    factor = max(medians) / min(medians)
    times = ", ".join(f"{1e3 * seconds:.1f} ms" for seconds in medians)
    return Requirement(text, limit, f"{times}: {100 * (factor - 1):.0f} % apart", HOLDS if factor <= 1.15 else FAILS)


def _messages(results: Results) -> Requirement:
    text, limit = "one notification by message, for every size of policy", "under 512 bytes, all the same"
    sizes: dict[str, float] = {}
    for series in results.where(group="push", rival="shmsync", metric="message bytes, workers silent"):
        sent = results.find(series.key._replace(metric="messages, workers silent"))
        if sent is not None and sent.samples[0]:
            sizes[series.workload] = series.samples[0] / sent.samples[0]
    if not sizes:
        return Requirement(text, limit)
    most, least = max(sizes.values()), min(sizes.values())
    measured = f"{least:.0f} – {most:.0f} bytes in {len(sizes)} workloads" if most > least else f"{most:.0f} bytes"
    # A version number of more digits pickles as a byte or two more, whatever the size of the policy.
    return Requirement(text, limit, measured, HOLDS if most < 512 and most - least <= 8 else FAILS)


def _no_worse(results: Results) -> Requirement:
    text, limit = "publish to the last first new forward, 105 MB, 8 busy workers", "no worse than any rival"
    found = results.where(group="push", workload="leaves200", workers=8, metric="first new forward")
    ours = [s for s in found if s.rival == "shmsync"]
    others = [s for s in found if not _is_ours(s)]
    if not ours or not others:
        return Requirement(text, limit)
    best = min(others, key=lambda s: s.spread.median)
    mine, theirs = ours[0].spread, best.spread
    holds = mine.median <= theirs.median or mine.overlaps(theirs)
    measured = f"{1e3 * mine.median:.0f} ms, best rival ({best.rival}) {1e3 * theirs.median:.0f} ms"
    return Requirement(text, limit, measured, HOLDS if holds else FAILS)


def _never_mixed(results: Results) -> Requirement:
    text, limit = "forwards that saw two versions while pushing without pause", "0"
    found = results.where(group="push", metric="mixed forwards")
    ours = [sample for series in found if _is_ours(series) for sample in series.samples]
    if not ours:
        return Requirement(text, limit)
    theirs: dict[str, float] = {}
    for series in found:
        if not _is_ours(series):
            theirs[series.rival] = max(theirs.get(series.rival, 0.0), *series.samples)
    others = ", ".join(f"{rival} {100 * share:.1f} %" for rival, share in theirs.items() if share)
    measured = f"{100 * max(ours):.2g} %; rivals' worst: {others or 'none'}"
    return Requirement(text, limit, measured, HOLDS if max(ours) == 0 else FAILS)


def _true_steps(results: Results) -> Requirement:
    text, limit = "steps of collectors that saw two versions, or have a wrong stamp, while pushing without pause", "0"
    found = [s for metric in ("mixed steps", "wrong stamps") for s in results.where(group="steps", metric=metric)]
    ours, theirs = ([x for s in found if _is_ours(s) is own for x in s.samples] for own in (True, False))
    if not ours:
        return Requirement(text, limit)
    measured = f"{100 * max(ours):.2g} %; torchrl's worst: {100 * max(theirs, default=0.0):.2g} %"
    return Requirement(text, limit, measured, HOLDS if max(ours) == 0 else FAILS)


def _faster(results: Results, text: str, ours: Key, theirs: Key, factor: float) -> Requirement:
    """At least `factor` times, by the median of the rounds' ratios."""
    limit = f"at least {factor:g} x faster than {theirs.rival}"
    mine, other = results.find(ours), results.find(theirs)
    if mine is None or other is None:
        return Requirement(text, limit)
    found = spread(ratios(other.samples, mine.samples))
    times = f"{1e3 * mine.spread.median:.2f} ms against {1e3 * other.spread.median:.2f} ms"
    measured = f"{found.median:.1f} x ({found.low:.1f} – {found.high:.1f}); {times}"
    return Requirement(text, limit, measured, HOLDS if found.median >= factor else FAILS)


def _is_ours(series: Series) -> bool:
    return series.rival.startswith("shmsync")


def _times(found: Spread | None, factor: float) -> Spread | None:
    return found and Spread(factor * found.low, factor * found.median, factor * found.high)


def _scaled(series: Series | None, factor: float) -> Spread | None:
    return _times(series.spread, factor) if series else None


def _by_roofline(results: Results, series: Series | None) -> Spread | None:
    reference = results.reference_of(series) if series else None
    if series is None or reference is None or reference.rival != ROOFLINE:
        return None
    return spread(ratios(series.samples, reference.samples))
