"""The command line: `python -m shmsync doctor | ls | inspect | top | verify | gc`, each with --json for programs, and
`run`, which runs a program of torchrl's with shmsync in it.

Exit codes: 0 = good; 1 = something is wrong; 2 = a wrong command or target, said in one line; with `run` the program's.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from . import doctor, files, leftovers, running, survey
from .errors import NothingPublished, ShmSyncError
from .handle import Handle
from .subscriber import Subscriber
from .survey import Survey

Row = Sequence[Any]
_PID_DIGITS = 11


class WrongTarget(ShmSyncError):
    """There is no channel where the user pointed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["run"]:  # whatever follows may be the program's
        return running.run(arguments[1:])
    options = _parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):  # names are whatever users have called them
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except WrongTarget as error:
        print("shmsync:", *str(error).splitlines(), file=sys.stderr)
        return 2
    except (ShmSyncError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            return 0
        print(f"shmsync: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m shmsync", description="Look at channels of shared weights.")
    parser.add_argument("--version", action="version", version=f"shmsync {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(run: Callable[[argparse.Namespace], int], text: str, target: bool = False) -> argparse.ArgumentParser:
        made = commands.add_parser(run.__name__.strip("_"), help=text, description=text)
        made.set_defaults(run=run)
        made.add_argument(
            "--json",
            action="store_true",
            help="for programs: a document per channel (inspect) or look (top)",
        )
        if target:
            made.add_argument("target", help="the owner's pid, a handle, or the path of a channel's file")
        return made

    command(_doctor, "whether this machine can run shmsync, and how well")
    command(_ls, "the live channels of this user")
    command(_inspect, "layout, slots and subscribers of a channel", target=True)
    top = command(_top, "versions and bytes per second, and lag, until interrupted")
    top.add_argument("--seconds", type=_seconds, default=1.0, help="between two looks")
    top.add_argument("--count", type=_count, default=0, help="so many looks; 0 = until interrupted")
    command(_verify, "compare the bytes of a channel with its checksums", target=True)
    gc = command(_gc, "remove what dead publishers with storage='file' have left, and nothing else")
    gc.add_argument("--dir", help="where; SHMSYNC_DIR or /dev/shm if not given")
    text = "run a program with shmsync in the place of torchrl's RPCWeightUpdater"
    commands.add_parser("run", help=text, usage=running.USAGE)
    return parser


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) < 1e6:
            return value
    raise argparse.ArgumentTypeError(f"Expected seconds above 0, got {text!r}")


def _count(text: str) -> int:
    with contextlib.suppress(ValueError):
        if (value := int(text)) >= 0:
            return value
    raise argparse.ArgumentTypeError(f"Expected a number of looks, got {text!r}")


def _version() -> str:
    try:
        return metadata.version("shmsync")
    except metadata.PackageNotFoundError:  # from a checkout that nobody installed
        return "0+unknown"


# ── Commands ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _doctor(options: argparse.Namespace) -> int:
    found = doctor.examine()
    _show(
        options, [asdict(finding) for finding in found], ("", "state", ""), [(f.what, f.state, f.text) for f in found]
    )
    return 1 if any(finding.state == doctor.BAD for finding in found) else 0


def _ls(options: argparse.Namespace) -> int:
    found = _surveys()
    if not found and not options.json:
        return _nothing()
    head = ("pid", "age", "version", "bytes", "slots", "subscribers", "lag")
    rows = [
        (s.pid, _age(s), s.version, _size(s.nbytes), len(s.slots), len(s.subscribers), s.lag if s.subscribers else "-")
        for s in found
    ]
    _show(options, [_summary(one) for one in found], head, rows)
    return 0


def _inspect(options: argparse.Namespace) -> int:
    for one in [survey.look(handle, time.time()) for handle in _targets(options.target)]:
        leaves = list(one.layout) if one.layout is not None else []
        if options.json:
            layout = [{"keys": f.keys, "dtype": str(f.dtype), "shape": f.shape, "nbytes": f.nbytes} for f in leaves]
            print(json.dumps({**_summary(one), "layout": layout}))
            continue
        state = "" if one.alive else ", its publisher is gone"
        print(f"channel of pid {one.pid}: version {one.version}, {_age(one)} old, {_size(one.nbytes)} in use{state}\n")
        _table(("leaf", "dtype", "shape", "bytes"), [(f.key, f.dtype, list(f.shape), _size(f.nbytes)) for f in leaves])
        _table(("slot", "version", "used by pid"), [(s.slot, s.version, _pids(s.pids)) for s in one.slots])
        head = ("pid", "worker", "name", "in use", "lag", "forwards", "switches")
        _table(
            head,
            [(s.pid, s.worker_id, s.name, s.used, s.lag, s.forwards, s.switches) for s in one.subscribers],
        )
    return 0


def _top(options: argparse.Namespace) -> int:
    before = {one.handle: one for one in _surveys()}
    looks = 0
    while not options.count or looks < options.count:
        time.sleep(options.seconds)
        now = {one.handle: one for one in _surveys()}
        rates = [_rate(before[key], one, options.seconds) for key, one in now.items() if key in before]
        before, looks = now, looks + 1
        if not rates and not options.json:
            _nothing()
            continue
        head = ("pid", "versions/s", "GB/s", "version", "subscribers", "lag")
        _show(options, rates, head, [tuple(rate.values()) for rate in rates])
        sys.stdout.flush()
    return 0


def _nothing() -> int:
    print("no live channel of this user", flush=True)
    return 0


def _verify(options: argparse.Namespace) -> int:
    answers = [_verified(handle) for handle in _targets(options.target)]
    _show(options, answers, ("pid", "versions", "checksums"), [tuple(answer.values()) for answer in answers])
    return 0


def _verified(handle: Handle) -> dict[str, Any]:
    """Opening a channel checks its structure; then its bytes are compared where there is anything to compare with."""
    seen = survey.look(handle, time.time())
    versions: list[int] = []
    if seen.checksum:
        with Subscriber(handle, listed=False) as subscriber, contextlib.suppress(NothingPublished):
            versions = subscriber.verify()
    return {
        "pid": handle.pid,
        "versions": versions or [seen.version],
        "checksums": "right" if seen.checksum else "none",
    }


def _gc(options: argparse.Namespace) -> int:
    where = Path(options.dir) if options.dir else files.folder()
    if not where.is_dir():
        raise WrongTarget(f"there is no directory {where}")
    gone = leftovers.remove(where.absolute())
    if not gone and not options.json:
        print(f"nothing to remove in {where}")
        return 0
    rows = [(one.path, one.pid if one.pid is not None else "-", _size(one.nbytes)) for one in gone]
    _show(options, [asdict(one) for one in gone], ("removed", "pid", "bytes"), rows)
    return 0


# ── Targets ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _targets(target: str) -> list[Handle]:
    """The channels of a pid, or the one of a handle or a file. Raises WrongTarget."""
    if not (target.isascii() and target.isdigit() and len(target) < _PID_DIGITS):
        try:
            path = "/" in target and ":" not in target.partition("/")[0]
            handle = _in_file(target) if path else Handle.parse(target)
            with Subscriber(handle, listed=False):
                return [handle]
        except (OSError, ShmSyncError) as error:
            raise WrongTarget(str(error)) from None
    found = survey.handles(int(target))
    if not found:
        raise WrongTarget(f"process {target} owns no channel that this user may open; `ls` shows those that there are")
    return found


def _in_file(path: str) -> Handle:
    try:
        return survey.at(os.path.abspath(path))[0]
    except (OSError, ShmSyncError) as error:
        raise WrongTarget(f"no channel's file: {error}") from None


def _surveys() -> list[Survey]:
    """All channels that can be looked at; one that ends meanwhile is none."""
    found = []
    for handle in survey.handles():
        try:
            found.append(survey.look(handle, time.time()))
        except (OSError, ShmSyncError):
            continue
    return found


# ── Output ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _summary(one: Survey) -> dict[str, Any]:
    plain = asdict(one)
    plain.pop("layout")
    return plain | {"lag": one.lag}


def _rate(before: Survey, now: Survey, seconds: float) -> dict[str, Any]:
    versions = (now.version - before.version) / seconds
    nbytes = now.layout.slot_nbytes if now.layout is not None else 0
    return {
        "pid": now.pid,
        "versions_per_second": round(versions, 2),
        "gigabytes_per_second": round(versions * nbytes / 1e9, 3),  # at most: a partial push writes less
        "version": now.version,
        "subscribers": len(now.subscribers),
        "lag": now.lag,
    }


def _show(options: argparse.Namespace, document: list[dict[str, Any]], head: Row, rows: Iterable[Row]) -> None:
    if options.json:
        print(json.dumps(document))
    else:
        _table(head, list(rows))


def _table(head: Row, rows: Sequence[Row]) -> None:
    """With rich where it is installed, else in plain columns."""
    cells = [[str(cell) for cell in row] for row in rows]
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        widths = [max(map(len, column)) for column in zip(map(str, head), *cells, strict=True)]
        for row in (head, *cells):
            print("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        print()
        return
    table = Table(*map(str, head), box=None, pad_edge=False, header_style="bold")
    for row in cells:
        table.add_row(*map(Text, row))  # not as markup, whatever is in it
    console = Console(soft_wrap=True)
    console.print(table)
    console.print()


def _size(nbytes: int) -> str:
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes} B"


def _age(one: Survey) -> str:
    seconds = int(one.age_seconds)
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _pids(pids: list[int]) -> str:
    return ", ".join(map(str, pids)) or "-"
