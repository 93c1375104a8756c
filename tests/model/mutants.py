"""Small mistakes in shmsync/slots.py, each of which the explorer must find: what one is, and all of them.

A mutant is an edit of the shipping source: if the text that it changes is not there any more, it says so.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import ModuleType

import shmsync.slots

from .operations import Operations


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
        """shmsync.slots with the mistake in it. Raises LookupError if the edited text is not there exactly once."""
        source = inspect.getsource(shmsync.slots)
        for before, after in self.edits:
            if source.count(before) != 1:
                raise LookupError(f"{self.name}: slots.py has this {source.count(before)} times, not once:\n{before}")
            source = source.replace(before, after)
        module = ModuleType(shmsync.slots.__name__)
        exec(compile(source, f"slots.py, but {self.name}", "exec"), module.__dict__)
        return module


def mutant(
    name: str, scope: str, before: str, after: str = "", *, within: str = "", strict_only: bool = False
) -> Mutant:
    """One edit. `within`: the longer text in which it is made, where `before` alone is there several times."""
    whole = within or before
    assert before in whole
    return Mutant(name, scope, ((whole, whole.replace(before, after, 1)),), strict_only=strict_only)
