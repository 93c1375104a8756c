"""What must hold in every state. Numbers are those of design.md, section 4.

Invariant 2, the forwards' bytes and "versions never go back" are checked at the steps themselves: operations.py.
"""

from __future__ import annotations

from .state import DEAD, FREE, Owner, Process, Shared, Violation, Worker
from .words import slot_of, version_of


def check_shared(shared: Shared, strict: bool) -> None:
    """What anybody could see in the segments; without `strict` only what a row leads to."""
    led_to = {slot_of(word) for word in shared.rows if word >= shared.rows[0]}
    for slot, version in enumerate(shared.versions):
        if version and (strict or slot in led_to) and shared.memory[slot] != shared.truth(version).values:
            raise Violation(
                f"3: slot {slot} says it is version {version}, which is {shared.truth(version).values}, "
                f"and holds {shared.memory[slot]}"
            )
    for row, word in enumerate(shared.rows):
        if word > (shared.rows[0] if row else 0):
            _check_row(shared, row, word)


def _check_row(shared: Shared, row: int, word: int) -> None:
    version, slot = version_of(word), slot_of(word)
    if shared.versions[slot] != version:
        raise Violation(f"3: row {row} points to version {version} in slot {slot}, which is {shared.versions[slot]}")
    if row and shared.truth(version).everybody:
        raise Violation(f"4: a push of version {version} to everybody shows in row {row} and not yet in row 0")


def check_process(description: int, process: Process, shared: Shared) -> None:
    """What one process may rely on."""
    if not isinstance(process, Worker):
        return
    for word in (*process.aliases, *process.leases):
        if word:
            _check_leased(description, word, shared)
    if process.mutex == FREE and shared.holds(description) != {slot for slot, _ in process.counts}:
        raise Violation(
            f"1: process {description} has locks on slots {shared.holds(description)} and counts {process.counts}"
        )


def _check_leased(description: int, word: int, shared: Shared) -> None:
    version, slot = version_of(word), slot_of(word)
    if not shared.locks[slot].shared >> description & 1:
        raise Violation(f"1: process {description} uses slot {slot} without a lease")
    if shared.versions[slot] != version:
        raise Violation(f"1: process {description} uses version {version} in slot {slot}: {shared.versions[slot]}")


def check_end(description: int, process: Process, shared: Shared) -> None:
    """What is left when all threads of a process have run out: one count for each use, one lock for each slot."""
    if process is DEAD or process.stopped:
        return
    if isinstance(process, Owner) and shared.holds(description):
        raise Violation(f"4: the publisher ends with locks on slots {shared.holds(description)}")
    if isinstance(process, Worker):
        uses = [slot_of(word) for word in (*process.aliases, *process.leases) if word]
        if dict(process.counts) != {slot: uses.count(slot) for slot in uses} or process.queue:
            raise Violation(f"1: process {description} uses slots {uses}, and its counts are {process.counts}")
