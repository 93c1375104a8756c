"""torchrl's Evaluator with a process of its own, which follows the trainer's channel through the scheme."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tensordict import TensorDict, TensorDictBase
from torchrl.collectors import Evaluator
from torchrl.envs import EnvBase, StepCounter, TransformedEnv

import shmsync
from tests.helpers.collectors import Corridor, fill, net_policy
from tests.helpers.trainers import Trainer

STEPS = 20


@pytest.fixture(scope="module")
def shared(start_for_module: Callable[..., Trainer]) -> Trainer:
    return start_for_module(build=build)


def env() -> EnvBase:
    return TransformedEnv(Corridor(), StepCounter(max_steps=STEPS))


def shown(data: TensorDictBase) -> dict[str, float]:
    """What the steps of an evaluation have used."""
    low, high = data["low"], data["high"]
    return {"low": low.min().item(), "high": high.max().item(), "same": float((low == high).all())}


def build(world: SimpleNamespace) -> None:
    world.policy = net_policy(value=7.0)
    world.scheme = shmsync.SharedMemWeightSyncScheme()
    world.evaluator = Evaluator(
        env,
        policy_factory=net_policy,
        num_trajectories=1,
        max_steps=0,
        frames_per_batch=STEPS,
        metrics_fn=shown,
        weight_sync_schemes={"policy": world.scheme},
        collector_kwargs={"trajs_per_batch": 1},
    )


def evaluate(world: SimpleNamespace, value: float | None, form: str = "module") -> dict[str, float]:
    """By a value that the trainer's policy gets first; None = without weights."""
    weights: Any = None
    if value is not None:
        fill(world.policy, value)
        weights = world.policy if form == "module" else TensorDict.from_module(world.policy).data
    return numbers(world.evaluator.evaluate(weights))


def numbers(result: Any) -> dict[str, float]:
    return {key: float(result["eval/" + key]) for key in ("low", "high", "same", "episode_length")}
