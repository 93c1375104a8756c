"""Measures pushes between processes on one GPU, prints a table and what must hold, and writes a JSON file.

`python -m bench.gpu [--out gpu.json]` takes under two minutes. It exits with 1 if something that must hold does not,
and with 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

from . import gpu_measures as measures
from .gpu_children import Follower, Receiver, SpawnedChild
from .gpu_measures import MANY, MIDDLE, SMALL, Figure

_WATCH_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Something that must hold, with what was measured."""

    text: str
    measured: str
    holds: bool

    def __str__(self) -> str:
        return f"{'PASS' if self.holds else 'FAIL'}: {self.text}: {self.measured}"


def main(argv: list[str] | None = None) -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="where the figures go, as JSON")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("Expected a CUDA device, got none", file=sys.stderr)
        return 2
    begin = time.monotonic()
    about = describe()
    figures, verdicts = run()
    about["seconds"] = round(time.monotonic() - begin, 1)
    print("\n".join(markdown(about, figures, verdicts)))
    rows = [{**dataclasses.asdict(f), "median": f.time.median, "ratio": f.ratio and f.ratio.median} for f in figures]
    found = {"about": about, "figures": rows, "must_hold": [dataclasses.asdict(v) for v in verdicts]}
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(verdict.holds for verdict in verdicts) else 1


def run() -> tuple[list[Figure], list[Verdict]]:
    """All measurements."""
    # Both processes start at once; the figures come one after the other.
    queue = torch.multiprocessing.get_context("spawn").Queue()
    worker, receiver = SpawnedChild("worker", Follower), SpawnedChild("receiver", Receiver, queue)
    try:
        big = measures.big()
        pushes = {shape: measures.same_device(worker, shape, rounds) for shape, rounds in _rounds(big)}
        figures = [figure for pair in pushes.values() for figure in pair]
        figures += [measures.not_awaited(worker, MIDDLE, 20)]
        figures += measures.to_host(MIDDLE, 20)
        figures += [measures.first_forward(worker, shape, 20) for shape in (SMALL, MIDDLE)]
        figures += [measures.torch_ipc(receiver, queue, MIDDLE, 10, flat) for flat in (False, True)]
        grown = measures.growth(worker, MIDDLE)
        wrong = measures.mixed(worker, MIDDLE, _WATCH_SECONDS)
    finally:
        for child in (worker, receiver):
            child.end()
    return figures, list(_verdicts(pushes[big][0], pushes[MANY][0], grown, wrong))


def _rounds(big: measures.Shape) -> Iterator[tuple[measures.Shape, int]]:
    yield from ((big, 9), (MANY, 30), (MIDDLE, 30), (SMALL, 50))


def _verdicts(big: Figure, many: Figure, grown: int, wrong: tuple[int, int, int]) -> Iterator[Verdict]:
    assert big.ratio is not None
    assert many.ratio is not None
    share = 1 / big.ratio.median
    size = f"{big.nbytes / 1e9:.3g} GB" + ("" if big.nbytes >= 9.9e9 else ", 10 GB do not fit")
    text = "10 GB to workers on the same device, at least 80 % of the device's own copy rate"
    yield Verdict(text, f"{100 * share:.0f} % ({size})", share >= 0.8)
    text = "2000 x 50 KB, at most 1.5 times one contiguous copy"
    yield Verdict(text, f"{many.ratio.median:.2f} times", many.ratio.median <= 1.5)
    yield Verdict("device memory over 50 pushes does not grow", f"{grown} bytes", grown <= 0)
    pushes, forwards, bad = wrong
    text = "no forward sees two versions, or goes back"
    yield Verdict(text, f"{bad} of {forwards} forwards during {pushes} pushes", bad == 0 and forwards > 0)


def describe() -> dict[str, Any]:
    """The machine and the versions."""
    import shmsync
    from shmsync import gathering

    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "gpu_memory": properties.total_memory,
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "shmsync": shmsync.__version__,
        "has_extension": bool(shmsync.has_extension),
        "gathered_by": gathering.name(0),
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
        return done.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "?"


def markdown(about: dict[str, Any], figures: list[Figure], verdicts: list[Verdict]) -> Iterator[str]:
    """The table and what must hold."""
    yield f"# Pushes on a GPU: {about['gpu']}"
    yield ""
    yield ", ".join(f"{name} {value}" for name, value in about.items() if name != "gpu")
    yield ""
    yield "Medians with quartiles. The ratio is to the time of the plain copy of the same bytes, in the same rounds."
    yield ""
    yield "| | time | GB/s | ratio |"
    yield "|---|---|---|---|"
    for figure in figures:
        ratio = figure.ratio
        yield (
            f"| {figure.title} | {_time(figure)} | {figure.nbytes / figure.time.median / 1e9:.1f} "
            f"| {f'{ratio.median:.2f} ({ratio.low:.2f} – {ratio.high:.2f})' if ratio else '–'} |"
        )
    yield ""
    yield from map(str, verdicts)


def _time(figure: Figure) -> str:
    found = figure.time
    return f"{1e3 * found.median:.3f} ms ({1e3 * found.low:.3f} – {1e3 * found.high:.3f})"


if __name__ == "__main__":
    sys.exit(main())
