"""The weights that are pushed: layouts as real policies have them, from 17 KB to 1 GB.

Modules are built on the meta device, so that naming a workload costs nothing; ``bench.policy`` gives them memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import nn


@dataclass(frozen=True)
class Workload:
    """A named layout. ``make``: builds the module, anywhere; it is called under the meta device."""

    name: str
    title: str
    make: Callable[[], nn.Module]

    def build(self) -> nn.Module:
        """The module without memory."""
        with torch.device("meta"):
            return self.make()

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of each leaf, all fp32."""
        return [tuple(p.shape) for p in self.build().parameters()]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one complete set of weights."""
        return sum(p.numel() * p.element_size() for p in self.build().parameters())

    @property
    def leaves(self) -> int:
        """Number of tensors."""
        return len(self.shapes)


class Pieces(nn.Module):
    """`count` layers of one weight each."""

    def __init__(self, count: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        for number in range(count):
            layer = nn.Module()
            layer.weight = nn.Parameter(torch.empty(shape))
            self.add_module(f"layer{number}", layer)


def mlp(*sizes: int) -> nn.Module:
    """Linear layers of these sizes with Tanh between them."""
    layers: list[nn.Module] = []
    for inner, outer in zip(sizes[:-1], sizes[1:], strict=True):
        layers += [nn.Linear(inner, outer), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def atari() -> nn.Module:
    """The network of Mnih et al. 2015 (Nature DQN) for 84 x 84 frames and 6 actions."""
    return nn.Sequential(
        *(nn.Conv2d(4, 32, 8, stride=4), nn.ReLU()),
        *(nn.Conv2d(32, 64, 4, stride=2), nn.ReLU()),
        *(nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 6)),
    )


def transformer(layers: int, width: int) -> nn.Module:
    """An encoder with projections at both ends: 12 leaves per layer and six more."""
    layer = nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, batch_first=True)
    return nn.ModuleDict(
        {
            "embed": nn.Linear(64, width),
            "encoder": nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False),
            "head": nn.Linear(width, 18),
        }
    )


ALL: dict[str, Workload] = {
    w.name: w
    for w in (
        Workload("cartpole", "CartPole MLP, 18 KB", partial(mlp, 4, 64, 64, 2)),
        Workload("kb200", "200 x 1 KB", partial(Pieces, 200, (256,))),
        Workload("mlp4", "MLP, 4 MB", partial(mlp, 8, 512, 512, 512, 512, 512, 4)),
        Workload("atari", "Atari CNN, 6.7 MB", atari),
        Workload("transformer38", "12-layer transformer, 38 MB", partial(transformer, 12, 256)),
        Workload("transformer340", "12-layer transformer, 340 MB", partial(transformer, 12, 768)),
        Workload("leaves200", "200 leaves, 105 MB", partial(Pieces, 200, (375, 350))),
        Workload("pieces2000", "2000 x 50 KB", partial(Pieces, 2000, (125, 100))),
        Workload("gb1", "1 GB", partial(Pieces, 16, (4096, 4096))),
    )
}
