"""The scopes: small casts that together meet everything that the protocol promises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

from .explorer import Model
from .operations import NO_FAULTS, Faults, Operations
from .programs import Act, Forwards, GiveBack, Job, Push, job, publisher
from .state import Gate, Lock, Owner, Shared, Worker
from .threads import Objects, Thread


@dataclass(frozen=True)
class Subscriber:
    """A subscriber: the rows that it follows, and what its threads do."""

    jobs: tuple[Job, ...]
    rows: tuple[int, ...] = (0,)
    bindings: int = 1


@dataclass(frozen=True)
class Scope:
    """One cast. `acts`: for each act of the publisher, the ones to choose from."""

    name: str
    acts: tuple[tuple[Act, ...], ...]
    subscribers: tuple[Subscriber, ...] = ()
    rows: int = 1
    max_slots: int = 4
    leaves: int = 2
    kills: int = 0
    stops: int = 0
    faults: int = 0
    faulty: Faults = NO_FAULTS
    may_wait: bool = False

    def build(self, slots: ModuleType, operations: type[Operations] = Operations, strict: bool = True) -> Model:
        """The model, run by a given `slots` module: the shipping one or a mutant."""
        n = self.max_slots
        shared = Shared((0,) * self.rows, (0,) * n, (None,) * n, (Lock(),) * n, (), self.kills, self.stops, self.faults)
        processes: list = [Owner(full=(0,) * self.leaves)]
        program = publisher(slots, self.leaves, n, self.acts)
        threads = [Thread("publisher", 0, 0, lambda: Objects(slots, (), 0), program)]
        for number, subscriber in enumerate(self.subscribers, 1):
            none = (0,) * subscriber.bindings
            processes.append(Worker((), none, none, (Gate(),) * subscriber.bindings, (None,) * n))
            threads += self._threads(slots, number, subscriber)
        return Model(self.name, operations(self.leaves, self.faulty, strict), shared, processes, threads, self.may_wait)

    def _threads(self, slots: ModuleType, process: int, subscriber: Subscriber) -> list[Thread]:
        def objects() -> Objects:
            return Objects(slots, subscriber.rows, subscriber.bindings)

        return [
            Thread(f"subscriber {process}.{number}", process, number, objects, job(slots, self.leaves, what))
            for number, what in enumerate(subscriber.jobs)
        ]


def _acts(*acts: Act | Sequence[Act]) -> tuple[tuple[Act, ...], ...]:
    return tuple((act,) if isinstance(act, (Push, GiveBack)) else tuple(act) for act in acts)


ALL = Push()

SCOPES = [
    Scope(
        "everybody",
        _acts(ALL, ALL, ALL),
        (Subscriber((Forwards(2),)), Subscriber((Forwards(2),))),
        kills=1,
        max_slots=6,
    ),
]
