"""Mistakes in what the publisher does."""

from __future__ import annotations

from .mutants import mutant

_UNLOCK = '        yield ("unlock", slot)\n'
_STORE_ROWS = """        for row in rows:
            yield ("store_row", row, word)
"""
_FILL = "        yield from fill(writer, slot, version, changed)\n"
_PUBLISH = _FILL + _UNLOCK + _STORE_ROWS
_LIVE = "{slot_of(word) for word in words if word and word >= everybody}"
_CONTENT = """    stamps[stale] = UNKNOWN
    yield ("copy_in", slot, changed)
    if len(rest):
        yield ("copy_over", slot, slot_of(writer.newest), rest)
    yield ("store_slot_version", slot, version)
    stamps[stale] = wanted  # last: on devices, storing the version waits for the copies, which may fail
"""
_SETTLE = """    if any(words[row] == word for row in rows):
        for row in rows:
            yield ("store_row", row, word)
        writer.newest = word
        writer.used[slot] = version_of(word)
    yield ("unlock", slot)
"""
_NEWEST = "        writer.newest = word\n"
_MAY_GIVE_BACK = 'if slot in live or not (yield ("try_exclusive", slot)):'
_HOLE = """        writer.stamps.pop(slot, None)
        yield ("punch", slot)
    finally:
        yield ("unlock", slot)
"""
_STORE_VERSION = '    yield ("store_slot_version", slot, version)\n'
_STORE_ZERO = '    yield ("store_slot_version", slot, 0)\n'

PUBLISHER_MUTANTS = [
    mutant("the row moves before the copy", "everybody", _PUBLISH, _STORE_ROWS + _FILL + _UNLOCK),
    mutant("the row moves before the unlock", "stopped", _PUBLISH, _FILL + _STORE_ROWS + _UNLOCK),
    mutant("the slot stays locked", "stopped", _UNLOCK, within=_PUBLISH),
    mutant(
        "a push to everybody stores all rows one by one",
        "subsets",
        "in rows",
        "in ((1, 2, 0) if 0 in rows else rows)",
        within=_PUBLISH,
    ),
    mutant(
        "a slot is picked without its lock",
        "everybody",
        'if slot not in live and (yield ("try_exclusive", slot)):',
        "if slot not in live:",
    ),
    mutant("live rows are not respected", "subsets", _LIVE, "set()"),
    mutant("workers' rows are not respected", "subsets", _LIVE, "{slot_of(everybody)} if everybody else set()"),
    mutant("row 0 is not respected", "subsets", "if word and word >= everybody}", "if word > everybody}"),
    mutant("outdated rows are live for ever", "outdated", "if word and word >= everybody}", "if word}"),
    mutant("an empty row points to slot 0", "outdated", "if word and word >=", "if word >="),
    mutant("memory is not reserved", "growth", '        yield ("reserve", slot)\n'),
    mutant("a version is not zeroed before the copy", "faults", _STORE_ZERO, within=_STORE_ZERO + "    stamps ="),
    mutant("a version is stored before the copy", "everybody", _CONTENT, _STORE_VERSION + _CONTENT),
    mutant(
        "a version is stored in the middle of the copy",
        "faults",
        "    if len(rest)",
        _STORE_VERSION + "    if len(rest)",
        within=_CONTENT,
        strict_only=True,
    ),
    # --- stamps and numbers
    mutant("stamps are kept over a failed copy", "partial", "    stamps[stale] = UNKNOWN\n", within=_CONTENT),
    mutant("stamps are set before the copy", "partial", "= UNKNOWN", "= wanted", within=_CONTENT),
    mutant(
        "a version's number is used again after a failure",
        "numbers",
        "writer.version += 1 ",
        "writer.version = version_of(writer.newest) + 1 ",
    ),
    mutant(
        "a push is not remembered as the newest",
        "partial",
        "    writer.newest = word\n",
        within="        raise\n    writer.newest = word\n",
    ),
    # --- failures
    mutant("a failed push is not settled", "faults", "        yield from settle(writer, slot, rows, word)\n"),
    mutant("a push that shows is not finished", "faults in subsets", _STORE_ROWS, within=_SETTLE),
    mutant("a push that shows does not count as the newest", "faults in subsets", _NEWEST, within=_SETTLE),
    mutant("a push that does not show is finished", "faults", "any(words[row] == word for row in rows)", "True"),
    mutant("a push that does not show is the newest", "partial", _SETTLE, "    writer.newest = word\n" + _SETTLE),
    mutant(
        "a failed push keeps its lock",
        "faults",
        '    yield ("unlock", slot)\n',
        within=_SETTLE,
        strict_only=True,
    ),
    # --- giving back
    mutant("a hole is punched without the lock", "growth", _MAY_GIVE_BACK, "if slot in live:"),
    mutant("the newest slot is given back", "growth", "slot in live or ", within=_MAY_GIVE_BACK),
    mutant(
        "a hole keeps its version",
        "growth",
        "    " + _STORE_ZERO,
        within="    " + _STORE_ZERO + "        writer.stamps.pop",
    ),
    mutant("a hole keeps its stamps", "growth", "        writer.stamps.pop(slot, None)\n"),
    mutant("a hole stays locked", "growth", 'yield ("unlock", slot)', "pass", within=_HOLE, strict_only=True),
    mutant(
        "a hole that can't be punched stays locked",
        "growth faults",
        "    finally:\n        yield",
        "    finally:\n        pass\n    if True:\n        yield",
        within=_HOLE,
        strict_only=True,
    ),
]
