"""Copies of many tensors at once: into a slot, between slots, and out of one."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

# torch splits a copy among its threads from this many elements on (at::internal::GRAIN_SIZE).
_ONE_THREAD = 32768 - 1


def copy_all(destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its destination, cast by value where the dtypes differ.

    Contract: records nothing in autograd; blocks until the bytes are there; on an error part of them may be.
    """
    if destinations:
        with torch.no_grad():
            torch._foreach_copy_(list(destinations), list(sources))


def fill_slot(destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """As `copy_all`, for destinations in a slot: dense, on the host, and nobody's autograd graph.

    It runs on the calling thread. torch would split each leaf among its threads and wait for all of them at each
    leaf; beside busy workers, which is where a trainer lives, each of these waits costs a time slice of the scheduler.
    """
    rest = []
    for destination, source in zip(destinations, sources, strict=True):
        if _same_bytes(destination, source):
            ctypes.memmove(destination.data_ptr(), source.data_ptr(), destination.nbytes)
        else:
            rest.append((destination, source))
    if rest:
        pieces = [piece for pair in rest for piece in _pieces(*pair)]
        copy_all([destination for destination, _ in pieces], [source for _, source in pieces])


def _same_bytes(destination: Tensor, source: Tensor) -> bool:
    """Whether the values lie in the source's memory as they shall in the destination's."""
    return (
        source.dtype is destination.dtype
        and source.stride() == destination.stride()
        and source.device.type == "cpu"
        and not source.is_neg()
        and not source.is_conj()
        and not source._is_zerotensor()  # autograd's zeros have no memory
    )


def _pieces(destination: Tensor, source: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """A cast of one long leaf as casts of pieces that torch does not split among threads."""
    if not (destination.is_contiguous() and source.is_contiguous() and source.device.type == "cpu"):
        return ((destination, source),)
    return zip(destination.flatten().split(_ONE_THREAD), source.detach().flatten().split(_ONE_THREAD), strict=True)
