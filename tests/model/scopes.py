"""The scopes: small casts that together meet everything that the protocol promises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

from .operations import NO_FAULTS, Faults, Operations
from .programs import Act, Forwards, GiveBack, Job, Leases, Notified, Push, Writes, job, publisher
from .state import Gate, Lock, Owner, Shared, Worker
from .steps import Model
from .threads import Objects, Thread


@dataclass(frozen=True)
class Subscriber:
    """A subscriber: the rows that it follows, and what its threads do. `queued`: how its leases end."""

    jobs: tuple[Job, ...]
    rows: tuple[int, ...] = (0,)
    bindings: int = 1
    queued: bool = False


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
            return Objects(slots, subscriber.rows, subscriber.bindings, subscriber.queued)

        return [
            Thread(f"subscriber {process}.{number}", process, number, objects, job(slots, self.leaves, what))
            for number, what in enumerate(subscriber.jobs)
        ]


def _acts(*acts: Act | Sequence[Act]) -> tuple[tuple[Act, ...], ...]:
    return tuple((act,) if isinstance(act, (Push, GiveBack)) else tuple(act) for act in acts)


ALL, ONE, TWO, BOTH = Push(), Push((1,)), Push((2,)), Push((1, 2))
FIRST, LAST, LAST_TO_BOTH = Push(changed=(0,)), Push(changed=(1,)), Push((1, 2), (1,))
GIVE_BACK = GiveBack()

_STEPS = ("load_rows", "try_exclusive", "reserve", "store_slot_version", "write", "write_over", "unlock", "store_row")
# A publish that is interrupted right after it has got a lock keeps it, and is none the worse: the lock is its own.
PUBLISHER_FAULTS = frozenset({*_STEPS, "punch", *(f"{name}+" for name in _STEPS if name != "try_exclusive"), "punch+"})
# An interrupt right after try_shared is not among them: it keeps a lock that is not counted.
WORKER_FAULTS = frozenset({"try_shared", "load_slot_version", "drop_private", "drop_private+", "point", "unlock+"})
NONE: frozenset[str] = frozenset()

SCOPES = [
    Scope(
        "everybody",  # the whole way, three times, with two subscribers; one process is killed, one stopped for good
        _acts(ALL, ALL, ALL),
        (Subscriber((Forwards(3),)), Subscriber((Forwards(2),))),
        kills=1,
        stops=1,
        max_slots=6,
    ),
    Scope(
        "stopped",  # whoever is stopped, the others go on
        _acts(ALL, ALL),
        (Subscriber((Forwards(2),)),),
        stops=1,
    ),
    Scope(
        "unbind",  # subscribers that leave, and two deaths
        _acts(ALL, ALL, ALL),
        (Subscriber((Forwards(2, unbind=True),)), Subscriber((Forwards(1, unbind=True),))),
        kills=2,
        max_slots=6,
    ),
    Scope(
        "tight",  # as few slots as can be: the publisher waits for them, and gets them
        _acts(ALL, ALL, ALL),
        (Subscriber((Forwards(2, unbind=True),)), Subscriber((Forwards(2, unbind=True),))),
        kills=1,
        max_slots=2,
        may_wait=True,
    ),
    Scope(
        "subsets",  # pushes to some workers only
        _acts((ALL, ONE), (ONE, TWO, BOTH), (ALL, TWO)),
        (Subscriber((Forwards(2),), (0, 1)), Subscriber((Forwards(1),), (0, 2))),
        rows=3,
        kills=1,
        max_slots=8,
    ),
    Scope(
        "outdated",  # what no subscriber follows any more costs no slot
        _acts(ONE, (ONE, ALL), (ONE, ALL)),
        rows=2,
        max_slots=2,
    ),
    Scope(
        "newcomer",  # a worker's second subscriber, perhaps after the death of the first
        _acts((ALL, ONE), (ALL, ONE)),
        (Subscriber((Forwards(1),), (0, 1)), Subscriber((Forwards(2, joins=True),), (0, 1))),
        rows=2,
        kills=1,
        max_slots=6,
    ),
    Scope(
        "faults",  # a publish fails at any step, and then works again
        _acts((ALL, LAST), (ALL, LAST), (ALL, LAST)),
        (Subscriber((Forwards(2),)),),
        kills=1,
        faults=1,
        faulty=(PUBLISHER_FAULTS, NONE),
    ),
    Scope(
        "faults in subsets",
        _acts((ALL, LAST_TO_BOTH), (ALL, LAST_TO_BOTH), (ALL, LAST_TO_BOTH)),
        (Subscriber((Forwards(1),), (0, 1)),),
        rows=3,
        kills=1,
        faults=1,
        faulty=(PUBLISHER_FAULTS, NONE),
    ),
    Scope(
        "partial",  # what a slot holds already is not copied again, and that is known right
        _acts(ALL, (ALL, LAST), (ALL, LAST), (FIRST, LAST), (FIRST, LAST)),
        faults=2,
        faulty=(PUBLISHER_FAULTS, NONE),
    ),
    Scope(
        "numbers",  # a version that failed is not taken for another
        _acts(ALL, ALL, ALL, ALL, FIRST),
        (Subscriber((Forwards(1),)),),
        faults=1,
        faulty=(frozenset({"unlock", "store_row"}), NONE),
    ),
    Scope(
        "growth",  # slots come and go
        _acts(ALL, ALL, (ALL, GIVE_BACK), (LAST, GIVE_BACK), ALL),
        (Subscriber((Forwards(2),)),),
        kills=1,
        stops=1,
    ),
    Scope(
        "growth faults",
        _acts(ALL, ALL, GIVE_BACK, (ALL, GIVE_BACK), (ALL, LAST)),
        faults=2,
        # A hole that can't be unlocked stays locked by its owner, and is none the worse.
        faulty=(PUBLISHER_FAULTS - {"unlock"}, NONE),
    ),
    Scope(
        "threads",  # a notification's thread and a forward's in one subscriber
        _acts(ALL, ALL, ALL),
        (Subscriber((Forwards(2), Notified(2))),),
        kills=1,
    ),
    Scope(
        "two forwards",  # of two threads at the same time
        _acts(ALL, ALL, ALL),
        (Subscriber((Forwards(2), Forwards(2))),),
    ),
    Scope(
        "leases",  # of two threads at the same time
        _acts(ALL, ALL, ALL),
        (Subscriber((Leases(2), Leases(2)), bindings=0),),
        stops=1,
    ),
    Scope(
        "queued leases",  # that end while the mutex is taken
        _acts(ALL, ALL),
        (Subscriber((Leases(2), Leases(1)), bindings=0, queued=True),),
    ),
    Scope(
        "worker faults",  # a lease that can't be taken, pages that can't be dropped, parameters that can't be moved
        _acts(ALL, ALL, ALL),
        (Subscriber((Forwards(3, unbind=True),)),),
        faults=2,
        faulty=(NONE, WORKER_FAULTS),
        max_slots=2,
        may_wait=True,
    ),
    Scope(
        "lease faults",  # one lease fails beside another
        _acts(ALL, ALL, ALL),
        (Subscriber((Leases(1), Leases(1)), bindings=0),),
        faults=1,
        faulty=(NONE, WORKER_FAULTS),
        max_slots=2,
        may_wait=True,
    ),
    Scope(
        "private",  # a worker writes its weights, perhaps through an old alias
        _acts(ALL, ALL, ALL),
        (Subscriber((Forwards(3), Writes())),),
        max_slots=3,
    ),
    Scope(
        "private leases",  # the same beside a lease on the same slots
        _acts(ALL, ALL),
        (Subscriber((Forwards(2), Writes(), Leases(1))),),
    ),
]

_ANY_PUSH = (ALL, ONE, TWO, BOTH)
LARGE = [
    Scope(
        "large: everybody",
        _acts(ALL, ALL, ALL, ALL),
        (Subscriber((Forwards(3),)), Subscriber((Forwards(3, unbind=True),))),
        kills=2,
        stops=1,
        max_slots=6,
    ),
    Scope(
        "large: three subscribers",
        _acts(ALL, ALL, ALL),
        (Subscriber((Forwards(2),)),) * 3,
        kills=1,
        max_slots=8,
    ),
    Scope(
        "large: subsets",
        _acts(_ANY_PUSH, _ANY_PUSH, _ANY_PUSH),
        (Subscriber((Forwards(2),), (0, 1)), Subscriber((Forwards(2),), (0, 2))),
        rows=3,
        kills=1,
        max_slots=8,
    ),
    Scope(
        "large: growth",
        _acts(ALL, ALL, (ALL, GIVE_BACK), (LAST, GIVE_BACK), ALL),
        (Subscriber((Forwards(2),)), Subscriber((Leases(1),), bindings=0)),
        kills=1,
        max_slots=8,
    ),
    Scope(
        "large: one of everything",
        _acts(ALL, ALL, ALL),
        (Subscriber((Forwards(2), Notified(1), Leases(1), Writes()), queued=True),),
        kills=1,
        max_slots=6,
    ),
]
