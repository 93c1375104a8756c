"""What the CartPole example shows: progress while it runs, a table and a learning curve at its end."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

EPISODES = 50  # the mean return is that of the last so many training episodes
SECONDS_BETWEEN_LINES = 5.0
_BIG = 512  # width of a policy from which on its pushes are worth looking at


@dataclass(frozen=True)
class Push:
    """One push of the weights. What torchrl's updater doesn't tell is None.

    Args:
        version: of the weights.
        seconds: from the call to its return.
        lag: versions that the slowest worker is behind after it.
        nbytes: copied, once, whatever the number of workers.
        notification_nbytes: sent to all workers together.
        phases: seconds per phase of the push.
    """

    version: int
    seconds: float
    lag: int | None = None
    nbytes: int | None = None
    notification_nbytes: int | None = None
    phases: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """The state of a run after one batch: frames and seconds since its start, and the push that ended it."""

    frames: int
    seconds: float
    mean_return: float
    push: Push


@dataclass
class Run:
    """A whole run: what was asked for, and then what came of it.

    Args:
        signals: numbers of the signals that asked for its end.
        start: reading of `time.perf_counter()`.
        reached: whether the target was reached.
        evaluation: returns of the trained policy.
    """

    args: argparse.Namespace
    workers: int
    policy_nbytes: int
    signals: list[int]
    start: float = field(default_factory=time.perf_counter)
    steps: list[Step] = field(default_factory=list)
    reached: bool = False
    evaluation: list[float] = field(default_factory=list)

    def elapsed(self) -> float:
        return time.perf_counter() - self.start

    @property
    def frames(self) -> int:
        return self.steps[-1].frames if self.steps else 0

    @property
    def seconds(self) -> float:
        return self.steps[-1].seconds


@contextmanager
def progress(target: float) -> Iterator[Callable[[Step], None]]:
    """Yields `show(step)`: it moves a bar in a terminal, and prints a line now and then elsewhere."""
    console = Console()
    if not console.is_terminal:
        yield _lines()
        return
    columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn()]
    with Progress(*columns, console=console, refresh_per_second=4) as bar:
        task = bar.add_task("return", total=target, state="starting the workers")
        yield lambda step: bar.update(task, completed=min(step.mean_return, target), state=_describe(step))


def _lines() -> Callable[[Step], None]:
    printed_at = -SECONDS_BETWEEN_LINES

    def show(step: Step) -> None:
        nonlocal printed_at
        if step.seconds - printed_at >= SECONDS_BETWEEN_LINES:
            printed_at = step.seconds
            print(f"{step.seconds:6.1f} s  return {_describe(step)}", flush=True)

    return show


def _describe(step: Step) -> str:
    push = step.push
    lag = "-" if push.lag is None else push.lag
    return (
        f"{step.mean_return:5.1f}  version {push.version}  lag {lag}"
        f"  push {push.seconds * 1e3:.1f} ms  {step.frames:,} frames"
    )


def conclude(run: Run, curve: Path) -> None:
    """Print the table of a run of one step or more, and a sentence on what to make of it."""
    table = Table(title=f"CartPole-v1 · {_updater_name(run)}", show_header=False)
    for name, value in [*_push_rows(run), *_run_rows(run), ("learning curve", str(curve))]:
        table.add_row(name, value)
    console = Console()
    console.print(table)
    if run.reached and run.args.hidden < _BIG:
        console.print(
            "With a policy as small as this, pushes are a small share of the run with either updater. What differs is "
            "the time of a push; --hidden 1024 makes that visible.",
            soft_wrap=True,
        )
    if not run.reached:
        console.print(f"Target not reached: a mean return of {run.args.target:g} in {run.args.max_seconds:g} s.")


def _updater_name(run: Run) -> str:
    mode = "async" if run.args.is_async else "sync"
    notify = f", notify={run.args.notify}" if run.args.updater == "shmsync" else ""
    return f"{run.args.updater}.RPCWeightUpdater{notify} · {run.workers} workers, {mode}"


def _push_rows(run: Run) -> list[tuple[str, str]]:
    pushes = [step.push for step in run.steps]
    seconds = [push.seconds for push in pushes]
    return [
        ("policy", f"{_size(run.policy_nbytes)} (--hidden {run.args.hidden})"),
        ("pushes", f"{len(pushes)}"),
        *_byte_rows(run, pushes),
        ("time in pushes", f"{sum(seconds):.2f} s, median {statistics.median(seconds) * 1e3:.2f} ms"),
        *_phase_rows(pushes),
        ("share of the run", f"{sum(seconds) / run.seconds:.1%}"),
    ]


def _byte_rows(run: Run, pushes: list[Push]) -> list[tuple[str, str]]:
    if run.args.updater == "torchrl":
        sent = run.workers * run.policy_nbytes * len(pushes)
        return [("bytes through RPC", f"{_size(sent)} (computed: workers x policy x pushes)")]
    copied = sum(push.nbytes or 0 for push in pushes)
    notified = sum(push.notification_nbytes or 0 for push in pushes)
    return [
        ("bytes copied", f"{_size(copied)} (once per push, for all workers)"),
        ("bytes in notifications", _size(notified)),
    ]


def _phase_rows(pushes: list[Push]) -> list[tuple[str, str]]:
    medians = {phase: statistics.median(push.phases.get(phase, 0.0) for push in pushes) for phase in pushes[-1].phases}
    return [(f"  {phase}, median", f"{seconds * 1e3:.2f} ms") for phase, seconds in medians.items()]


def _run_rows(run: Run) -> list[tuple[str, str]]:
    worst, mean = min(run.evaluation), statistics.fmean(run.evaluation)
    return [
        ("wall time", f"{run.seconds:.1f} s (starting the workers included)"),
        ("frames", f"{run.frames:,}"),
        ("final return", f"{run.steps[-1].mean_return:.1f} (mean of the last {EPISODES} training episodes)"),
        ("evaluation", f"{mean:.1f} (deterministic, {len(run.evaluation)} episodes, worst {worst:.0f})"),
    ]


def _size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} GB"


def save_curve(run: Run) -> Path:
    """Draw the mean return against frames and against seconds; the path of the PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # here: workers import this module too
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2, sharey=True)
    returns = [step.mean_return for step in run.steps]
    for axis, name in zip(axes, ("frames", "seconds"), strict=True):
        axis.plot([getattr(step, name) for step in run.steps], returns, marker=".", label="training")
        axis.axhline(run.args.target, linestyle="--", color="gray", label=f"target {run.args.target:g}")
        axis.set_xlabel(name)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(f"mean return of the last {EPISODES} episodes")
    axes[0].set_ylim(0, 500)
    axes[0].legend(loc="lower right")
    figure.suptitle(f"CartPole-v1 · {_updater_name(run)} · seed {run.args.seed}")
    run.args.out.mkdir(parents=True, exist_ok=True)
    path = run.args.out / f"cartpole-{run.args.updater}.png"
    figure.savefig(path, dpi=150)
    return path
