"""Small mistakes in shmsync/slots.py, each of which the explorer must find.

A mutant is an edit of the shipping source: if the text that it changes is not there any more, it says so.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import ModuleType

import shmsync.slots

from .operations import Operations, Outcome
from .state import Shared, Worker, put
from .threads import Thread


@dataclass(frozen=True)
class Mutant:
    """Edits of the source, (before, after) each, or other operations; and the scope that shows it.

    `strict_only`: in that scope nobody but the explorer notices, with its view of everything.
    """

    name: str
    scope: str
    edits: tuple[tuple[str, str], ...] = ()
    operations: type[Operations] = Operations
    strict_only: bool = False

    def module(self) -> ModuleType:
        """shmsync.slots with the mistake in it."""
        source = inspect.getsource(shmsync.slots)
        for before, after in self.edits:
            if source.count(before) != 1:
                raise LookupError(f"{self.name}: slots.py has this {source.count(before)} times, not once:\n{before}")
            source = source.replace(before, after)
        module = ModuleType(shmsync.slots.__name__)
        exec(compile(source, f"slots.py, but {self.name}", "exec"), module.__dict__)
        return module


class ResetsRow(Operations):
    """A newcomer sets its worker's row to nothing."""

    def join(self, thread: Thread, shared: Shared, worker: Worker, rows: tuple[int, ...]) -> Outcome:
        outcome = super().join(thread, shared, worker, rows)
        return outcome._replace(shared=shared._replace(rows=put(shared.rows, rows[-1], 0)))


_PUBLISH = """        yield from fill(writer, slot, version, changed)
        yield ("unlock", slot)
        for row in rows:
            yield ("store_row", row, word)
"""
_FIRST_LOOK = """                if not holder.counts.get(slot):
                    yield from _first_look(slot)
"""
_POINT = """    try:
        yield ("point", word)
    except BaseException:
        yield from release(holder, slot_of(word))
        raise
"""
_RELEASE_OLD = """    if old:
        yield from release(holder, slot_of(old))
"""
_DROP = """    try:
        yield ("drop_private", slot)
    except BaseException:
        yield ("unlock", slot)
        raise
"""
_SETTLE = """    if any(words[row] == word for row in rows):
        for row in rows:
            yield ("store_row", row, word)
        writer.newest = word
        writer.used[slot] = version_of(word)
    yield ("unlock", slot)
"""
_COUNT_DOWN = """        holder.counts[slot] -= 1
        if not holder.counts[slot]:
            del holder.counts[slot]
            yield ("unlock", slot)
"""
_AGAIN = """            yield ("again", word)
"""
_FINALLY = """    finally:
        yield ("leave",)
"""
_UNLESS_RAISING = """    finally:
        if __import__("sys").exc_info()[0] is None:
            yield ("leave",)
"""
_FILL = """    stamps[stale] = UNKNOWN
    yield ("copy_in", slot, changed)
    if len(rest):
        yield ("copy_over", slot, slot_of(writer.newest), rest)
    stamps[stale] = wanted[stale]
    yield ("store_slot_version", slot, version)
"""


def _without(text: str, part: str) -> tuple[tuple[str, str], ...]:
    assert part in text
    return ((text, text.replace(part, "", 1)),)


