"""Copies of many tensors at once: into a slot, between slots, and out of one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def copy_all(destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its destination, cast by value where the dtypes differ.

    Contract: records nothing in autograd; blocks until the bytes are there; on an error part of them may be.
    """
    if destinations:
        with torch.no_grad():
            torch._foreach_copy_(list(destinations), list(sources))
