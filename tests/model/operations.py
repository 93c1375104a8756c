"""What each operation does to the simulated machine, and how operations fail.

The names are those that shmsync.slots yields; the others belong to the programs of this folder. An operation gives its
outcome, or several; none = it blocks.
"""

from __future__ import annotations

from typing import Any

from .asides import Asides
from .outcomes import Here, Outcome
from .publisher_operations import PublisherOperations
from .state import Owner, Shared
from .subscriber_operations import SubscriberOperations
from .threads import FAULT

# Of the publisher, and of a subscriber: "name" may fail before its effect, "name+" after it.
Faults = tuple[frozenset[str], frozenset[str]]
NO_FAULTS: Faults = (frozenset(), frozenset())


class Operations(PublisherOperations, SubscriberOperations, Asides):
    """The operations of one scope. `strict`: also check what only somebody with a view of everything could see."""

    def __init__(self, leaves: int, faults: Faults = NO_FAULTS, strict: bool = True) -> None:
        self.leaves, self._faults, self.strict = leaves, faults, strict

    def perform(self, here: Here, operation: tuple[Any, ...]) -> list[Outcome]:
        name, *arguments = operation
        outcomes = getattr(self, name)(here, *arguments)
        if not isinstance(outcomes, list):
            outcomes = [outcomes]
        if here.shared.faults and here.process.armed and self.may_fail(here.thread.process, name):
            outcomes = outcomes + self._failures(name, outcomes, here)
        return outcomes

    def may_fail(self, process: int, name: str) -> bool:
        names = self._faults[process > 0]
        return name in names or f"{name}+" in names

    def _failures(self, name: str, outcomes: list[Outcome], here: Here) -> list[Outcome]:
        names = self._faults[here.thread.process > 0]
        failures = []
        if name in names and outcomes:
            failures.append(Outcome(FAULT, here.shared, here.process, "fails"))
        if f"{name}+" in names:
            failures += [o._replace(result=FAULT, note="fails after its effect") for o in outcomes]
        return [_blamed(failure) for failure in failures]


def _blamed(failure: Outcome) -> Outcome:
    """A publish fails once at most: an error in the middle of settling another is not promised anything."""
    shared: Shared = failure.shared._replace(faults=failure.shared.faults - 1)
    process = failure.process
    if isinstance(process, Owner):
        process = process._replace(armed=False)
    return failure._replace(shared=shared, process=process)
