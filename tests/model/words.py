"""The words of rows, as design.md has them: written anew, so that a wrong `slots.py` is not checked with itself."""

from __future__ import annotations

from collections.abc import Sequence


def version_of(word: int) -> int:
    return word >> 16


def slot_of(word: int) -> int:
    return word & 0xFFFF


def newest_word(rows: Sequence[int]) -> int:
    return max(rows)


def live_slots(rows: Sequence[int]) -> set[int]:
    """A row is live while it is newer than row 0; row 0 always is."""
    return {slot_of(word) for row, word in enumerate(rows) if word and (row == 0 or word > rows[0])}
