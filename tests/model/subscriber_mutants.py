"""Mistakes in what a subscriber does."""

from __future__ import annotations

from .mutants import Mutant, mutant
from .operations import Operations
from .outcomes import Here, Outcome
from .state import put


class ResetsRow(Operations):
    """A newcomer sets its worker's row to nothing."""

    def join(self, here: Here, rows: tuple[int, ...]) -> Outcome:
        reset = here.shared._replace(rows=put(here.shared.rows, rows[-1], 0))
        return super().join(here, rows)._replace(shared=reset)


_AGAIN = '            yield ("again", word)\n'
_ENTER = '    yield ("enter",)\n'
_FINALLY = '    finally:\n        yield ("leave",)\n'
_UNLESS_RAISING = '    finally:\n        if __import__("sys").exc_info()[0] is None:\n            yield ("leave",)\n'
_TRY_SHARED = '(yield ("try_shared", slot))'
_MISMATCH = '            yield ("unlock", slot)  # nobody here'
_DROP = """        if not holder.counts.get(slot):
            # Under the new lease, before anything points there. Earlier, a late write through an old alias could still
            # make a private page; later, the forward would read it.
            yield ("drop_private", slot)
"""
_FAILED = """        if not holder.counts.get(slot):
            yield ("unlock", slot)
        raise
"""
_COUNT_DOWN = """        holder.counts[slot] -= 1
        if not holder.counts[slot]:
            del holder.counts[slot]
            yield ("unlock", slot)
"""
_POINT = """    try:
        yield ("point", word)
    except BaseException:
        yield from release(holder, slot_of(word))
        raise
"""
_FROM_NOW = "    old, bound.word = bound.word, word\n"
_RELEASE_OLD = """    if old:
        yield from release(holder, slot_of(old))
"""


def _drops_elsewhere(name: str, scope: str, before: str, after: str, strict_only: bool = False) -> Mutant:
    return Mutant(name, scope, ((_DROP, ""), (before, after)), strict_only=strict_only)


SUBSCRIBER_MUTANTS = [
    mutant("slot.version is not compared", "everybody", "!= version:", "is None:"),
    mutant("a slot is used although its lock is taken", "everybody", _TRY_SHARED, f"({_TRY_SHARED} or True)"),
    mutant("a slot that is not the row's stays locked", "tight", _MISMATCH, "            #", strict_only=True),
    mutant(
        "version 0 is leased",
        "private leases",
        "            if not word:\n                return 0\n",
        strict_only=True,
    ),
    mutant("a subscriber follows its own row only", "subsets", "return max(words)", "return words[-1]"),
    mutant("a subscriber follows row 0 first", "subsets", "return max(words)", "return words[0] or words[-1]"),
    Mutant("a newcomer resets its worker's row", "newcomer", operations=ResetsRow),
    # --- the lease mutex
    Mutant(
        "an acquire does not take the mutex",
        "leases",
        (
            (_ENTER + "    try:\n        while", "    try:\n        while"),
            (_AGAIN + _FINALLY, _AGAIN + "    finally:\n        pass\n"),
        ),
    ),
    Mutant(
        "a release does not take the mutex",
        "leases",
        (
            (_ENTER + "    try:\n        holder", "    try:\n        holder"),
            (_COUNT_DOWN + _FINALLY, _COUNT_DOWN + "    finally:\n        pass\n"),
        ),
    ),
    mutant(
        "an acquire that fails keeps the mutex", "worker faults", _FINALLY, _UNLESS_RAISING, within=_AGAIN + _FINALLY
    ),
    mutant(
        "a release that fails keeps the mutex",
        "worker faults",
        _FINALLY,
        _UNLESS_RAISING,
        within=_COUNT_DOWN + _FINALLY,
    ),
    # --- counts and leases
    mutant(
        "unlocks are not counted",
        "leases",
        _COUNT_DOWN,
        """        holder.counts[slot] -= 1
        yield ("unlock", slot)
        if not holder.counts[slot]:
            del holder.counts[slot]
""",
    ),
    mutant(
        "a lease that has ended keeps its lock", "tight", '            yield ("unlock", slot)\n', within=_COUNT_DOWN
    ),
    mutant(
        "the lease is released before the parameters are moved",
        "worker faults",
        _POINT + _FROM_NOW + _RELEASE_OLD,
        _FROM_NOW + _RELEASE_OLD + _POINT,
    ),
    mutant("the old lease is kept", "tight", _RELEASE_OLD),
    mutant(
        "parameters that can't be moved keep the lease",
        "worker faults",
        "        yield from release(holder, slot_of(word))\n",
        within=_POINT,
    ),
    # --- private pages
    mutant("private pages are never dropped", "private", _DROP),
    _drops_elsewhere(
        "private pages are dropped before the lease",
        "private",
        f"            if {_TRY_SHARED}",
        f"""            if not holder.counts.get(slot):
                yield ("drop_private", slot)
            if {_TRY_SHARED}""",
    ),
    _drops_elsewhere(
        "private pages are dropped after the parameters have moved",
        "private leases",
        '        yield ("point", word)\n',
        '        yield ("point", word)\n        yield ("drop_private", slot_of(word))\n',
        strict_only=True,
    ),
    _drops_elsewhere(
        "private pages are dropped when the lease ends",
        "private",
        "            del holder.counts[slot]\n",
        '            del holder.counts[slot]\n            yield ("drop_private", slot)\n',
    ),
    mutant(
        "private pages are dropped under another's lease",
        "private leases",
        "if not holder.counts.get(slot):",
        "if True:",
        within=_DROP,
        strict_only=True,
    ),
    mutant("an acquire that fails keeps the lock", "worker faults", _FAILED, "        raise\n"),
    mutant(
        "an acquire that fails ends another's lease",
        "lease faults",
        "if not holder.counts.get(slot):",
        "if True:",
        within=_FAILED,
    ),
]
