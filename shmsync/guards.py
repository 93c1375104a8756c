"""The guard: whether tensors that are the same objects as before are still what they were, but for their values."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

try:  # torch.compile's own, which looks at a tensor in a tenth of the time; no part of torch's interface
    from torch._C._dynamo.guards import TensorGuards
except ImportError:
    TensorGuards = None  # type: ignore[assignment, misc]


class Guard:
    """Looks at all that `.data = ` can change in a tensor that stays the same object: dtype, shape, strides, device,
    layout, whether its values are lazy, and its address.

    ``addresses``: where the tensors begin, as of the last look.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tuple(tensors)
        self._quick = _quick(self._tensors)
        self._odd = [tensor for tensor in tensors if tensor.is_complex() or tensor.numel() < 2]
        self._kinds, self._odd_keys = _kinds(self._tensors), _dispatch_keys(self._odd)
        self._keys = _dispatch_keys(self._tensors)
        self.addresses = _addresses(self._tensors)

    def holds(self) -> bool:
        """Whether nothing has changed but addresses."""
        addresses = _addresses(self._tensors)
        if not self._same(addresses):
            return False
        self.addresses = addresses
        return True

    def _same(self, addresses: array[int]) -> bool:
        if self._quick is not None and _check(self._quick, self._tensors):
            return True
        if not self._same_kinds(addresses):
            return False
        # It looks at more than counts here, like requires_grad: it shall know the new state.
        self._quick = _quick(self._tensors)
        return True

    def _same_kinds(self, addresses: array[int]) -> bool:
        if _kinds(self._tensors) != self._kinds or _dispatch_keys(self._odd) != self._odd_keys:
            return False
        # At the same address with the same strides a tensor is on the same device; and among the dense it takes a
        # complex one to be conjugated there, or to have a negated imaginary part, of one element.
        return addresses == self.addresses or _dispatch_keys(self._tensors) == self._keys


def _quick(tensors: tuple[Tensor, ...]) -> Any:
    if TensorGuards is None or not tensors:
        return None
    try:
        made = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    except Exception:  # another interface in another release
        return None
    return made if _check(made, tensors) else None


def _check(guards: Any, tensors: tuple[Tensor, ...]) -> bool:
    try:
        return bool(guards.check(*tensors))
    except Exception:  # of a tensor that has no strides any more, say
        return False


_raw = operator.methodcaller("raw_repr")
_type = operator.attrgetter("dtype", "shape")


def _kinds(tensors: Sequence[Tensor]) -> list[Any]:
    return [*map(_type, tensors), *map(Tensor.stride, tensors)]


def _dispatch_keys(tensors: Sequence[Tensor]) -> list[int]:
    """They tell the device, the layout, and the lazy ones: conjugated, negated, autograd's zeros."""
    return list(map(_raw, map(torch._C._dispatch_keys, tensors)))


def _addresses(tensors: Sequence[Tensor]) -> array[int]:
    return array("Q", map(Tensor.data_ptr, tensors))
