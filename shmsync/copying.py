"""Copies of many tensors at once: into a slot, between slots, and out of one.

With the extension, slots are filled by its copy engine: planned once, split by bytes among threads, fused casts.
Without it the calling thread does it alone. torch would split each leaf among its threads and wait for all of them at
each leaf; beside busy workers, which is where a trainer lives, each of these waits costs a time slice of the scheduler.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

try:
    from . import _C as engine
except ImportError:  # not built: everything works, slower
    engine = None  # type: ignore[assignment]

has_extension = engine is not None and hasattr(engine, "Plan")

# torch splits a copy among its threads from this many elements on (at::internal::GRAIN_SIZE).
_ONE_THREAD = 32768 - 1
_CASTS = {
    (torch.float32, torch.bfloat16): "float32_to_bfloat16",
    (torch.float32, torch.float16): "float32_to_float16",
    (torch.bfloat16, torch.float32): "bfloat16_to_float32",
    (torch.float16, torch.float32): "float16_to_float32",
}


def copy_all(destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its destination, cast by value where the dtypes differ.

    Contract: records nothing in autograd; blocks until the bytes are there; on an error part of them may be.
    """
    if destinations:
        with torch.no_grad():
            torch._foreach_copy_(list(destinations), list(sources))


class _Planned(NamedTuple):
    """Which of the given leaves go by their bytes, with the engine's plan for them, and which through torch."""

    token: object
    plan: Any
    quick: list[int]
    rest: list[int]


class Filler:
    """Fills one slot, whose tensors are `views`: dense, on the host, and nobody's autograd graph.

    Contract: as `copy_all`; not for two threads at once; keeps no source alive.
    """

    def __init__(self, views: Sequence[Tensor]) -> None:
        self.views = views
        self._last: _Planned | None = None

    def fill(
        self,
        leaves: Sequence[int],
        sources: Sequence[Tensor],
        token: object = None,
        addresses: array[int] | None = None,
    ) -> None:
        """Copy `sources` into the leaves of these numbers.

        ``token``: the same object as last time says that leaves, dtypes, shapes and strides are as they were then; only
        addresses are looked up again, unless they are given, as an array of uint64.
        """
        if not leaves:
            return
        planned = self._last
        if token is None or planned is None or planned.token is not token:
            planned = self._plan(leaves, sources, token)
            self._last = planned if token is not None else None
        if planned.plan is not None:
            if addresses is None or planned.rest:
                addresses = array("Q", [sources[i].data_ptr() for i in planned.quick])
            planned.plan.run(addresses)
        else:
            for i in planned.quick:
                view = self.views[leaves[i]]
                ctypes.memmove(view.data_ptr(), sources[i].data_ptr(), view.nbytes)
        if planned.rest:
            pieces = [piece for i in planned.rest for piece in _pieces(self.views[leaves[i]], sources[i])]
            copy_all([destination for destination, _ in pieces], [source for _, source in pieces])

    def _plan(self, leaves: Sequence[int], sources: Sequence[Tensor], token: object) -> _Planned:
        kinds = [
            kind_of(view.dtype, view.stride(), source) if source.device.type == "cpu" else None
            for view, source in zip([self.views[leaf] for leaf in leaves], sources, strict=True)
        ]
        quick = [i for i, kind in enumerate(kinds) if kind is not None]
        rest = [i for i, kind in enumerate(kinds) if kind is None]
        plan = None
        if has_extension and quick:
            addresses = [self.views[leaves[i]].data_ptr() for i in quick]
            plan = engine.Plan(
                addresses, None, [sources[i].nbytes for i in quick], cast(Any, [kinds[i] for i in quick])
            )
        return _Planned(token, plan, quick, rest)


def kind_of(dtype: torch.dtype, stride: tuple[int, ...], source: Tensor) -> str | None:
    """How values get from a source's memory to a destination of the same shape without torch; None: they don't."""
    lazy = source.is_neg() or source.is_conj() or source._is_zerotensor()  # autograd's zeros have no memory
    if lazy or source.stride() != stride:
        return None
    if source.dtype is dtype:
        return "bytes"
    return _CASTS.get((source.dtype, dtype)) if has_extension else None


def _pieces(destination: Tensor, source: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """A cast of one long leaf as casts of pieces that torch does not split among threads."""
    if not (destination.is_contiguous() and source.is_contiguous() and source.device.type == "cpu"):
        return ((destination, source),)
    return zip(destination.flatten().split(_ONE_THREAD), source.detach().flatten().split(_ONE_THREAD), strict=True)


def _set_up_engine() -> None:
    engine.set_threads(torch.get_num_threads())
    # Which NaN a conversion makes of a NaN is torch's choice, and differs between its builds.
    nan = torch.tensor([float("nan")] * 64).to(torch.bfloat16).view(torch.int16)[0].item()
    engine.set_bfloat16_nan(int(nan) & 0xFFFF)


if has_extension:
    _set_up_engine()
