"""The Markdown of a run: the machine, a table per comparison, what must hold, and where we lose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from . import lose, requirements
from .lose import quantity
from .names import TITLES
from .results import ROOFLINE, Results, Series
from .stats import ratios, spread
from .workloads import ALL

_PUSH_COLUMNS = {
    "push": "trainer may go on",
    "push, busy workers": "the same, workers busy",
    "first new forward": "last worker's first new forward",
    "mixed forwards": "forwards that saw two versions",
    "message bytes": "bytes sent per push",
    "trainer private": "trainer, private",
    "trainer shared": "trainer, shared",
    "worker private": "worker, private",
    "worker shared": "worker, shared",
    "all processes": "all processes",
}


def markdown(results: Results, plots: Sequence[str] = ()) -> str:
    """Everything, as one document."""
    lines = ["# Benchmark of shmsync", "", *_about(results), ""]
    for part in (_pushes, _copies, _subscribers, _micro, _collector, _steps):
        lines += [*part(results)]
    lines += [f"![{name}]({name})" for name in plots] + [""]
    lines += [*_must_hold(results), "", "## Where we lose", ""]
    for paragraph in lose.paragraphs(results):
        lines += [paragraph, ""]
    if results.notes or results.failures:
        lines += ["## Left out and failed", ""]
        lines += [f"* {note}" for note in results.notes]
        lines += [
            f"* FAILED: {failure.strip().splitlines()[0]} … {failure.strip().splitlines()[-1]}"
            for failure in results.failures
        ]
    return "\n".join(lines).rstrip() + "\n"


def _about(results: Results) -> Iterator[str]:
    about = results.about
    machine, versions = about.get("machine", {}), about.get("versions", {})
    kind = "quick" if about.get("quick") else "full"
    simd = ", ".join(machine.get("simd", []))
    yield f"A {kind} run of {about.get('time', '?')}, {about.get('seconds', 0) / 60:.0f} minutes, on"
    yield f"{machine.get('cpu', '?')} ({machine.get('usable_cores', '?')} cores, {simd}),"
    yield f"{machine.get('memory_gib', '?')} GiB, Linux {machine.get('kernel', '?')}, {machine.get('libc', '?')};"
    yield f"{', '.join(f'{name} {text}' for name, text in versions.items())};"
    yield f"{'with' if about.get('has_extension') else 'without'} the extension;"
    yield f"{machine.get('torch_threads', '?')} threads copy in the trainer, one in a worker."
    yield ""
    yield "Medians, with the quartiles in brackets. All rivals took turns in each round, each in processes of its own,"
    yield "and after each push every element in every worker was compared with what had been pushed. An `x` is the"
    yield "ratio to one plain copy of the same bytes into the same kind of memory, in the same rounds."
    load = machine.get("load_at_start", 0)
    if load > 0.5:
        yield ""
        yield f"**The machine was not idle: load {load} at the start. Don't trust absolute numbers of this run.**"


def _pushes(results: Results) -> Iterator[str]:
    for workload, workers in dict.fromkeys((s.workload, s.workers) for s in results.where(group="push")):
        series = results.where(group="push", workload=workload, workers=workers)
        metrics = [metric for metric in _PUSH_COLUMNS if any(s.metric == metric for s in series)]
        yield f"## Push: {_title(workload)}, {workers} worker{'s' * (workers > 1)}"
        yield ""
        rivals = list(dict.fromkeys(s.rival for s in series if s.rival != ROOFLINE))
        rows = [[TITLES[rival], *(_cell(results, series, rival, metric) for metric in metrics)] for rival in rivals]
        fastest = results.reference_of(series[0])
        if fastest is not None:
            rows.append([f"{TITLES[ROOFLINE]} ({fastest.metric})", _value(fastest), *[""] * (len(metrics) - 1)])
        yield from _table(["", *(_PUSH_COLUMNS[metric] for metric in metrics)], rows)


def _cell(results: Results, series: list[Series], rival: str, metric: str) -> str:
    found = next((s for s in series if (s.rival, s.metric) == (rival, metric)), None)
    if found is None:
        return "–"
    if metric == "mixed forwards":
        return f"{100 * found.spread.median:.2g} %"
    reference = results.reference_of(found) if metric == "push" else None
    times = f", {spread(ratios(found.samples, reference.samples)).median:.1f} x" if reference else ""
    return _value(found) + times


def _copies(results: Results) -> Iterator[str]:
    found = [s for group in ("copy", "cast") for s in results.where(group=group)]
    if not found:
        return
    yield "## The copy alone"
    yield ""
    rows = []
    for series in found:
        reference = results.reference_of(series)
        ratio = spread(ratios(series.samples, reference.samples)) if reference else None
        speed = ALL[series.workload].nbytes / series.spread.median / 1e9
        name = f"{TITLES[series.rival]}: {series.metric}"
        what = f"{_title(series.workload)}{', to bf16' if series.group == 'cast' else ''}"
        rows.append([what, name, _value(series), f"{speed:.1f}", f"{ratio.median:.2f} x" if ratio else "–"])
    yield from _table(["", "", "time", "GB/s", "of the roofline"], rows)


def _subscribers(results: Results) -> Iterator[str]:
    found = results.where(group="subscribers", metric="publish")
    if not found:
        return
    yield "## Publish, by the number of plain subscribers"
    yield ""
    rows, metrics = [], ("trainer beside its slots", "worker private", "all processes")
    for series in found:
        memory = [results.find(series.key._replace(metric=metric)) for metric in metrics]
        rows.append([str(series.workers), _value(series), *(_value(m) if m else "–" for m in memory)])
    yield from _table(["subscribers", "publish", "trainer beside its slots", "worker, private", "all processes"], rows)


def _micro(results: Results) -> Iterator[str]:
    found = results.where(group="micro")
    if not found:
        return
    yield "## Small costs"
    yield ""
    yield from _table(
        ["", "time"], [[s.metric if s.rival != ROOFLINE else "an unbound forward", _value(s)] for s in found]
    )


def _collector(results: Results) -> Iterator[str]:
    found = results.where(group="collector")
    if not found:
        return
    yield "## RPCCollector, 2 workers, a policy of 4 MB pushed after every batch of 400 frames"
    yield ""
    rows = []
    for series in found:
        reference = results.reference_of(series)
        ratio = spread(ratios(series.samples, reference.samples)) if reference else None
        text = f"{ratio.median:.2f} x ({ratio.low:.2f} – {ratio.high:.2f})" if ratio else "–"
        rows.append([TITLES[series.rival], _value(series), text])
    yield from _table(["", "frames per second", "by torchrl's RPCWeightUpdater"], rows)


def _steps(results: Results) -> Iterator[str]:
    found = results.where(group="steps", metric="mixed steps")
    if not found:
        return
    yield "## Steps of collectors with two processes, while 4 MB are pushed without pause"
    yield ""
    rows = []
    for series in found:
        stamps = results.find(series.key._replace(metric="wrong stamps"))
        counted = results.find(series.key._replace(metric="steps"))
        shares = [f"{100 * max(one.samples):.2g} %" if one else "–" for one in (series, stamps)]
        steps = f"{sum(counted.samples):.0f}" if counted else "–"
        rows.append([series.workload, TITLES[series.rival], *shares, steps])
    yield from _table(["", "", "saw two versions, worst round", "wrong stamp, worst round", "steps"], rows)


def _must_hold(results: Results) -> Iterator[str]:
    yield "## Must hold"
    yield ""
    found = requirements.check(results)
    yield from _table(
        ["", "limit", "measured", ""], [[r.text, r.limit, r.measured, _verdict(r.verdict)] for r in found]
    )
    if not results.about.get("has_extension"):
        yield "The limits of the copy engine are left out: this run was without the extension."


def _verdict(verdict: str) -> str:
    return f"**{verdict}**" if verdict == requirements.FAILS else verdict


def _value(series: Series) -> str:
    found = series.spread
    if found.low == found.high:
        return quantity(found.median, series.unit)
    low, high = quantity(found.low, series.unit), quantity(found.high, series.unit)
    return f"{quantity(found.median, series.unit)} ({low} – {high})"


def _title(workload: str) -> str:
    return ALL[workload].title if workload in ALL else workload


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'|'.join('---' for _ in head)}|"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""
