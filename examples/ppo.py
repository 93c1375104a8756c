"""PPO on CartPole-v1 with torchrl's parts: environments, actor, critic, learner, evaluation.

Nothing here knows how weights reach the workers.
"""

from __future__ import annotations

from functools import partial

import gymnasium
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.envs import EnvBase, GymWrapper, RewardSum, TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import OneHotCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

OBSERVATIONS, ACTIONS = 4, 2
MAX_STEPS = 500  # CartPole-v1 ends an episode here, with a return of 500
CRITIC_HIDDEN = 64


def make_env(seed: int, num_envs: int = 8) -> EnvBase:
    """`num_envs` copies of CartPole-v1 stepped together; called in each worker, so it also sets the worker up.

    One thread per worker: there are as many workers as cores, and tensors this small gain nothing from more.
    The seed is for the environments and for the actions that the worker's policy samples.
    """
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    copies = SyncVectorEnv(
        [partial(gymnasium.make, "CartPole-v1")] * num_envs,
        autoreset_mode=AutoresetMode.DISABLED,  # torchrl resets what is done
    )
    env = TransformedEnv(GymWrapper(copies, device="cpu"), RewardSum())
    env.set_seed(seed)
    return env


def make_actor(hidden: int) -> ProbabilisticActor:
    """The policy: this is what the workers run, and whose weights are pushed."""
    module = TensorDictModule(_mlp(hidden, ACTIONS, last_gain=0.01), ["observation"], ["logits"])
    return ProbabilisticActor(module, in_keys=["logits"], distribution_class=OneHotCategorical, return_log_prob=True)


def make_critic() -> ValueOperator:
    """The value function: it stays with the trainer."""
    return ValueOperator(_mlp(CRITIC_HIDDEN, 1, last_gain=1.0), in_keys=["observation"])


def _mlp(hidden: int, out: int, last_gain: float) -> nn.Sequential:
    sizes = [(OBSERVATIONS, hidden), (hidden, hidden), (hidden, out)]
    gains = [2**0.5, 2**0.5, last_gain]
    first, second, last = (_linear(*size, gain) for size, gain in zip(sizes, gains, strict=True))
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), last)


def _linear(inputs: int, outputs: int, gain: float) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Learner:
    """Trains an actor in place, with a critic of its own.

    Args:
        actor: the policy; its parameters change in `learn()`.
        hidden: its width; wider networks get a smaller learning rate.
    """

    epochs = 6
    minibatch_size = 256
    max_grad_norm = 0.5

    def __init__(self, actor: ProbabilisticActor, hidden: int) -> None:
        critic = make_critic()
        self.advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic, average_gae=False)
        self.loss = ClipPPOLoss(
            actor,
            critic,
            clip_epsilon=0.2,
            entropy_coeff=0.01,
            critic_coeff=0.5,
            loss_critic_type="l2",
            normalize_advantage=True,
        )
        self.parameters = [*actor.parameters(), *critic.parameters()]
        self.optimizer = torch.optim.Adam(
            [
                {"params": list(actor.parameters()), "lr": 1e-3 * min(1.0, 64 / hidden) ** 0.5},
                {"params": list(critic.parameters()), "lr": 1e-3},
            ],
            eps=1e-5,
        )

    def learn(self, batch: TensorDictBase) -> None:
        """A few epochs over one batch of shape [environments, time]."""
        with torch.no_grad():
            self.advantage(batch)
        steps = batch.reshape(-1)
        for _ in range(self.epochs):
            for indices in torch.randperm(len(steps)).split(self.minibatch_size):
                self._step(self.loss(steps[indices]))

    def _step(self, losses: TensorDict) -> None:
        self.optimizer.zero_grad()
        (losses["loss_objective"] + losses["loss_entropy"] + losses["loss_critic"]).backward()
        nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        self.optimizer.step()


def finished_returns(batch: TensorDictBase) -> list[float]:
    """Returns of the episodes that ended in this batch, the earliest first."""
    done = batch["next", "done"].squeeze(-1).transpose(0, 1)  # time first
    returns = batch["next", "episode_reward"].squeeze(-1).transpose(0, 1)
    return returns[done].tolist()


def evaluate(actor: ProbabilisticActor, episodes: int, seed: int) -> list[float]:
    """Returns of `episodes` episodes in which the policy takes its most likely action."""
    env = make_env(seed, num_envs=episodes)
    try:
        with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
            steps = env.rollout(MAX_STEPS, actor, break_when_any_done=False)
    finally:
        env.close()
    first_end = steps["next", "done"].squeeze(-1).int().argmax(dim=1, keepdim=True)
    return steps["next", "episode_reward"].squeeze(-1).gather(1, first_end).squeeze(1).tolist()
