"""The layout: the fixed table of leaves of one slot.

Leaves are aligned to 64 bytes. Tied leaves are stored once, under all of their names. A leaf keeps its source's
strides where they are dense (channels-last, transposed), and becomes contiguous where they are not (expanded, sliced).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import LayoutMismatch, TiedLeavesDiffer
from .weights import Named, check_leaves, identity, same_bits

LEAF_ALIGNMENT = 64
SLOT_ALIGNMENT = 2 << 20


def align(nbytes: int, to: int) -> int:
    """The next multiple of `to` that is not below `nbytes`."""
    return -(-nbytes // to) * to


@dataclass(frozen=True)
class Leaf:
    """One stored tensor: its names, dtype, shape and strides (in elements), and where it lies in a slot (bytes)."""

    keys: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    nbytes: int
    optional: bool = False
    cast: bool = False

    @property
    def key(self) -> str:
        """The first of its names."""
        return self.keys[0]

    def overlaps(self, span: tuple[int, int]) -> bool:
        """Whether some of its bytes lie in a span, (begin, end), of the slot."""
        return self.offset < span[1] and span[0] < self.offset + self.nbytes


class Change(NamedTuple):
    """One leaf that a publish brings: its number in the layout, and the caller's tensor."""

    leaf: int
    tensor: Tensor


@dataclass(frozen=True)
class Layout:
    """The fixed table of leaves of a channel.

    ``leaves`` in slot order, ``slot_nbytes`` the bytes of one complete set of weights with its padding.
    Contract: immutable; the same in every process of a channel.
    """

    leaves: tuple[Leaf, ...]
    slot_nbytes: int

    @cached_property
    def index(self) -> dict[str, int]:
        """Leaf number by key path; tied leaves under each of their names."""
        return {key: number for number, leaf in enumerate(self.leaves) for key in leaf.keys}

    @property
    def nbytes(self) -> int:
        """Bytes of the leaves without padding."""
        return sum(leaf.nbytes for leaf in self.leaves)

    def __len__(self) -> int:
        return len(self.leaves)

    def __iter__(self) -> Iterator[Leaf]:
        return iter(self.leaves)


def build(table: Mapping[str, Named], dtype: torch.dtype | None = None) -> Layout:
    """The layout of a flat table of tensors; floating leaves are stored as `dtype` if one is given.

    Raises UnsupportedLeaf for what cannot be shared. Contract: reads no values.
    """
    check_leaves(table)
    groups: dict[tuple[object, ...], list[Named]] = {}
    for named in table.values():
        groups.setdefault(identity(named.tensor), []).append(named)
    leaves = []
    offset = 0
    for group in groups.values():
        leaf = _leaf(group, dtype, offset)
        leaves.append(leaf)
        offset = align(offset + leaf.nbytes, LEAF_ALIGNMENT)
    return Layout(tuple(leaves), offset)


def _leaf(group: list[Named], dtype: torch.dtype | None, offset: int) -> Leaf:
    tensor = group[0].tensor
    cast = dtype is not None and tensor.is_floating_point()
    stored = dtype if cast and dtype is not None else tensor.dtype
    return Leaf(
        keys=tuple(named.key for named in group),
        dtype=stored,
        shape=tuple(tensor.shape),
        stride=_dense_stride(tensor),
        offset=offset,
        nbytes=tensor.numel() * stored.itemsize,
        optional=all(named.optional for named in group),
        cast=cast,
    )


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    # empty_like keeps the strides of a dense tensor and makes others contiguous; on meta it costs nothing.
    return tuple(torch.empty_like(tensor, device="meta").stride())


def match(layout: Layout, table: Mapping[str, Named], *, partial: bool = False) -> list[Change]:
    """Which leaf each of the caller's tensors goes to, in the order of the layout.

    A full match names every leaf; only a non-persistent buffer may be absent. A partial one names at least one.
    Raises LayoutMismatch, UnsupportedLeaf or TiedLeavesDiffer with every fault found. Contract: writes nothing.
    """
    check_leaves(table)
    unexpected = [key for key, named in table.items() if key not in layout.index and not named.optional]
    given: dict[int, list[Named]] = {}
    for key, named in table.items():
        if key in layout.index:
            given.setdefault(layout.index[key], []).append(named)
    missing = [leaf.key for i, leaf in enumerate(layout) if i not in given and not leaf.optional]
    differing = {
        n.key: text for i, group in given.items() for n in group if (text := _differs(layout.leaves[i], n.tensor))
    }
    if unexpected or differing or (missing and not partial):
        raise LayoutMismatch(
            f"Expected {'some' if partial else 'all'} of the channel's keys ({len(layout.index)}) with their shapes "
            f"and dtypes, got {'only some' if missing and not (unexpected or differing) else 'others'} ({len(table)}); "
            f"nothing was written{'' if partial or not missing else '. Some of them alone: partial=True'}",
            unexpected=unexpected,
            missing=[] if partial else missing,
            differing=differing,
        )
    if partial and not given and layout.leaves:
        raise LayoutMismatch(
            "Expected at least one of the channel's keys in a partial publish, got none; nothing was written"
        )
    return [Change(i, _one_value(given[i])) for i in sorted(given)]


def _differs(leaf: Leaf, tensor: Tensor) -> str | None:
    if tuple(tensor.shape) != leaf.shape:
        return f"expected shape {leaf.shape}, got {tuple(tensor.shape)}"
    if tensor.dtype != leaf.dtype and not (leaf.cast and tensor.is_floating_point()):
        only = "only dtype= of the publisher casts, and floating leaves only"
        return f"expected dtype {leaf.dtype}, got {tensor.dtype}; {only}"
    return None


def _same_values(one: Tensor, other: Tensor) -> bool:
    """To the bit; where a channel casts they may come in two dtypes, of which the wider one counts."""
    if one.dtype == other.dtype:
        return same_bits(one, other)
    wide = torch.promote_types(one.dtype, other.dtype)
    return same_bits(one.detach().to(wide), other.detach().to(wide))


def _one_value(group: list[Named]) -> Tensor:
    first = group[0]
    for other in group[1:]:
        if not _same_values(first.tensor, other.tensor):
            raise TiedLeavesDiffer(
                f"`{first.key}` and `{other.key}` are tied, stored once, and were given different values; "
                "nothing was written. Give one of them, or the same values"
            )
    return first.tensor
