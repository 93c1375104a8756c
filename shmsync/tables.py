"""Tables: where a module or a TensorDict has its entries, and whether any of them was added, taken away or replaced."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterator
from itertools import chain, compress
from typing import Any

from tensordict import TensorDict
from torch import nn

from .copying import engine

_keys, _values = operator.methodcaller("keys"), operator.methodcaller("values")


class Tables:
    """All tables in which something of a source could be added, taken away or replaced, with their entries.

    A policy has hundreds of tables, most of them empty, so they are looked at in C loops.
    Contract: refers to everything in the source, but not to the source.
    """

    def __init__(self, source: Any) -> None:
        self._parts = tuple(_parts(source))
        self._names = _names(source)
        self._of_each = operator.attrgetter(*self._names)
        self._all = tuple(self._of(source))
        self._counts, self._keys, self._values = self._entries()
        # It knows dicts among an object's own attributes; TorchScript's modules have others.
        self._quick = engine is not None and hasattr(engine, "same_tables") and self._unchanged_in_c(source)

    def unchanged(self, source: Any) -> bool:
        """Whether they are still the source's, with the very same entries."""
        return self._unchanged_in_c(source) if self._quick else self._unchanged(source)

    def _unchanged_in_c(self, source: Any) -> bool:
        return engine.same_tables(source, self._parts, self._names, self._all, self._counts, self._keys, self._values)

    def _unchanged(self, source: Any) -> bool:
        # Each part of the source may be given other tables, inside another operation.
        if not all(map(operator.is_, self._of(source), self._all)):
            return False
        counts, keys, values = self._entries()
        if counts != self._counts or keys != self._keys or len(values) != len(self._values):
            return False
        return all(map(operator.is_, values, self._values))

    def _of(self, source: Any) -> Iterator[Any]:
        each = map(self._of_each, chain((source,), self._parts))
        return chain.from_iterable(each) if len(self._names) > 1 else each

    def _entries(self) -> tuple[array[int], tuple[str, ...], tuple[Any, ...]]:
        """How many entries each table has, and all their keys and values."""
        counts = array("Q", map(len, self._all))
        filled = list(compress(self._all, counts))
        return counts, tuple(chain.from_iterable(map(_keys, filled))), tuple(chain.from_iterable(map(_values, filled)))


def _names(source: Any) -> tuple[str, ...]:
    return ("_parameters", "_buffers", "_modules") if isinstance(source, nn.Module) else ("_tensordict",)


def _parts(source: Any) -> Iterator[Any]:
    """All modules or TensorDicts in it, but for itself: it shall not be kept alive."""
    if isinstance(source, nn.Module):
        yield from (module for module in source.modules() if module is not source)
        return
    for value in source.values():
        if isinstance(value, TensorDict):
            yield value
            yield from _parts(value)
