"""What programs tell the explorer: their choices, and what the checks have to know."""

from __future__ import annotations

from typing import Any

from .outcomes import Here, Outcome, text
from .state import Violation
from .words import version_of


class Asides:
    """Nobody but the explorer sees these."""

    leaves: int
    strict: bool

    def choose(self, here: Here, *options: Any) -> list[Outcome]:
        return [here.gives(option, f"chooses {option}") for option in options]

    # --- the publisher's

    def attempt(self, here: Here, everybody: bool, changed: tuple[int, ...]) -> Outcome:
        """A publish begins: its data are numbered apart from its version."""
        number, full = here.process.attempt + 1, here.process.full
        goal = tuple(number if leaf in changed else full[leaf] for leaf in range(self.leaves))
        return here.keeps(attempt=number, everybody=everybody, goal=goal, armed=True)

    def outcome(self, here: Here, rows: tuple[int, ...], version: int, raised: bool) -> Outcome:
        """4: a publish has ended, by an exception or not: it must have happened wholly or not at all."""
        moved = {version_of(here.shared.rows[row]) == version for row in rows}
        if len(moved) > 1 or (not raised and moved != {True}):
            raise Violation(f"4: the publish of version {version} has ended, and rows are {here.shared.rows}")
        self._holds_nothing(here)
        return here.keeps(full=here.process.goal if moved == {True} else here.process.full, goal=(), armed=False)

    def give_back_begins(self, here: Here) -> Outcome:
        return here.keeps(armed=True)

    def give_back_ends(self, here: Here) -> Outcome:
        self._holds_nothing(here)
        return here.keeps(armed=False)

    def _holds_nothing(self, here: Here) -> None:
        if self.strict and here.shared.holds(here.thread.process):
            raise Violation("4: the publisher has kept a lock")

    # --- a subscriber's

    def join(self, here: Here, rows: tuple[int, ...]) -> Outcome:
        """A subscriber attaches. Whatever it follows, it is not older than what its worker has been sent."""
        return here.keeps(newest=self._sent(here, rows))

    def floor(self, here: Here, rows: tuple[int, ...]) -> Outcome:
        """What an acquire that begins now must not be older than: what this subscriber has had, or was sent."""
        return here.gives(max(here.process.newest, self._sent(here, rows)))

    def acquired(self, here: Here, word: int, floor: int) -> Outcome:
        if word < floor:
            raise Violation(f"5: this subscriber had or was sent {text(floor)} before it acquired {text(word)}")
        return here.keeps(newest=max(word, here.process.newest))

    def hold(self, here: Here, word: int) -> Outcome:
        """A user has a lease."""
        return here.keeps(leases=tuple(sorted((*here.process.leases, word))))

    def let_go(self, here: Here, word: int) -> Outcome:
        """A user's lease ends: nothing reads through it any more."""
        at = here.process.leases.index(word)
        return here.keeps(leases=here.process.leases[:at] + here.process.leases[at + 1 :])

    @staticmethod
    def _sent(here: Here, rows: tuple[int, ...]) -> int:
        return max(here.shared.rows[row] for row in rows)
