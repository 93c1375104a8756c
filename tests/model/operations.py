"""What each operation does to the simulated machine, and what must hold at that very step.

`perform` gives the outcomes of a thread's operation: each a result and the machine afterwards. No outcome: the
operation blocks. The names are those that shmsync.slots yields; the others belong to the programs of this folder.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .state import FREE, LATE_WRITE, Gate, Lock, Owner, Process, Shared, Truth, Violation, Worker, put
from .threads import FAULT, Thread
from .words import live_slots, newest_word, slot_of, version_of


class Outcome(NamedTuple):
    """An operation's result and the machine after it. `note`: for the schedule."""

    result: Any
    shared: Shared
    process: Process
    note: str = ""


# Of the publisher, and of a subscriber.
Faults = tuple[frozenset[str], frozenset[str]]
NO_FAULTS: Faults = (frozenset(), frozenset())


class Operations:
    """The operations of one scope. `faults`: which of the publisher's or a subscriber's may fail before ("name") or
    after ("name+") their effect. `strict`: also check what only somebody with a view of everything could see.
    """

    def __init__(self, leaves: int, faults: Faults = NO_FAULTS, strict: bool = True) -> None:
        self._leaves, self._faults, self.strict = leaves, faults, strict

    def perform(self, thread: Thread, operation: tuple[Any, ...], shared: Shared, process: Process) -> list[Outcome]:
        name, *arguments = operation
        outcomes = getattr(self, name)(thread, shared, process, *arguments)
        if not isinstance(outcomes, list):
            outcomes = [outcomes]
        if shared.faults and process.armed and self.may_fail(thread, name):
            outcomes = outcomes + self._failures(thread, name, outcomes, shared, process)
        return outcomes

    def may_fail(self, thread: Thread, name: str) -> bool:
        names = self._faults[thread.process > 0]
        return name in names or f"{name}+" in names

    def _failures(
        self, thread: Thread, name: str, outcomes: list[Outcome], shared: Shared, process: Process
    ) -> list[Outcome]:
        names = self._faults[thread.process > 0]
        failures = []
        if name in names and outcomes:
            failures.append(Outcome(FAULT, shared, process, "fails"))
        if f"{name}+" in names:
            failures += [Outcome(FAULT, o.shared, o.process, "fails after its effect") for o in outcomes]
        return [_blamed(failure) for failure in failures]

    # --- the publisher's: shmsync.publisher._Store

    def load_rows(self, thread: Thread, shared: Shared, owner: Owner) -> Outcome:
        return Outcome(shared.rows, shared, owner)

    def try_exclusive(self, thread: Thread, shared: Shared, owner: Process, slot: int) -> Outcome:
        return _request(thread, shared, owner, slot, exclusive=True)

    def unlock(self, thread: Thread, shared: Shared, process: Process, slot: int) -> Outcome:
        return Outcome(None, shared.with_lock(slot, shared.locks[slot].without(thread.process)), process)

    def reserve(self, thread: Thread, shared: Shared, owner: Owner, slot: int) -> Outcome:
        self._may_write(thread, shared, slot)
        content = shared.memory[slot] or (0,) * self._leaves
        return Outcome(None, shared._replace(memory=put(shared.memory, slot, content)), owner)

    def punch(self, thread: Thread, shared: Shared, owner: Owner, slot: int) -> Outcome:
        self._may_write(thread, shared, slot)
        self._is_unversioned(shared, slot)
        return Outcome(None, shared._replace(memory=put(shared.memory, slot, None)), owner)

    def write(self, thread: Thread, shared: Shared, owner: Owner, slot: int, leaf: int) -> Outcome:
        """One leaf of a copy_in."""
        return self._write(thread, shared, owner, slot, leaf, owner.attempt)

    def write_over(
        self, thread: Thread, shared: Shared, owner: Owner, slot: int, leaf: int, source: int
    ) -> Outcome:
        """One leaf of a copy_over."""
        content = shared.memory[source]
        if content is None:
            raise Violation(f"copies from slot {source}, which has no memory")
        return self._write(thread, shared, owner, slot, leaf, content[leaf])

    def _write(self, thread: Thread, shared: Shared, owner: Owner, slot: int, leaf: int, value: int) -> Outcome:
        self._may_write(thread, shared, slot)
        self._is_unversioned(shared, slot)
        content = shared.memory[slot]
        if content is None:
            raise Violation(f"writes into slot {slot}, which has no memory")
        return Outcome(None, shared._replace(memory=put(shared.memory, slot, put(content, leaf, value))), owner)

    def store_slot_version(self, thread: Thread, shared: Shared, owner: Owner, slot: int, version: int) -> Outcome:
        self._may_write(thread, shared, slot)
        versions = put(shared.versions, slot, version)
        truths = tuple(truth for truth in shared.truths if truth.version in versions)
        if version:
            truths += (Truth(version, owner.goal, owner.everybody),)
        return Outcome(None, shared._replace(versions=versions, truths=truths), owner)

    def store_row(self, thread: Thread, shared: Shared, owner: Owner, row: int, word: int) -> Outcome:
        if word < shared.rows[row]:
            raise Violation(f"5: row {row} goes back from {_text(shared.rows[row])} to {_text(word)}")
        return Outcome(None, shared._replace(rows=put(shared.rows, row, word)), owner)

    def wait(self, thread: Thread, shared: Shared, owner: Owner) -> Outcome:
        return Outcome(None, shared, owner)

    def _may_write(self, thread: Thread, shared: Shared, slot: int) -> None:
        """Invariant 2."""
        if not self.strict:
            return
        if shared.locks[slot].exclusive != thread.process:
            raise Violation(f"2: writes slot {slot} without its lock")
        if slot in live_slots(shared.rows):
            raise Violation(f"2: writes slot {slot}, which a live row points to")
        if slot == slot_of(newest_word(shared.rows)) and any(shared.rows):
            raise Violation(f"2: writes slot {slot}, which is the newest")

    def _is_unversioned(self, shared: Shared, slot: int) -> None:
        """Invariant 3."""
        if self.strict and shared.versions[slot]:
            raise Violation(f"3: changes slot {slot} while it says that it is version {shared.versions[slot]}")

    # --- the subscriber's: shmsync.subscriber._Performer

    def enter(self, thread: Thread, shared: Shared, worker: Worker) -> Outcome | list[Outcome]:
        if worker.mutex != FREE:
            return []
        return Outcome(None, shared, worker._replace(mutex=thread.number))

    def leave(self, thread: Thread, shared: Shared, worker: Worker) -> Outcome:
        return Outcome(None, shared, worker._replace(mutex=FREE))

    def load_row(self, thread: Thread, shared: Shared, worker: Worker, row: int) -> Outcome:
        return Outcome(shared.rows[row], shared, worker)

    def try_shared(self, thread: Thread, shared: Shared, worker: Worker, slot: int) -> Outcome:
        return _request(thread, shared, worker, slot, exclusive=False)

    def load_slot_version(self, thread: Thread, shared: Shared, worker: Worker, slot: int) -> Outcome:
        return Outcome(shared.versions[slot], shared, worker)

    def again(self, thread: Thread, shared: Shared, worker: Worker, word: int) -> Outcome:
        return Outcome(None, shared, worker)

    def drop_private(self, thread: Thread, shared: Shared, worker: Worker, slot: int) -> Outcome:
        if self.strict and any(word and slot_of(word) == slot for word in worker.aliases + worker.leases):
            raise Violation(f"drops the private pages of slot {slot}, which this process is using")
        return Outcome(None, shared, worker._replace(pages=put(worker.pages, slot, None)))

    def point(self, thread: Thread, shared: Shared, worker: Worker, word: int, binding: int) -> Outcome:
        if word <= worker.aliases[binding]:
            raise Violation(f"5: a binding goes from {_text(worker.aliases[binding])} to {_text(word)}")
        return Outcome(None, shared, worker._replace(aliases=put(worker.aliases, binding, word)))

    # --- a forward's and a worker's own

    def gate_lock(self, thread: Thread, shared: Shared, worker: Worker, binding: int) -> Outcome | list[Outcome]:
        gate = worker.gates[binding]
        if gate.owner != FREE:
            return []
        inside = gate.inside & ~(1 << thread.number)
        return Outcome(inside, shared, _gate(worker, binding, gate._replace(owner=thread.number)))

    def gate_unlock(self, thread: Thread, shared: Shared, worker: Worker, binding: int, into: bool) -> Outcome:
        """Let the gate's lock go, and be inside or not."""
        mine = 1 << thread.number
        inside = worker.gates[binding].inside & ~mine | (mine if into else 0)
        return Outcome(None, shared, _gate(worker, binding, Gate(FREE, inside)))

    def gate_leave(self, thread: Thread, shared: Shared, worker: Worker, binding: int) -> Outcome | list[Outcome]:
        """End a forward."""
        gate = worker.gates[binding]
        if gate.owner != FREE:
            return []
        return Outcome(None, shared, _gate(worker, binding, Gate(FREE, gate.inside & ~(1 << thread.number))))

    def read(self, thread: Thread, shared: Shared, worker: Worker, binding: int, leaf: int, word: int) -> Outcome:
        """A forward that began on `word` uses a leaf."""
        if worker.aliases[binding] != word:
            raise Violation(f"a forward began on {_text(word)} and reads {_text(worker.aliases[binding])}")
        return self.read_lease(thread, shared, worker, word, leaf)

    def read_lease(self, thread: Thread, shared: Shared, worker: Worker, word: int, leaf: int) -> Outcome:
        """A user's lease on `word` reads a leaf."""
        content = worker.pages[slot_of(word)] or shared.memory[slot_of(word)]
        version = version_of(word)
        right = shared.truth(version).values[leaf]
        if content is None or content[leaf] not in (right, -version):
            seen = "a hole" if content is None else content[leaf]
            raise Violation(f"leaf {leaf} of {_text(word)} reads {seen}, not {right}")
        return Outcome(None, shared, worker)

    def alias(self, thread: Thread, shared: Shared, worker: Worker, binding: int) -> Outcome:
        """What a thread that keeps a view of a parameter points to."""
        return Outcome(worker.aliases[binding], shared, worker)

    def write_alias(self, thread: Thread, shared: Shared, worker: Worker, slot: int, leaf: int) -> Outcome:
        """A worker writes through some alias of a slot, perhaps an old one: the page becomes private to it."""
        content = worker.pages[slot] or shared.memory[slot] or (0,) * self._leaves
        leased = any(leased == slot for leased, _ in worker.counts)
        value = -shared.versions[slot] if leased else LATE_WRITE
        return Outcome(None, shared, worker._replace(pages=put(worker.pages, slot, put(content, leaf, value))))

    def detach(self, thread: Thread, shared: Shared, worker: Worker, binding: int) -> Outcome:
        """Give a binding's parameters memory of their own."""
        return Outcome(None, shared, worker._replace(aliases=put(worker.aliases, binding, 0)))

    def join(self, thread: Thread, shared: Shared, worker: Worker, rows: tuple[int, ...]) -> Outcome:
        """A subscriber attaches. Whatever it follows, it is not older than what its worker has been sent."""
        return Outcome(None, shared, worker._replace(newest=max(shared.rows[row] for row in rows)))

    # --- the queue of ended leases: Subscriber._release_later and _leave

    def queue(self, thread: Thread, shared: Shared, worker: Worker, slot: int) -> Outcome:
        return Outcome(None, shared, worker._replace(queue=(*worker.queue, slot)))

    def queued(self, thread: Thread, shared: Shared, worker: Worker) -> Outcome:
        return Outcome(bool(worker.queue), shared, worker)

    def try_enter(self, thread: Thread, shared: Shared, worker: Worker) -> Outcome:
        if worker.mutex != FREE:
            return Outcome(False, shared, worker)
        return Outcome(True, shared, worker._replace(mutex=thread.number))

    def take_queued(self, thread: Thread, shared: Shared, worker: Worker) -> Outcome:
        if not worker.queue:
            return Outcome(None, shared, worker)
        return Outcome(worker.queue[0], shared, worker._replace(queue=worker.queue[1:]))

    # --- what programs tell the checks

    def choose(self, thread: Thread, shared: Shared, process: Process, *options: Any) -> list[Outcome]:
        return [Outcome(option, shared, process, f"chooses {option}") for option in options]

    def attempt(
        self, thread: Thread, shared: Shared, owner: Owner, everybody: bool, changed: tuple[int, ...]
    ) -> Outcome:
        """A publish begins: its data are numbered apart from its version."""
        number = owner.attempt + 1
        goal = tuple(number if leaf in changed else owner.full[leaf] for leaf in range(self._leaves))
        return Outcome(None, shared, owner._replace(attempt=number, everybody=everybody, goal=goal, armed=True))

    def outcome(
        self, thread: Thread, shared: Shared, owner: Owner, rows: tuple[int, ...], version: int, raised: bool
    ) -> Outcome:
        """4: a publish has ended, by an exception or not: it must have happened wholly or not at all."""
        moved = {version_of(shared.rows[row]) == version for row in rows}
        if len(moved) > 1 or (not raised and moved != {True}):
            raise Violation(f"4: the publish of version {version} has ended, and rows are {shared.rows}")
        self._holds_nothing(thread, shared)
        full = owner.goal if moved == {True} else owner.full
        return Outcome(moved == {True}, shared, owner._replace(full=full, goal=(), armed=False))

    def give_back_begins(self, thread: Thread, shared: Shared, owner: Owner) -> Outcome:
        return Outcome(None, shared, owner._replace(armed=True))

    def give_back_ends(self, thread: Thread, shared: Shared, owner: Owner) -> Outcome:
        self._holds_nothing(thread, shared)
        return Outcome(None, shared, owner._replace(armed=False))

    def _holds_nothing(self, thread: Thread, shared: Shared) -> None:
        if self.strict and shared.holds(thread.process):
            raise Violation("4: the publisher has kept a lock")

    def floor(self, thread: Thread, shared: Shared, worker: Worker, rows: tuple[int, ...]) -> Outcome:
        """What an acquire that begins now must not be older than: what this subscriber has had, or was sent."""
        return Outcome(max(worker.newest, *(shared.rows[row] for row in rows)), shared, worker)

    def acquired(self, thread: Thread, shared: Shared, worker: Worker, word: int, floor: int) -> Outcome:
        if word < floor:
            raise Violation(f"5: this subscriber had or was sent {_text(floor)} before it acquired {_text(word)}")
        return Outcome(None, shared, worker._replace(newest=max(word, worker.newest)))

    def hold(self, thread: Thread, shared: Shared, worker: Worker, word: int) -> Outcome:
        """A user has a lease."""
        return Outcome(None, shared, worker._replace(leases=tuple(sorted((*worker.leases, word)))))

    def let_go(self, thread: Thread, shared: Shared, worker: Worker, word: int) -> Outcome:
        """A user's lease ends: nothing reads through it any more."""
        at = worker.leases.index(word)
        return Outcome(None, shared, worker._replace(leases=worker.leases[:at] + worker.leases[at + 1 :]))


def _blamed(failure: Outcome) -> Outcome:
    """A publish fails once at most: an error in the middle of settling another is not promised anything."""
    process = failure.process
    if isinstance(process, Owner):
        process = process._replace(armed=False)
    return failure._replace(shared=failure.shared._replace(faults=failure.shared.faults - 1), process=process)


def _request(thread: Thread, shared: Shared, process: Process, slot: int, exclusive: bool) -> Outcome:
    lock: Lock | None = shared.locks[slot].taken(thread.process, exclusive)
    if lock is None:
        return Outcome(False, shared, process, "EAGAIN")
    return Outcome(True, shared.with_lock(slot, lock), process)


def _gate(worker: Worker, binding: int, gate: Gate) -> Worker:
    return worker._replace(gates=put(worker.gates, binding, gate))


def _text(word: int) -> str:
    return f"version {version_of(word)} in slot {slot_of(word)}"
