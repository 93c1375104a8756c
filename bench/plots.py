"""PNG plots of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .names import OURS, TITLES
from .results import ROOFLINE, Key, Results, Series
from .workloads import ALL

_OURS, _THEIRS, _PLAIN = "#1b6ca8", "#b0b7bf", "#2e9e5b"


def draw(results: Results, folder: Path, prefix: str) -> list[str]:
    """Write all plots for which there are numbers; their file names."""
    import matplotlib

    matplotlib.use("Agg")
    drawers: dict[str, Callable[[Results, Any], bool]] = {
        "push": _points("push", "until the trainer may go on, ms"),
        "first-forward": _points("first new forward", "until the last worker's first new forward, ms"),
        "mixed": _mixed,
        "subscribers": _subscribers,
        "copy": _copy,
    }
    made = []
    for name, drawer in drawers.items():
        if file := _one(results, folder / f"{prefix}-{name}.png", drawer):
            made.append(file)
    return made


def _one(results: Results, path: Path, drawer: Callable[[Results, Any], bool]) -> str | None:
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(9, 4.5), layout="constrained")
    try:
        if not drawer(results, figure):
            return None
        figure.savefig(path, dpi=120)
        return path.name
    finally:
        plt.close(figure)


def _points(metric: str, label: str) -> Callable[[Results, Any], bool]:
    """One panel per workload, one point per rival, logarithmic, quartiles as whiskers."""

    def drawer(results: Results, figure: Any) -> bool:
        cells = list(dict.fromkeys((s.workload, s.workers) for s in results.where(group="push", metric=metric)))
        if not cells:
            return False
        figure.set_size_inches(3.2 + 2.1 * len(cells), 4.5)
        panels = figure.subplots(1, len(cells), sharey=True, squeeze=False)[0]
        names = [name for name in TITLES if any(results.where(group="push", metric=metric, rival=name))]
        roof = [ROOFLINE] if metric == "push" else []
        for panel, (workload, workers) in zip(panels, cells, strict=True):
            _panel(panel, results, (workload, workers, metric), names + roof)
            panel.set_title(f"{ALL[workload].title}\n{workers} worker{'s' * (workers > 1)}", fontsize=8)
        figure.supxlabel(label, fontsize=9)
        return True

    return drawer


def _panel(panel: Any, results: Results, cell: tuple[str, int, str], names: list[str]) -> None:
    workload, workers, metric = cell
    for place, name in enumerate(reversed(names)):
        series = results.find(Key("push", workload, workers, name, metric))
        if name == ROOFLINE:
            series = min(
                results.where(group="push", workload=workload, workers=workers, rival=ROOFLINE),
                key=lambda s: s.spread.median,
                default=None,
            )
        if series is not None:
            found = series.spread
            whiskers = [[1e3 * (found.median - found.low)], [1e3 * (found.high - found.median)]]
            panel.errorbar(1e3 * found.median, place, xerr=whiskers, fmt="o", color=_colour(name), capsize=3)
    panel.set_xscale("log")
    panel.grid(axis="x", which="both", color="#e6e6e6", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.set_yticks(range(len(names)), [TITLES[name] for name in reversed(names)], fontsize=8)
    panel.tick_params(axis="x", labelsize=8)


def _mixed(results: Results, figure: Any) -> bool:
    found = results.where(group="push", metric="mixed forwards")
    if not found:
        return False
    cells = list(dict.fromkeys((s.workload, s.workers) for s in found))
    names = [name for name in TITLES if any(s.rival == name for s in found)]
    axes, height = figure.subplots(), 0.8 / len(cells)
    for offset, (workload, workers) in enumerate(cells):
        values = [_percent(results.find(Key("push", workload, workers, name, "mixed forwards"))) for name in names]
        places = [place - offset * height for place in range(len(names), 0, -1)]
        label = f"{ALL[workload].title}, {workers} workers"
        bars = axes.barh(places, [value or 0.0 for value in values], height=height, label=label)
        texts = ["not measured" if value is None else f"{value:.1f}" for value in values]
        axes.bar_label(bars, texts, fontsize=7, padding=2)
    axes.set_yticks(range(len(names), 0, -1), [TITLES[name] for name in names], fontsize=8)
    axes.set_xlabel("forwards that saw two versions while the trainer pushed without pause, %", fontsize=9)
    axes.legend(fontsize=8)
    return True


def _subscribers(results: Results, figure: Any) -> bool:
    found = sorted(results.where(group="subscribers", metric="publish", rival="shmsync"), key=lambda s: s.workers)
    if not found:
        return False
    axes = figure.subplots()
    middle = [1e3 * s.spread.median for s in found]
    low = [m - 1e3 * s.spread.low for m, s in zip(middle, found, strict=True)]
    high = [1e3 * s.spread.high - m for m, s in zip(middle, found, strict=True)]
    axes.errorbar([s.workers for s in found], middle, yerr=[low, high], marker="o", color=_OURS, capsize=3)
    reference = results.reference_of(found[0])
    if reference is not None:
        axes.axhline(1e3 * reference.spread.median, color=_PLAIN, linestyle="--", label=TITLES[ROOFLINE])
        axes.legend(fontsize=8)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xticks([s.workers for s in found], [str(s.workers) for s in found])
    axes.set_xlabel("plain subscribers", fontsize=9)
    axes.set_ylabel("publish of 105 MB, ms", fontsize=9)
    return True


def _copy(results: Results, figure: Any) -> bool:
    workloads = list(dict.fromkeys(s.workload for s in results.where(group="copy")))
    if not workloads:
        return False
    axes = figure.subplots()
    shown = (("shmsync", "publish", _OURS), ("torch", "foreach", _THEIRS), (ROOFLINE, None, _PLAIN))
    for offset, (rival, metric, colour) in enumerate(shown):
        values = [_speed(results, workload, rival, metric) for workload in workloads]
        places = [place + 0.27 * (offset - 1) for place in range(len(workloads))]
        label = {"torch": "torch._foreach_copy_", "shmsync": "shmsync, publish"}.get(rival, TITLES[rival])
        bars = axes.bar(places, values, width=0.25, color=colour, label=label)
        axes.bar_label(bars, fmt="%.1f", fontsize=7)
    axes.set_xticks(range(len(workloads)), [ALL[workload].title for workload in workloads], fontsize=8)
    axes.set_ylabel("GB/s", fontsize=9)
    axes.legend(fontsize=8)
    return True


def _speed(results: Results, workload: str, rival: str, metric: str | None) -> float:
    found = results.where(group="copy", workload=workload, rival=rival, **({"metric": metric} if metric else {}))
    return max((ALL[workload].nbytes / s.spread.median / 1e9 for s in found), default=0.0)


def _percent(series: Series | None) -> float | None:
    return 100 * series.spread.median if series else None


def _colour(name: str) -> str:
    return _OURS if name in OURS else _PLAIN if name == ROOFLINE else _THEIRS
