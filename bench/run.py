"""A run: all steps of the plan, then JSON, Markdown and plots."""

from __future__ import annotations

import gc
import importlib
import time
from collections.abc import Sequence
from pathlib import Path

from . import machine, plan, plots, report
from .results import Results

FOLDER = Path(__file__).resolve().parent / "results"
# Imported before the first fork, so that no child imports it while it is measured.
_PRELOADED = (
    "shmsync.torchrl.updater",
    "tensordict.nn",
    "torch.distributed.rpc",
    "torchrl.collectors.distributed",
    "torchrl.weight_update",
)


def run(quick: bool, folder: Path, groups: Sequence[str] = (), rivals: Sequence[str] = ()) -> int:
    """Measure, write, and print where things are. 1 if one of shmsync's own processes failed."""
    for module in _PRELOADED:
        importlib.import_module(module)
    gc.freeze()  # what is there now stays; collecting it would copy its pages in every child
    options = {"quick": quick, "groups": list(groups), "rivals": list(rivals)}
    results = Results({**machine.describe(), **options, "phase_seconds": plan.PHASE_SECONDS[quick]})
    begin = time.monotonic()
    for step in plan.steps(quick, list(rivals)):
        if not groups or step.group in groups:
            _take(step, results, begin)
            results.about["seconds"] = round(time.monotonic() - begin)
            results.save(folder / "unfinished.json")
    (folder / "unfinished.json").unlink(missing_ok=True)
    write(results, folder, "quick" if quick else "latest")
    own = [failure for failure in results.failures if ", shmsync" in failure.splitlines()[0]]
    return int(bool(own))


def _take(step: plan.Step, results: Results, begin: float) -> None:
    print(f"[{time.monotonic() - begin:6.0f} s] {step.title}", flush=True)
    failed = len(results.failures)
    step.run(results)
    for failure in results.failures[failed:]:
        print(f"           FAILED {failure}", flush=True)


def write(results: Results, folder: Path, name: str) -> None:
    """The JSON under its time and as `name`, Markdown and plots as `name`."""
    stamp = str(results.about.get("time", "")).replace(":", "").replace("+0000", "")
    results.save(folder / f"{stamp}-{name}.json")
    results.save(folder / f"{name}.json")
    pictures = plots.draw(results, folder, name)
    (folder / f"{name}.md").write_text(report.markdown(results, pictures))
    print(f"wrote {folder / name}.md, {name}.json, {stamp}-{name}.json and {len(pictures)} plots")
