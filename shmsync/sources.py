"""The memory of what was published last: the same module again needs no look at every key, only at what may change."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from .layout import Change, Layout, match
from .weights import flatten


class Sources:
    """Matches sources with a layout, and remembers the last one if it comes a second time.

    Contract: a source that comes once is not kept alive; one that is remembered is checked anew whenever an entry,
    a dtype or a shape in it has changed.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._last: weakref.ref[Any] | None = None
        self._known: _Known | None = None

    def changes(self, source: Any, partial: bool) -> tuple[list[Change], object]:
        """As `layout.match`, and a token: the same one as before (not None) says that all is as it was, values aside.

        Raises what `match` raises.
        """
        known = self._known
        if known is not None and self._is_last(source) and known.partial == partial and known.unchanged(source):
            return known.changes, known.token
        self._known = None
        changes = match(self._layout, flatten(source), partial=partial)
        if isinstance(source, nn.Module) or _plain(source):
            if self._is_last(source) and _untied(self._layout, changes, source):
                self._known = _Known(source, partial, changes)
            self._last = weakref.ref(source, self._forget)
        return changes, self._known.token if self._known is not None else None

    def _is_last(self, source: Any) -> bool:
        return self._last is not None and self._last() is source

    def _forget(self, gone: weakref.ref[Any]) -> None:
        """Let its tensors go with the source."""
        if gone is self._last:
            self._last = self._known = None


class _Known:
    """What a source was like. Its look is one of C loops, as many of them as a policy has hundreds of tables."""

    def __init__(self, source: Any, partial: bool, changes: list[Change]) -> None:
        self.partial, self.changes = partial, changes
        self.token = object()  # not this object itself, which knows tensors
        # A module's tables do not refer to it; a TensorDict is its own table, and would keep itself alive here.
        self._tables = _Tables(source) if isinstance(source, nn.Module) else None
        self._entries = (self._tables or _Tables(source)).entries()
        self._tensors = [change.tensor for change in changes]
        self._kinds = self._look()

    def unchanged(self, source: Any) -> bool:
        """Whether every table still has the very same entries, and every tensor its dtype, shape and stride."""
        (counts, keys, values), before = (self._tables or _Tables(source)).entries(), self._entries
        if counts != before[0] or keys != before[1] or len(values) != len(before[2]):
            return False
        return all(map(operator.is_, values, before[2])) and self._look() == self._kinds

    def _look(self) -> list[Any]:
        """All that `.data = ` can change in a tensor that stays the same object, but its values."""
        # The dispatch keys tell the device, the layout, and the lazy ones: conjugated, negated, autograd's zeros.
        keys = map(_raw, map(torch._C._dispatch_keys, self._tensors))
        return list(zip(map(_type, self._tensors), map(Tensor.stride, self._tensors), keys, strict=True))


_raw = operator.methodcaller("raw_repr")
_type = operator.attrgetter("dtype", "shape")


class _Tables:
    """All tables in which something of a source could be added, taken away or replaced."""

    def __init__(self, source: Any) -> None:
        self._all = list(_containers(source))

    def entries(self) -> tuple[list[int], list[str], list[Any]]:
        """How many entries each table has, and all their keys and values."""
        keys = [table.keys() for table in self._all]  # a TensorDict's len() is its batch size
        values = chain.from_iterable([table.values() for table in self._all])
        return list(map(len, keys)), list(chain.from_iterable(keys)), list(values)


def _containers(source: Any) -> Iterator[Any]:
    if isinstance(source, TensorDictBase):
        yield source
        for value in source.values():
            if isinstance(value, TensorDictBase):
                yield from _containers(value)
        return
    for module in source.modules():
        yield from (module._parameters, module._buffers, module._modules)


def _plain(source: Any) -> bool:
    """Whether a source is made of TensorDicts only: what other collections replace inside themselves can't be seen."""
    if type(source) is not TensorDict:
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
