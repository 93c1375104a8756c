"""The targets of a binding: where a module's tensors are, and how they get a version's values.

Each parameter is either *mapped* (its data becomes a view of the slot, in the memory that it is in) or *copied* (it
keeps its storage). Buffers are always copied: a worker may write them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from . import device
from .copying import copy_all
from .device import ELSEWHERE, HOST, memory_of, name_of, reason
from .errors import BindingError, BindingLost, LayoutMismatch
from .layout import Layout, Leaf
from .outputs import Aliases
from .tables import Tables
from .weights import Place, identity, is_lazy, places

MODES = ("auto", "map", "copy")


class Target(NamedTuple):
    """One tensor of a module and the number of its leaf."""

    place: Place
    leaf: int
    tensor: Tensor


class View(Protocol):
    """A slot in one memory: a tensor per leaf, where they begin, and from and to which address they are mapped."""

    @property
    def tensors(self) -> list[Tensor]: ...
    @property
    def addresses(self) -> list[int]: ...
    @property
    def span(self) -> tuple[int, int]: ...


class Targets:
    """All tensors of one binding's modules, matched with the channel's leaves.

    ``models``: modules by name ("" for a channel of one model). ``mode``: "auto", "map" or "copy". ``steady``: with
    "auto", parameters on devices keep their addresses, since a CUDA graph may have them.
    Raises LayoutMismatch or BindingError, naming every key that does not fit. Contract: changes nothing by itself.
    """

    def __init__(self, layout: Layout, models: Mapping[str, nn.Module], mode: str, steady: bool = False) -> None:
        self._layout, self._models, self._mode, self._steady = layout, models, mode, steady
        self._mapped: list[Target] = []
        self._views: Sequence[Tensor] | None = None
        self._available: frozenset[int] = frozenset()
        self._resolve()
        # Two Parameters over one memory are tied as well; once they are mapped, that can't be told any more.
        self._origin = {id(target.tensor): identity(target.tensor) for target in self._unique}

    @property
    def mode(self) -> str:
        """ "map" if any parameter is mapped, else "copy"; what was asked for, if there are no parameters."""
        if self._mapped:
            return "map"
        return "copy" if self._copied or self._mode == "copy" else "map"

    @property
    def memories(self) -> frozenset[int]:
        """The memories that the modules' tensors are in."""
        return frozenset(self._memories.values())

    def point(self, views: Mapping[int, View]) -> Aliases:
        """Give all targets the values of one version: mapped ones alias it, the others copy it.

        ``views``: the slot in each memory where it is to be had; at least on the host, or in all memories that the
        modules' tensors are in. Returns what outputs must not alias from now on. Contract: `follow` came right before.
        """
        # Asking a tensor for its data makes another one: only at the first switch, and after a look at the module.
        before = self._views or [target.tensor.data for target in self._mapped]
        if views.keys() != self._available:
            before = self._rearrange(views)
        mapped = self._mapped_tensors
        tensors, addresses = _joined(views)
        new = self._of_mapped(tensors)
        copied = self._copied + self._buffers
        try:
            for parameter, view in zip(mapped, new, strict=True):
                parameter.data = view
            self._copy(copied, tensors)
            self._addresses = [*self._of_mapped(addresses), *map(Tensor.data_ptr, self._tensors[len(new) :])]
            self._views = new
            return self._aliases(views)
        except BaseException:
            # Also for an interrupt: the new slot's lease ends now, and nothing may point there.
            for parameter, data in zip(mapped, before, strict=True):
                parameter.data = data
            self._views = None
            self._check_shapes()
            raise

    def detach(self) -> None:
        """Give mapped parameters memory of their own, with the values that they show now; tied ones stay tied."""
        self._views = None
        self._privatize(self._mapped)

    def _aliases(self, views: Mapping[int, View]) -> Aliases:
        storages = (target.tensor.untyped_storage() for target in self._copied + self._buffers)
        first, *more = [view.span for view in views.values()]
        return Aliases(*first, {one.data_ptr(): one.nbytes() for one in storages if one.data_ptr()}, more)

    def _resolve(self) -> None:
        """Match the modules' tensors, as they are now, with the leaves."""
        # Tied parameters are one object under several names: it is pointed once.
        unique = list({id(target.tensor): target for target in self._matched()}.values())
        self._unique = unique
        self._memories = {id(target.tensor): memory_of(target.tensor) for target in unique}
        self._buffers = [t for t in unique if t.place.is_buffer]
        self._arrange((HOST,))
        self._tables = [(module, Tables(module)) for module in self._models.values()]

    def _arrange(self, memories: Iterable[int]) -> None:
        """Say which parameters are mapped and which are copied, where a slot is to be had in these memories."""
        self._available = frozenset(memories)
        self._mapped = [t for t in self._unique if not t.place.is_buffer and self._maps(t)]
        self._copied = [t for t in self._unique if not t.place.is_buffer and not self._maps(t)]
        # What a switch goes through as fast as Python can: a policy has hundreds of them.
        self._mapped_tensors = [t.tensor for t in self._mapped]
        self._tensors = [t.tensor for t in self._mapped + self._copied + self._buffers]
        order = {memory: place for place, memory in enumerate(sorted(self._available))}
        self._numbers = {
            id(t.tensor): order.get(self._memories[id(t.tensor)], order.get(HOST, 0)) * len(self._layout) + t.leaf
            for t in self._unique
        }
        self._of_mapped = _getter([self._numbers[id(t.tensor)] for t in self._mapped])
        self._views = None
        self._addresses = list(map(Tensor.data_ptr, self._tensors))

    def _rearrange(self, memories: Iterable[int]) -> list[Tensor]:
        """The same for other memories than before; those that were mapped and are copied now get memory of their own.
        The data of the mapped ones."""
        were = self._mapped
        with self._all_or_nothing():
            self._arrange(memories)
            kept = set(map(id, self._mapped_tensors))
            self._privatize([target for target in were if id(target.tensor) not in kept])
        return [target.tensor.data for target in self._mapped]

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """A block after whose failure everything is told as before. What is mapped must never be taken for copied: the
        next version would be copied into the slot, which others read."""
        before = dict(vars(self))
        try:
            yield
        except BaseException:
            vars(self).update(before)
            raise

    def _copy(self, targets: Iterable[Target], tensors: Sequence[Tensor]) -> None:
        """Copy a version's tensors, each from the memory that it is in if the slot is there, else from the host."""
        pairs: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for target in targets:
            pair = target.tensor.detach(), tensors[self._numbers[id(target.tensor)]]
            pairs.setdefault(self._memories[id(target.tensor)], []).append(pair)
        for memory, found in pairs.items():
            destinations, sources = [into for into, _ in found], [source for _, source in found]
            if memory >= 0:
                device.torch_side.copy(memory, device.torch_side.stream(memory), destinations, sources)
            else:
                copy_all(destinations, sources)

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
        memory = self._memories[id(tensor)]
        here = memory in self._available and not (self._steady and self._mode == "auto" and memory != HOST)
        fits = here and tensor.dtype == self._layout.leaves[target.leaf].dtype
        # An inference tensor has no version counter, and cannot become a view of a tensor that has one.
        return fits and self._mode != "copy" and not tensor.is_inference()

    def _check_mode(self, found: Iterable[Target]) -> None:
        if self._mode != "map":
            return
        cannot = {t.place.key: why for t in found if not t.place.is_buffer and (why := self._unmappable(t))}
        if cannot:
            lines = [f"  - `{key}`: {why}" for key, why in cannot.items()]
            raise BindingError("mode='map' is not possible, use mode='copy':\n" + "\n".join(lines))

    def _unmappable(self, target: Target) -> str | None:
        memory, dtype = memory_of(target.tensor), self._layout.leaves[target.leaf].dtype
        if target.tensor.dtype != dtype or target.tensor.is_inference() or memory == ELSEWHERE:
            return f"a {_kind(target.tensor)} cannot alias {dtype} on {name_of(max(memory, HOST))}"
        why = reason() if memory != HOST else None
        return f"memory on {name_of(memory)} can't be mapped: {why}" if why else None

    def _privatize(self, targets: Iterable[Target]) -> None:
        """Memory of their own for these, tied ones together: for all of them, or there is no room and for none."""
        private: dict[Any, Tensor] = {}
        moves = []
        for target in targets:
            key = self._origin.get(id(target.tensor), id(target.tensor)), target.leaf
            if key not in private:
                private[key] = device.torch_side.clone(target.tensor.data)
            moves.append((target.tensor, private[key]))
        for tensor, data in moves:
            tensor.data = data

    def _unchanged(self) -> bool:
        """Whether the modules have the very tensors that were bound, in the same submodules, where they were left."""
        same = all(tables.unchanged(module) for module, tables in self._tables)
        return same and list(map(Tensor.data_ptr, self._tensors)) == self._addresses

    def _check_shapes(self) -> None:
        """A tensor that was given another shape in place can't be told by its address."""
        for target in self._copied + self._buffers:
            leaf = self._layout.leaves[target.leaf]
            if tuple(target.tensor.shape) != leaf.shape:
                raise BindingLost(
                    f"The bound parameters are no longer as they were: expected shape {leaf.shape}, got "
                    f"{tuple(target.tensor.shape)} - at `{leaf.key}`"
                )

    def follow(self) -> None:
        """See whether the module still has the tensors that were bound; if it has others that fit, go on with those.

        Raises BindingLost before anything has changed.
        """
        if self._unchanged():
            return
        before = self._mapped
        with self._all_or_nothing():
            try:
                self._resolve()
            except (LayoutMismatch, BindingError) as error:
                text = f"The bound parameters are no longer the module's own; bind it again. {error}"
                raise BindingLost(text) from error
            kept = {id(target.tensor) for target in self._mapped}
            self._privatize([target for target in before if id(target.tensor) not in kept])


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} on {tensor.device}" + (" made in inference mode" if tensor.is_inference() else "")


def _joined(views: Mapping[int, View]) -> tuple[list[Tensor], list[int]]:
    """The tensors of all views and where they begin; `Targets._numbers` counts through them."""
    if len(views) == 1:
        (view,) = views.values()
        return view.tensors, view.addresses
    ordered = [views[memory] for memory in sorted(views)]
    return [t for view in ordered for t in view.tensors], [a for view in ordered for a in view.addresses]


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