MUTANTS = [
    # --- the publisher
    Mutant("the row moves before the copy", "everybody", (
        (_PUBLISH, """        for row in rows:
            yield ("store_row", row, word)
        yield from fill(writer, slot, version, changed)
        yield ("unlock", slot)
"""),)),
    Mutant("the row moves before the unlock", "stopped", (
        (_PUBLISH, """        yield from fill(writer, slot, version, changed)
        for row in rows:
            yield ("store_row", row, word)
        yield ("unlock", slot)
"""),)),
    Mutant("the slot stays locked", "everybody", _without(_PUBLISH, '        yield ("unlock", slot)\n')),
    Mutant("a push to everybody stores all rows one by one", "subsets", (
        (_PUBLISH, _PUBLISH.replace("in rows", "in ((1, 2, 0) if 0 in rows else rows)")),)),
    Mutant("a slot is picked without its lock", "everybody", (
        ('if slot not in live and (yield ("try_exclusive", slot)):', "if slot not in live:"),)),
    Mutant("live rows are not respected", "subsets", (
        ("live = {slot_of(word) for word in words if word and word >= everybody}", "live = set()"),)),
    Mutant("workers' rows are not respected", "subsets", (
        ("live = {slot_of(word) for word in words if word and word >= everybody}",
         "live = {slot_of(everybody)} if everybody else set()"),)),
    Mutant("row 0 is not respected", "subsets", (
        ("if word and word >= everybody}", "if word and word > everybody}"),)),
    Mutant("outdated rows are live for ever", "outdated", (
        ("if word and word >= everybody}", "if word}"),)),
    Mutant("an empty row points to slot 0", "outdated", (
        ("if word and word >= everybody}", "if word >= everybody}"),)),
    Mutant("a version is not zeroed before the copy", "faults", (
        ('    yield ("store_slot_version", slot, 0)\n    stamps =', "    stamps ="),)),
    Mutant("a version is stored before the copy", "everybody", (
        (_FILL, '    yield ("store_slot_version", slot, version)\n' + _FILL),)),
    Mutant("a version is stored in the middle of the copy", "faults", (
        (_FILL, _FILL.replace("    if len(rest)", '    yield ("store_slot_version", slot, version)\n    if len(rest)')),), strict_only=True),
    Mutant("stamps are kept over a failed copy", "partial", _without(_FILL, "    stamps[stale] = UNKNOWN\n")),
    Mutant("stamps are set before the copy", "partial", (
        (_FILL, _FILL.replace("stamps[stale] = UNKNOWN", "stamps[stale] = wanted[stale]")),)),
    Mutant("a version's number is used again after a failure", "numbers", (
        ("writer.version += 1 ", "writer.version = version_of(writer.newest) + 1 "),)),
    Mutant("memory is not reserved", "growth", (('        yield ("reserve", slot)\n', ""),)),
    Mutant("a failed push is not settled", "faults", (
        ("        yield from settle(writer, slot, rows, word)\n", ""),)),
    Mutant("a push that shows is not finished", "faults in subsets", (
        (_SETTLE, _SETTLE.replace('        for row in rows:\n            yield ("store_row", row, word)\n', "")),)),
    Mutant("a push that shows does not count as the newest", "faults in subsets", (
        (_SETTLE, _SETTLE.replace("        writer.newest = word\n", "")),)),
    Mutant("a failed push that does not show is finished", "faults", (
        (_SETTLE, _SETTLE.replace("any(words[row] == word for row in rows)", "True")),)),
    Mutant("a failed push keeps its lock", "faults", _without(_SETTLE, '    yield ("unlock", slot)\n'), strict_only=True),
    Mutant("a failed push is the newest", "partial", (
        (_PUBLISH, "        writer.newest, before = word, writer.newest\n" + _PUBLISH),
    )),
    Mutant("a push is not remembered as the newest", "partial", (
        ("        raise\n    writer.newest = word\n", "        raise\n"),)),
    # --- giving back
    Mutant("a hole is punched without the lock", "growth", (
        ('if slot in live or not (yield ("try_exclusive", slot)):', "if slot in live:"),)),
    Mutant("the newest slot is given back", "growth", (
        ('if slot in live or not (yield ("try_exclusive", slot)):', 'if not (yield ("try_exclusive", slot)):'),)),
    Mutant("a hole keeps its version", "growth", (
        ('        yield ("store_slot_version", slot, 0)\n        writer.stamps.pop', "        writer.stamps.pop"),)),
    Mutant("a hole keeps its stamps", "growth", (("        writer.stamps.pop(slot, None)\n", ""),)),
    Mutant("a hole stays locked", "growth", (
        ('        yield ("punch", slot)\n    finally:\n        yield ("unlock", slot)\n', '        yield ("punch", slot)\n    finally:\n        pass\n'),), strict_only=True),
    Mutant("a hole that can't be punched stays locked", "growth faults", (
        ('        yield ("punch", slot)\n    finally:\n        yield ("unlock", slot)\n',
         '        yield ("punch", slot)\n        yield ("unlock", slot)\n    finally:\n        pass\n'),), strict_only=True),
    # --- the subscriber
    Mutant("slot.version is not compared", "everybody", (
        ('if (yield ("load_slot_version", slot)) == version_of(word):', "if True:"),)),
    Mutant("a slot is used although its lock is taken", "everybody", (
        ('                yield ("again", word)\n                continue\n', "                pass\n"),)),
    Mutant("a slot that is not the row's stays locked", "tight", (
        ('            if not holder.counts.get(slot):\n                yield ("unlock", slot)\n            yield ("again", word)\n',
         '            yield ("again", word)\n'),), strict_only=True),
    Mutant("a subscriber follows its own row only", "subsets", (("return max(words)", "return words[-1]"),)),
    Mutant("a subscriber follows row 0 first", "subsets", (("return max(words)", "return words[0] or words[-1]"),)),
    Mutant("a newcomer resets its worker's row", "newcomer", operations=ResetsRow),
    Mutant("an acquire does not take the mutex", "leases", (
        ('    yield ("enter",)\n    try:\n        while True:\n', "    try:\n        while True:\n"),
        ('            yield ("again", word)\n    finally:\n        yield ("leave",)\n', '            yield ("again", word)\n    finally:\n        pass\n'))),
    Mutant("a release does not take the mutex", "leases", (
        ('    yield ("enter",)\n    try:\n        holder.counts', "    try:\n        holder.counts"),
        (_COUNT_DOWN + '    finally:\n        yield ("leave",)\n', _COUNT_DOWN + "    finally:\n        pass\n"))),
    Mutant("unlocks are not counted", "leases", (
        (_COUNT_DOWN, """        holder.counts[slot] -= 1
        yield ("unlock", slot)
        if not holder.counts[slot]:
            del holder.counts[slot]
"""),)),
    Mutant("a lease that has ended keeps its lock", "tight", _without(_COUNT_DOWN, '            yield ("unlock", slot)\n')),
    Mutant("the lease is released before the parameters are moved", "worker faults", (
        (_POINT + "    old, bound.word = bound.word, word\n" + _RELEASE_OLD,
         "    old, bound.word = bound.word, word\n" + _RELEASE_OLD + _POINT),)),
    Mutant("version 0 is leased", "leases", (("            if not word:\n                return 0\n            slot =", "            slot ="),)),
    Mutant("an acquire that fails keeps the mutex", "worker faults", (
        (_AGAIN + _FINALLY, _AGAIN + _UNLESS_RAISING),)),
    Mutant("a release that fails keeps the mutex", "worker faults", (
        (_COUNT_DOWN + _FINALLY, _COUNT_DOWN + _UNLESS_RAISING),)),
    Mutant("the old lease is kept", "tight", ((_RELEASE_OLD, ""),)),
    Mutant("parameters that can't be moved keep the lease", "worker faults",
           _without(_POINT, "        yield from release(holder, slot_of(word))\n")),
    # --- private pages
    Mutant("private pages are never dropped", "private", ((_FIRST_LOOK, ""),)),
    Mutant("private pages are dropped before the lease", "private", (
        (_FIRST_LOOK, ""),
        ('            if not (yield ("try_shared", slot)):\n',
         '            if not holder.counts.get(slot):\n                yield ("drop_private", slot)\n'
         '            if not (yield ("try_shared", slot)):\n'))),
    Mutant("private pages are dropped after the parameters have moved", "private leases", (
        (_FIRST_LOOK, ""), (_POINT, _POINT.replace('("point", word)\n', '("point", word)\n        yield ("drop_private", slot_of(word))\n'))), strict_only=True),
    Mutant("private pages are dropped when the lease ends", "private", (
        (_FIRST_LOOK, ""), (_COUNT_DOWN, _COUNT_DOWN.replace('            yield ("unl', '            yield ("drop_private", slot)\n            yield ("unl')))),
    Mutant("private pages are dropped under another's lease", "private leases", (
        (_FIRST_LOOK, "                yield from _first_look(slot)\n"),), strict_only=True),
    Mutant("pages that can't be dropped keep the lock", "worker faults", _without(_DROP, '        yield ("unlock", slot)\n')),
]
