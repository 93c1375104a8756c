"""torchrl's Evaluator with a process of its own, which follows the trainer's channel through the scheme.

What torchrl's own tests of it (its test/collectors/test_evaluator.py, the process backend) ask for is here too.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tensordict import TensorDict, TensorDictBase
from torchrl.collectors import Evaluator
from torchrl.envs import EnvBase, StepCounter, TransformedEnv

import shmsync
from tests.helpers.collectors import Corridor, fill, net_policy
from tests.helpers.trainers import Trainer, wait_for

STEPS = 20


def env() -> EnvBase:
    return TransformedEnv(Corridor(), StepCounter(max_steps=STEPS))


def shown(data: TensorDictBase) -> dict[str, float]:
    """What the steps of an evaluation have used."""
    return {"low": data["low"].min().item(), "high": data["high"].max().item()}


def build(world: SimpleNamespace, timeout: float = 60.0) -> None:
    world.policy = net_policy(value=7.0)
    world.scheme = shmsync.SharedMemWeightSyncScheme(timeout=timeout)
    world.evaluator = Evaluator(
        env,
        policy_factory=net_policy,
        num_trajectories=1,
        max_steps=0,
        frames_per_batch=STEPS,
        metrics_fn=shown,
        weight_sync_schemes={"policy": world.scheme},
    )


def evaluate(world: SimpleNamespace, value: float | None, form: str = "module", wait: bool = True) -> Any:
    """By a value that the trainer's policy gets first; None = without weights. Which values the steps used, and how
    many there were."""
    weights: Any = None
    if value is not None:
        fill(world.policy, value)
        weights = world.policy if form == "module" else TensorDict.from_module(world.policy).data
    if wait:
        result = world.evaluator.evaluate(weights)
    else:
        world.evaluator.trigger_eval(weights)
        fill(world.policy, -1.0)  # the evaluation that goes on does not see it
        result = world.evaluator.wait(30)
    return tuple(float(result["eval/" + key]) for key in ("low", "high", "episode_length"))


def version(world: SimpleNamespace) -> int:
    return world.scheme.version


def end(world: SimpleNamespace) -> None:
    world.evaluator.shutdown()
    world.scheme.shutdown()


def test_an_evaluation_uses_the_weights_that_it_was_given(start: Callable[..., Trainer]) -> None:
    """All of its steps and none of another version; without weights those of the factory, then those of the last one.
    Mutants: take a TensorDict for weights by worker; let the process wait for a version that nobody publishes."""
    trainer = start(build=build)
    assert trainer.do(evaluate, None) == (7.0, 7.0, STEPS)
    for value, form in ((4.0, "module"), (5.0, "tensordict")):
        assert trainer.do(evaluate, value, form) == (value, value, STEPS)
    assert trainer.do(evaluate, 6.0, wait=False) == (6.0, 6.0, STEPS)
    assert trainer.do(version) == 4
    assert trainer.do(evaluate, None) == (6.0, 6.0, STEPS)
    trainer.do(end)
    assert trainer.end() == 0
    wait_for(lambda: not trainer.processes(), "the end of all processes")


@pytest.mark.parametrize("form", ["module", "tensordict"])
def test_the_first_weights_may_come_with_the_first_evaluation(start: Callable[..., Trainer], form: str) -> None:
    """The factory's are never used then. Mutant: as above."""
    trainer = start(build=build)
    assert trainer.do(evaluate, 3.0, form) == (3.0, 3.0, STEPS)
