"""Explores by hand: `python -m tests.model [--large] [NAME ...]`; all scopes without names."""

from __future__ import annotations

import argparse
import sys

from shmsync import slots

from .explorer import Explorer
from .scopes import LARGE, SCOPES


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.model", description="Explore the slot protocol.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="scopes; none = all")
    parser.add_argument("--large", action="store_true", help="the large scopes too: minutes, and gigabytes of memory")
    options = parser.parse_args()
    scopes = [s for s in SCOPES + LARGE * options.large if not options.names or s.name in options.names]
    reports = []
    for scope in scopes:
        reports.append(Explorer(scope.build(slots)).run())
        print(reports[-1], flush=True)
    states, seconds = sum(r.states for r in reports), sum(r.seconds for r in reports)
    print(f"{len(reports)} scopes: {states} states, {seconds:.0f} s")
    return 1 if not reports or any(report.violation for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
