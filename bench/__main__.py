"""The command line: run, compare, report."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

# Before torch is imported, here and in children: agents of torch RPC complain at length when processes end.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def main(argv: list[str] | None = None) -> int:
    """Exit code 0; 1 for a regression (compare) or a failure of shmsync itself (run); 2 for wrong arguments."""
    args = _parser().parse_args(argv)
    if args.command == "compare":
        from . import compare

        try:
            return compare.main(args.old, args.new)
        except (OSError, ValueError) as error:
            print(error, file=sys.stderr)
            return 2
    from . import run as running

    if args.command == "report":
        running.write(running.Results.load(args.results), args.results.parent, args.results.stem)
        return 0
    return running.run(args.quick, args.out or running.FOLDER, args.group, args.rival)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure, and write bench/results/latest.* (quick.* with --quick)")
    run.add_argument("--quick", action="store_true", help="fewer rounds and sizes, under five minutes")
    run.add_argument(
        "--group", action="append", default=[], help="only this: copy, push, subscribers, micro, collector, steps"
    )
    run.add_argument("--rival", action="append", default=[], help="only this rival in pushes; see bench/names.py")
    run.add_argument("--out", type=Path, help="folder for the results")
    compare = commands.add_parser("compare", help="exit 1 if the second file is worse than the first beyond the spread")
    compare.add_argument("old", type=Path)
    compare.add_argument("new", type=Path)
    report = commands.add_parser("report", help="write Markdown and plots of a results file anew")
    report.add_argument("results", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main())
