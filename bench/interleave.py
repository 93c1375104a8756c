"""Rounds of all rivals in turn: what slows the machine down for a while slows all of them down alike."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import Any

from .processes import Child, ChildFailed
from .results import Results


class Crew:
    """The living rivals of one comparison, by name. One that fails is ended, recorded, and the rest go on."""

    def __init__(self, results: Results, where: str) -> None:
        self._results, self._where = results, where
        self.children: dict[str, Child] = {}

    def add(self, name: str, factory: Callable[..., Any], *args: Any) -> None:
        """Start a rival's process."""
        try:
            self.children[name] = Child(f"{self._where} {name}", factory, *args)
        except OSError as error:
            self._results.failures.append(f"{self._where}, {name}: {error}")

    def together(self, method: str, *args: Any, timeout: float = 180.0) -> dict[str, Any]:
        """Ask all of them at once; for setting up, not for measuring."""
        for name in list(self.children):
            self._try(name, lambda child: child.send(method, *args))
        answers = {name: self._try(name, lambda child: child.receive(timeout)) for name in list(self.children)}
        return {name: answer for name, answer in answers.items() if answer is not _GONE}

    def in_order(self, method: str, timeout: float = 180.0) -> dict[str, Any]:
        """Ask one after the other; for what would time out if all did it at once."""
        answers = {
            name: self._try(name, lambda child: child.call(method, timeout=timeout)) for name in list(self.children)
        }
        return {name: answer for name, answer in answers.items() if answer is not _GONE}

    def rounds(self, count: int, turn: Callable[[str, Child], None]) -> None:
        """`count` rounds in which each rival has its turn, beginning with another one each time.

        Fewer, but one at least, where they take longer than the run's limit for one phase.
        """
        end = time.monotonic() + self._results.about.get("phase_seconds", math.inf)
        for number in range(count):
            if number and time.monotonic() > end:
                self._results.notes.append(f"{self._where}: {number} of {count} rounds, they took too long")
                return
            names = list(self.children)
            start = number % max(1, len(names))
            for name in names[start:] + names[:start]:
                self._try(name, lambda child, name=name: turn(name, child))

    def end(self) -> None:
        """End all of them."""
        for child in self.children.values():
            child.end()
        self.children.clear()
        gc.collect()

    def _try(self, name: str, ask: Callable[[Child], Any]) -> Any:
        child = self.children.get(name)
        if child is None:
            return _GONE
        try:
            return ask(child)
        except ChildFailed as error:
            self._results.failures.append(f"{self._where}, {name}: {error}")
            del self.children[name]
            child.end()
            return _GONE


_GONE = object()


@contextmanager
def crew(results: Results, where: str, members: Mapping[str, tuple[Any, ...]]) -> Any:
    """A crew whose processes are gone when the block ends. ``members``: (factory, *args) by name."""
    made = Crew(results, where)
    try:
        for name, (factory, *args) in members.items():
            made.add(name, factory, *args)
        yield made
    finally:
        made.end()
