"""A subscriber's operations: shmsync.performer.Performer, gate.Gate, and what a worker does with its weights."""

from __future__ import annotations

from .outcomes import Here, Outcome, text
from .state import FREE, LATE_WRITE, Gate, Violation, put
from .words import slot_of, version_of

Blocking = Outcome | list[Outcome]


class SubscriberOperations:
    """A forward's bytes, and invariant 5 for a binding, are checked where they are used."""

    leaves: int
    strict: bool

    # --- acquire, switch, release

    def enter(self, here: Here) -> Blocking:
        return here.keeps(mutex=here.thread.number) if here.process.mutex == FREE else []

    def leave(self, here: Here) -> Outcome:
        return here.keeps(mutex=FREE)

    def load_row(self, here: Here, row: int) -> Outcome:
        return here.gives(here.shared.rows[row])

    def try_shared(self, here: Here, slot: int) -> Outcome:
        return here.requests(slot, exclusive=False)

    def load_slot_version(self, here: Here, slot: int) -> Outcome:
        return here.gives(here.shared.versions[slot])

    def again(self, here: Here, word: int) -> Outcome:
        return here.gives()

    def drop_private(self, here: Here, slot: int) -> Outcome:
        in_use = (*here.process.aliases, *here.process.leases)
        if self.strict and any(word and slot_of(word) == slot for word in in_use):
            raise Violation(f"drops the private pages of slot {slot}, which this process is using")
        return here.keeps(pages=put(here.process.pages, slot, None))

    def point(self, here: Here, word: int, binding: int) -> Outcome:
        before = here.process.aliases[binding]
        if word <= before:
            raise Violation(f"5: a binding goes from {text(before)} to {text(word)}")
        return here.keeps(aliases=put(here.process.aliases, binding, word))

    def detach(self, here: Here, binding: int) -> Outcome:
        """Give a binding's parameters memory of their own."""
        return here.keeps(aliases=put(here.process.aliases, binding, 0))

    # --- the gate

    def gate_lock(self, here: Here, binding: int) -> Blocking:
        """Gives a bit for each other thread inside."""
        gate = here.process.gates[binding]
        if gate.owner != FREE:
            return []
        gates = put(here.process.gates, binding, gate._replace(owner=here.thread.number))
        return here.keeps(gate.inside & ~(1 << here.thread.number), gates=gates)

    def gate_unlock(self, here: Here, binding: int, into: bool) -> Outcome:
        """Let the gate's lock go, and be inside or not."""
        mine = 1 << here.thread.number
        inside = here.process.gates[binding].inside & ~mine | (mine if into else 0)
        return here.keeps(gates=put(here.process.gates, binding, Gate(FREE, inside)))

    def gate_leave(self, here: Here, binding: int) -> Blocking:
        """End a forward."""
        if here.process.gates[binding].owner != FREE:
            return []
        return self.gate_unlock(here, binding, False)

    # --- the weights

    def read(self, here: Here, binding: int, leaf: int, word: int) -> Outcome:
        """A forward that began on `word` uses a leaf."""
        now = here.process.aliases[binding]
        if now != word:
            raise Violation(f"a forward began on {text(word)} and reads {text(now)}")
        return self.read_lease(here, word, leaf)

    def read_lease(self, here: Here, word: int, leaf: int) -> Outcome:
        """A user of a lease on `word` reads a leaf."""
        content = here.process.pages[slot_of(word)] or here.shared.memory[slot_of(word)]
        version = version_of(word)
        right = here.shared.truth(version).values[leaf]
        if content is None or content[leaf] not in (right, -version):
            seen = "a hole" if content is None else content[leaf]
            raise Violation(f"leaf {leaf} of {text(word)} reads {seen}, not {right}")
        return here.gives()

    def alias(self, here: Here, binding: int) -> Outcome:
        """What a thread that keeps a view of a parameter points to."""
        return here.gives(here.process.aliases[binding])

    def write_alias(self, here: Here, slot: int, leaf: int) -> Outcome:
        """A worker writes through some alias of a slot, perhaps an old one: all of the slot becomes private to it."""
        content = here.process.pages[slot] or here.shared.memory[slot] or (0,) * self.leaves
        leased = any(leased == slot for leased, _ in here.process.counts)
        value = -here.shared.versions[slot] if leased else LATE_WRITE
        return here.keeps(pages=put(here.process.pages, slot, put(content, leaf, value)))

    # --- the queue of ended leases: Subscriber._release_later and _leave

    def queue(self, here: Here, slot: int) -> Outcome:
        return here.keeps(queue=(*here.process.queue, slot))

    def queued(self, here: Here) -> Outcome:
        return here.gives(bool(here.process.queue))

    def try_enter(self, here: Here) -> Outcome:
        return here.keeps(True, mutex=here.thread.number) if here.process.mutex == FREE else here.gives(False)

    def take_queued(self, here: Here) -> Outcome:
        waiting = here.process.queue
        return here.keeps(waiting[0], queue=waiting[1:]) if waiting else here.gives()
