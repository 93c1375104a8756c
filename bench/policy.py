"""A policy whose forward tells which version it ran on.

Version v fills leaf i with ``4096 * i + v``: a forward that reads all leaves finds v in each of them, a mixture of two
versions has v and v + 1, and a leaf that came under another's name is off by thousands. Exact in fp32 for 2048 leaves.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .workloads import Workload

VERSIONS = 4095
_STEP = 4096


def value_of(version: int) -> int:
    """What the leaves of a version show: 1 .. 4095, then again from 1. Version 0 = nothing pushed yet."""
    return (version - 1) % VERSIONS + 1 if version else 0


class ProbePolicy(nn.Module):
    """A workload's module with memory; its forward reads every element, layer by layer, as one of batch 1 does."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.net = workload.build().to_empty(device="cpu")
        # By table and name, since some rivals replace the Parameter objects.
        tables = [module._parameters for module in self.net.modules()]
        self._places = [(table, name) for table in tables for name, value in table.items() if value is not None]
        self._bases = torch.arange(len(self._places), dtype=torch.float32) * _STEP

    def leaves(self) -> Iterator[Tensor]:
        """The parameters' data as they are now, in the order of reading."""
        for table, name in self._places:
            yield table[name].data

    def fill(self, version: int) -> None:
        """Give all leaves the values of a version, in place."""
        for number, leaf in enumerate(self.leaves()):
            leaf.fill_(_STEP * number + value_of(version))

    @torch.no_grad()
    def forward(self, x: Tensor | None = None) -> Tensor:
        """Two numbers: the least and the greatest version found. They differ if the forward saw a mixture."""
        found = [torch.aminmax(table[name]) for table, name in self._places]
        low = torch.stack([pair.min for pair in found]) - self._bases
        high = torch.stack([pair.max for pair in found]) - self._bases
        return torch.stack((low.min(), high.max()))
