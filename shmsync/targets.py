"""The targets of a binding: where a module's tensors are, and how they get a version's values.

Each parameter is either *mapped* (its data becomes a view of the slot) or *copied* (it keeps its storage). Buffers are
always copied: a worker may write them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from .copying import copy_all
from .errors import BindingError, BindingLost, LayoutMismatch
from .layout import Layout, Leaf
from .outputs import Aliases
from .weights import Place, identity, is_lazy, places

MODES = ("auto", "map", "copy")


class Target(NamedTuple):
    """One tensor of a module and the number of its leaf."""

    place: Place
    leaf: int
    tensor: Tensor


class Targets:
    """All tensors of one binding's modules, matched with the channel's leaves.

    ``models``: modules by name ("" for a channel of one model). ``mode``: "auto", "map" or "copy".
    Raises LayoutMismatch or BindingError, naming every key that does not fit. Contract: changes nothing by itself.
    """

    def __init__(self, layout: Layout, models: Mapping[str, nn.Module], mode: str) -> None:
        self._layout, self._models, self._mode = layout, models, mode
        self._mapped: list[Target] = []
        self._views: Sequence[Tensor] | None = None
        self._resolve()
        # Two Parameters over one memory are tied as well; once they are mapped, that can't be told any more.
        self._origin = {id(target.tensor): identity(target.tensor) for target in self._unique}

    @property
    def mode(self) -> str:
        """ "map" if any parameter is mapped, else "copy"; what was asked for, if there are no parameters."""
        if self._mapped:
            return "map"
        return "copy" if self._copied or self._mode == "copy" else "map"

    def point(self, tensors: list[Tensor], addresses: list[int], span: tuple[int, int]) -> Aliases:
        """Give all targets the values of one version's tensors: mapped ones alias them, the others copy them.

        ``addresses``: where the tensors begin; ``span``: from and to which address they are mapped. Returns what
        outputs must not alias from now on. Raises BindingLost before anything has changed.
        """
        self._follow_module()
        # Asking a tensor for its data makes another one: only at the first switch, and after a look at the module.
        before = self._views or [target.tensor.data for target in self._mapped]
        views = self._of_mapped(tensors)
        copied = self._copied + self._buffers
        try:
            for parameter, view in zip(self._mapped_tensors, views, strict=True):
                parameter.data = view
            copy_all([target.tensor.detach() for target in copied], [tensors[target.leaf] for target in copied])
            self._addresses = [*self._of_mapped(addresses), *map(Tensor.data_ptr, self._tensors[len(views) :])]
            self._views = views
            return self._aliases(span)
        except BaseException:
            # Also for an interrupt: the new slot's lease ends now, and nothing may point there.
            for parameter, data in zip(self._mapped_tensors, before, strict=True):
                parameter.data = data
            self._views = None
            self._check_shapes()
            raise

    def detach(self) -> None:
        """Give mapped parameters memory of their own, with the values that they show now; tied ones stay tied."""
        self._views = None
        self._privatize(self._mapped)

    def _aliases(self, span: tuple[int, int]) -> Aliases:
        storages = (target.tensor.untyped_storage() for target in self._copied + self._buffers)
        return Aliases(*span, {one.data_ptr(): one.nbytes() for one in storages if one.data_ptr()})

    def _resolve(self) -> None:
        """Match the modules' tensors, as they are now, with the leaves."""
        self._all = self._matched()
        # Tied parameters are one object under several names: it is pointed once.
        unique = list({id(target.tensor): target for target in self._all}.values())
        self._buffers = [t for t in unique if t.place.is_buffer]
        self._mapped = [t for t in unique if not t.place.is_buffer and self._maps(t)]
        self._copied = [t for t in unique if not t.place.is_buffer and not self._maps(t)]
        self._unique = self._mapped + self._copied + self._buffers
        # What a switch goes through as fast as Python can: a policy has hundreds of them.
        self._tensors = [t.tensor for t in self._unique]
        self._mapped_tensors = [t.tensor for t in self._mapped]
        self._of_mapped = _getter([t.leaf for t in self._mapped])
        self._views = None
        self._watched = self._entries()
        self._tables = list({id(table): table for table in self._watched[0]}.values())
        self._entries_in_all = sum(map(len, self._tables))
        self._addresses = list(map(Tensor.data_ptr, self._tensors))

    def _entries(self) -> tuple[list[dict[str, Any]], list[str], list[Any]]:
        """What the modules are made of: their tables, and in them the names and the tensors or submodules."""
        found: list[tuple[dict[str, Any], str, Any]] = [(t.place.table, t.place.name, t.tensor) for t in self._all]
        for module in self._models.values():
            for owner in module.modules():
                found += [(owner._modules, name, child) for name, child in owner._modules.items()]
        tables, names, values = zip(*found, strict=True) if found else ((), (), ())
        return list(tables), list(names), list(values)

    def _matched(self) -> list[Target]:
        found, unexpected, differing = [], [], {}
        for place in (place for prefix, module in self._models.items() for place in places(module, prefix)):
            number = self._layout.index.get(place.key)
            if number is None:
                unexpected += [] if place.optional else [place.key]
                continue
            target = Target(place, number, place.table[place.name])
            if text := self._misfit(self._layout.leaves[number], target.tensor):
                differing[place.key] = text
            found.append(target)
        missing = self._missing({target.leaf for target in found})
        if unexpected or missing or differing:
            raise LayoutMismatch(
                f"The module does not fit the {len(self._layout)} leaves of the channel",
                unexpected=unexpected,
                missing=missing,
                differing=differing,
            )
        self._check_mode(found)
        _check_ties(found)
        return found

    def _missing(self, matched: set[int]) -> list[str]:
        """Leaves of the bound models that no tensor was found for. Other models of the channel may stay unbound."""
        prefixes = tuple(f"{name}." if name else "" for name in self._models)
        ours = (leaf for i, leaf in enumerate(self._layout) if i not in matched and not leaf.optional)
        return [leaf.key for leaf in ours if any(key.startswith(prefixes) for key in leaf.keys)]

    def _misfit(self, leaf: Leaf, tensor: Tensor) -> str | None:
        if is_lazy(tensor):
            return "a lazy parameter without a shape; run one forward before binding"
        if tensor.is_meta:
            return "on the meta device; give the module memory first (to_empty)"
        if tuple(tensor.shape) != leaf.shape:
            return f"expected shape {leaf.shape}, got {tuple(tensor.shape)}"
        castable = tensor.is_floating_point() and leaf.dtype.is_floating_point and (leaf.cast or self._mode == "copy")
        if tensor.dtype != leaf.dtype and not castable:
            return f"expected dtype {leaf.dtype}, got {tensor.dtype}; only the publisher's dtype= or mode='copy' casts"
        return None

    def _maps(self, target: Target) -> bool:
        tensor = target.tensor
        fits = tensor.dtype == self._layout.leaves[target.leaf].dtype and tensor.device.type == "cpu"
        # An inference tensor has no version counter, and cannot become a view of a tensor that has one.
        return fits and self._mode != "copy" and not tensor.is_inference()

    def _check_mode(self, found: Iterable[Target]) -> None:
        cannot = [t for t in found if self._mode == "map" and not t.place.is_buffer and not self._maps(t)]
        if cannot:
            lines = [
                f"  - `{t.place.key}`: a {_kind(t.tensor)} cannot alias {self._layout.leaves[t.leaf].dtype} on the host"
                for t in cannot
            ]
            raise BindingError("mode='map' is not possible, use mode='copy':\n" + "\n".join(lines))

    def _privatize(self, targets: Iterable[Target]) -> None:
        private: dict[Any, Tensor] = {}
        for target in targets:
            key = self._origin.get(id(target.tensor), id(target.tensor)), target.leaf
            if key not in private:
                private[key] = target.tensor.data.clone()
            target.tensor.data = private[key]

    def _unchanged(self) -> bool:
        """Whether the modules have the very tensors that were bound, in the same submodules, where they were left."""
        tables, names, values = self._watched
        try:
            same = all(map(operator.is_, map(operator.getitem, tables, names), values))
        except KeyError:
            return False
        # What is gone or another one was found above, so that a sum shows whether something was added.
        if not same or sum(map(len, self._tables)) != self._entries_in_all:
            return False
        return list(map(Tensor.data_ptr, self._tensors)) == self._addresses

    def _check_shapes(self) -> None:
        """A tensor that was given another shape in place can't be told by its address."""
        for target in self._copied + self._buffers:
            leaf = self._layout.leaves[target.leaf]
            if tuple(target.tensor.shape) != leaf.shape:
                raise BindingLost(
                    f"The bound parameters are no longer as they were: expected shape {leaf.shape}, got "
                    f"{tuple(target.tensor.shape)} - at `{leaf.key}`"
                )

    def _follow_module(self) -> None:
        """See whether the module still has the tensors that were bound; if it has others that fit, go on with those."""
        if self._unchanged():
            return
        before = self._mapped
        try:
            self._resolve()
        except (LayoutMismatch, BindingError) as error:
            raise BindingLost(f"The bound parameters are no longer the module's own; bind it again. {error}") from error
        kept = {id(target.tensor) for target in self._mapped}
        self._privatize([target for target in before if id(target.tensor) not in kept])


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} on {tensor.device}" + (" made in inference mode" if tensor.is_inference() else "")


def _getter(numbers: list[int]) -> Callable[[list[Any]], Sequence[Any]]:
    """What picks these items of a list."""
    if len(numbers) < 2:
        return lambda items: [items[number] for number in numbers]
    return operator.itemgetter(*numbers)


def _check_ties(found: Iterable[Target]) -> None:
    first: dict[int, Target] = {}
    for target in found:
        other = first.setdefault(id(target.tensor), target)
        if other.leaf != target.leaf:
            raise LayoutMismatch(
                f"`{other.place.key}` and `{target.place.key}` are one tensor in this module, but two leaves "
                "in the channel; "
                "make the publisher from the module itself, so that it knows the tie"
            )
