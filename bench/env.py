"""An environment with CartPole's shapes and next to no work of its own."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase


class Pole(EnvBase):
    """Observation of 4, action of 2, episodes without end."""

    def __init__(self) -> None:
        super().__init__(device="cpu")
        self.observation_spec = Composite(observation=Unbounded((4,)))
        self.action_spec = Unbounded((2,))
        self.reward_spec = Unbounded((1,))

    def _reset(self, tensordict: TensorDictBase | None, **kwargs: Any) -> TensorDictBase:
        return TensorDict({"observation": torch.zeros(4)}, [])

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return TensorDict(
            {
                "observation": tensordict["observation"] * 0.9 + tensordict["action"].sum() * 0.1,
                "reward": torch.ones(1),
                "done": torch.zeros(1, dtype=torch.bool),
            },
            [],
        )

    def _set_seed(self, seed: int | None) -> None:
        torch.manual_seed(seed or 0)
