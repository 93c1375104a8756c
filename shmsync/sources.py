"""The memory of what was published last: the same module again needs no look at every key, only at what may change."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
from tensordict import TensorDict, is_tensor_collection
from torch import Tensor, nn

from .guards import Guard
from .layout import Change, Layout, match
from .tables import Tables
from .weights import flatten


class Changes:
    """What a publish brings: the caller's tensors and the numbers of their leaves, in the layout's order.

    ``nbytes``: of the leaves as they are stored. ``token``: the same object as before (not None) says that leaves,
    dtypes, shapes and strides are as they were then. ``addresses``: where the tensors begin, if that is known.
    """

    def __init__(self, layout: Layout, changes: list[Change], token: object = None) -> None:
        self.numbers = [change.leaf for change in changes]
        self.tensors = [change.tensor for change in changes]
        self.nbytes = sum(layout.leaves[number].nbytes for number in self.numbers)
        self.token, self.array = token, np.array(self.numbers, np.int64)
        self.addresses: array[int] | None = None
        self.on_host: bool | None = None  # whether all tensors are; None = nobody has looked yet
        self._parts: tuple[array[int] | None, dict[int, list[int]]] | None = None

    def parts(self, memory_of: Callable[[Tensor], int]) -> dict[int, list[int]]:
        """Which of the tensors, by their place in the list, are in which memory."""
        if self._parts is None or self.addresses is None or self._parts[0] != self.addresses:
            parts: dict[int, list[int]] = {}
            for place, tensor in enumerate(self.tensors):
                parts.setdefault(memory_of(tensor), []).append(place)
            self._parts = self.addresses, parts
        return self._parts[1]


class Sources:
    """Matches sources with a layout, and remembers the last one if it comes a second time.

    Contract: a source that comes once is not kept alive; one that is remembered is checked anew whenever an entry,
    a dtype or a shape in it has changed.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._last: weakref.ref[Any] | None = None
        self._known: _Known | None = None

    def changes(self, source: Any, partial: bool) -> Changes:
        """As `layout.match`, and raises what it raises."""
        known = self._known
        if known is not None and self._is_last(source) and known.partial == partial and known.unchanged(source):
            return known.changes
        self._known = None
        matched = match(self._layout, flatten(source), partial=partial)
        changes = Changes(self._layout, matched)
        if _plain(source):
            if self._is_last(source) and _untied(self._layout, matched, source):
                changes.token = object()
                self._known = _Known(source, partial, changes)
            self._last = weakref.ref(source, self._forget)
        return changes

    def _is_last(self, source: Any) -> bool:
        return self._last is not None and self._last() is source

    def _forget(self, gone: weakref.ref[Any]) -> None:
        """Let its tensors go with the source."""
        if gone is self._last:
            self._last = self._known = None


class _Known:
    """What a source was like."""

    def __init__(self, source: Any, partial: bool, changes: Changes) -> None:
        self.partial, self.changes = partial, changes
        self._tables, self._guard = Tables(source), Guard(changes.tensors)
        changes.addresses = self._guard.addresses

    def unchanged(self, source: Any) -> bool:
        """Whether every table still has the very same entries, and every tensor is what it was but for its values."""
        if not (self._tables.unchanged(source) and self._guard.holds()):
            return False
        self.changes.addresses = self._guard.addresses
        return True


def _plain(source: Any) -> bool:
    """Whether a source is made of plain modules or of TensorDicts only: what other collections, TensorDictParams among
    them, replace inside themselves can't be seen.

    TensorDicts' tables are not public; where a release has none, each push looks at every entry.
    """
    if isinstance(source, nn.Module):
        return not any(is_tensor_collection(module) for module in source.modules())
    if type(source) is not TensorDict or not isinstance(getattr(source, "_tensordict", None), dict):
        return False
    return all(isinstance(value, Tensor) or _plain(value) for value in source.values())


def _untied(layout: Layout, changes: list[Change], source: Any) -> bool:
    """Whether each leaf comes from one object: two objects over one memory may part without any entry changing."""
    objects: dict[int, set[int]] = {}
    for named in flatten(source).values():
        number = layout.index.get(named.key)
        if number is not None:
            objects.setdefault(number, set()).add(id(named.tensor))
    return all(len(ids) == 1 for ids in objects.values()) and len(objects) == len(changes)
