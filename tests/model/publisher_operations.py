"""The publisher's operations: shmsync.channel.Store, a copy's leaves one by one."""

from __future__ import annotations

from .outcomes import Here, Outcome, text
from .state import Truth, Violation, put
from .words import live_slots, newest_word, slot_of


class PublisherOperations:
    """Invariants 2, 3 and 5 are checked where the publisher writes."""

    leaves: int
    strict: bool

    def load_rows(self, here: Here) -> Outcome:
        return here.gives(here.shared.rows)

    def try_exclusive(self, here: Here, slot: int) -> Outcome:
        return here.requests(slot, exclusive=True)

    def unlock(self, here: Here, slot: int) -> Outcome:
        """Also a subscriber's."""
        return here.unlocks(slot)

    def wait(self, here: Here) -> Outcome:
        return here.gives()

    def reserve(self, here: Here, slot: int) -> Outcome:
        self._may_write(here, slot)
        return self._stores(here, slot, here.shared.memory[slot] or (0,) * self.leaves)

    def punch(self, here: Here, slot: int) -> Outcome:
        self._may_change(here, slot)
        return self._stores(here, slot, None)

    def write(self, here: Here, slot: int, leaf: int) -> Outcome:
        """One leaf of a copy_in."""
        return self._writes(here, slot, leaf, here.process.attempt)

    def write_over(self, here: Here, slot: int, leaf: int, source: int) -> Outcome:
        """One leaf of a copy_over."""
        content = here.shared.memory[source]
        if content is None:
            raise Violation(f"copies from slot {source}, which has no memory")
        return self._writes(here, slot, leaf, content[leaf])

    def store_slot_version(self, here: Here, slot: int, version: int) -> Outcome:
        self._may_write(here, slot)
        versions = put(here.shared.versions, slot, version)
        truths = tuple(truth for truth in here.shared.truths if truth.version in versions)
        if version:
            truths += (Truth(version, here.process.goal, here.process.everybody),)
        return here.shares(versions=versions, truths=truths)

    def store_row(self, here: Here, row: int, word: int) -> Outcome:
        before = here.shared.rows[row]
        if word < before:
            raise Violation(f"5: row {row} goes back from {text(before)} to {text(word)}")
        return here.shares(rows=put(here.shared.rows, row, word))

    def _writes(self, here: Here, slot: int, leaf: int, value: int) -> Outcome:
        self._may_change(here, slot)
        content = here.shared.memory[slot]
        if content is None:
            raise Violation(f"writes into slot {slot}, which has no memory")
        return self._stores(here, slot, put(content, leaf, value))

    def _stores(self, here: Here, slot: int, content: tuple[int, ...] | None) -> Outcome:
        return here.shares(memory=put(here.shared.memory, slot, content))

    def _may_change(self, here: Here, slot: int) -> None:
        self._may_write(here, slot)
        if self.strict and here.shared.versions[slot]:
            raise Violation(f"3: changes slot {slot} while it says that it is version {here.shared.versions[slot]}")

    def _may_write(self, here: Here, slot: int) -> None:
        if not self.strict:
            return
        rows = here.shared.rows
        if here.shared.locks[slot].exclusive != here.thread.process:
            raise Violation(f"2: writes slot {slot} without its lock")
        if slot in live_slots(rows):
            raise Violation(f"2: writes slot {slot}, which a live row points to")
        if any(rows) and slot == slot_of(newest_word(rows)):
            raise Violation(f"2: writes slot {slot}, which is the newest")
