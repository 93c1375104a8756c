"""A soak: one trainer and six workers, killed, stopped and started again at random, every forward checked.

    python -m tests.soak --minutes 10 [--seed 3]

Prints what happened, and exits 1 if a forward mixed two versions or went back, if a forward or a push was held up for
over a second by another process, or if a byte of shared memory is left.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.soak.board import Board
from tests.soak.lives import PULSE_SECONDS, train, work

WORKERS = 6
TRAINER = WORKERS  # its place on the board
_fork_server = multiprocessing.get_context("forkserver")
_fork_server.set_forkserver_preload(["torch", "tensordict", "shmsync", "tests.soak.lives"])


class Crew:
    """The processes, each at its place. `kill` is followed by a successor at the same place."""

    def __init__(self, folder: Path, board: Board, seed: int) -> None:
        self._folder, self._board, self._seed = folder, board, seed
        self._processes: dict[int, BaseProcess] = {}
        self._started = 0
        for place in range(WORKERS + 1):
            self.start(place)

    def start(self, place: int) -> None:
        self._started += 1
        target = train if place == TRAINER else work
        arguments = (str(self._folder), place, self._seed + self._started)
        process = _fork_server.Process(target=target, args=arguments, daemon=True)
        process.start()
        self._processes[place] = process

    def kill(self, place: int) -> None:
        process = self._processes[place]
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        self.start(place)

    def pause(self, place: int, seconds: float) -> None:
        """SIGSTOP and SIGCONT; what the stopped process itself does meanwhile is nobody's fault."""
        pid = self._processes[place].pid or 0
        self._board.stops[place] += 1
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)

    def check(self) -> list[str]:
        """Who ended without having been killed."""
        return [f"place {place} ended with {p.exitcode}" for place, p in self._processes.items() if not p.is_alive()]

    def end(self) -> None:
        self._board.over[0] = 1
        for process in self._processes.values():
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()


def disturb(crew: Crew, board: Board, seconds: float, chance: random.Random) -> tuple[int, int, list[str]]:
    """Kills and stops until the time is over; how many of each, and who ended by itself."""
    kills = stops = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(chance.uniform(0.2, 0.9))
        if failed := crew.check():
            return kills, stops, failed
        place = chance.choice([*range(WORKERS), TRAINER])
        if chance.random() < 0.7:
            crew.kill(place)
            kills += 1
        else:
            crew.pause(place, chance.uniform(0.05, 0.8))
            stops += 1
    return kills, stops, crew.check()


def watch_the_machine(board: Board) -> None:
    """Count the pauses in which not even this thread, which only sleeps, could run."""
    while not board.over[0]:
        begin = time.monotonic()
        time.sleep(PULSE_SECONDS / 10)
        if time.monotonic() - begin > PULSE_SECONDS:
            board.pauses[0] += 1


def shared_bytes_left() -> int:
    """Of shmsync's memfds that any process still has open or mapped."""
    found: dict[int, int] = {}
    for fd in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(fd).startswith("/memfd:shmsync-"):
                info = os.stat(fd)
                found[info.st_ino] = info.st_blocks * 512
        except OSError:
            continue
    return sum(found.values())


def main() -> int:
    parser = argparse.ArgumentParser(description="Random kills and stops; every forward checked.")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        board = Board(Path(name), WORKERS + 1)
        threading.Thread(target=watch_the_machine, args=(board,), daemon=True).start()
        crew = Crew(Path(name), board, options.seed)
        try:
            kills, stops, failed = disturb(crew, board, 60 * options.minutes, random.Random(options.seed))
        finally:
            crew.end()
        time.sleep(0.5)
        left = shared_bytes_left()
        pauses = int(board.pauses[0])
        counts = {name: int(board.counts[name].sum()) for name in board.counts.dtype.names or ()}
    lines = {
        "forwards": counts["forwards"],
        "pushes": counts["pushes"],
        "kills": kills,
        "stops": stops,
        "trainers taken over": counts["moves"],
        "pauses of the machine": pauses,
        "mixed forwards": counts["mixed"],
        "forwards that went back": counts["back"],
        "held up for over 1 s": counts["blocked"],
        "bytes left": left,
    }
    for what, count in lines.items():
        print(f"{what:24}{count:>12,}")
    for text in failed:
        print(f"FAILED: {text}")
    bad = failed or any(lines[what] for what in list(lines)[6:]) or not counts["forwards"] or not counts["pushes"]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
