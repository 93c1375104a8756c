"""Every kind of policy that a collector runs: each forward goes through the gate, and each push arrives."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torch.distributions import Normal
from torchrl.modules import EGreedyModule, ProbabilisticActor

from shmsync import PushError, UnsupportedLeaf
from tests.helpers.collectors import Corridor, Net, ask, collect, fill, net_policy, pid_of, push
from tests.helpers.trainers import Trainer, segment_uses

Start = Callable[..., Trainer]


class Plain(nn.Module):
    """No TensorDict anywhere: torchrl wraps it, and gives it all that the environment shows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 7.0))

    def forward(
        self, observation: Tensor, process: Any = None, env: Any = None, count: Any = None, policy_version: Any = None
    ) -> Tensor:
        return self.weight.mean().expand(*observation.shape[:-1], 1).clone()


class Returning(Plain):
    """Gives a view of its parameter away, as its action."""

    def forward(self, observation: Tensor) -> Tensor:
        return self.weight[:1].expand(*observation.shape[:-1], 1)


class TensorDictIn(Plain):
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("action", Plain.forward(self, tensordict["observation"]))


class Spread(Plain):
    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        loc = Plain.forward(self, observation)
        return loc, torch.full_like(loc, 1e-9)


def probabilistic_actor() -> ProbabilisticActor:
    module = TensorDictModule(Spread(), in_keys=["observation"], out_keys=["loc", "scale"])
    return ProbabilisticActor(module, in_keys=["loc", "scale"], distribution_class=Normal, return_log_prob=True)


def returning() -> TensorDictModule:
    return TensorDictModule(Returning(), in_keys=["observation"], out_keys=["action"])


def tied() -> TensorDictModule:
    policy = net_policy(layers=2)
    policy.module.layers[1] = policy.module.layers[0]
    return policy


def frozen() -> TensorDictModule:
    return net_policy().requires_grad_(False)


KINDS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "TensorDictModule on a policy_device": (net_policy, {"policy_device": "cpu"}),
    "TensorDictModule on a device": (net_policy, {"device": "cpu"}),
    "ProbabilisticActor": (probabilistic_actor, {}),
    "plain nn.Module": (Plain, {}),
    "nn.Module of a TensorDict": (TensorDictIn, {}),
    "returns its parameter": (returning, {}),
    "tied": (tied, {}),
    "frozen": (frozen, {}),
    "compiled by the collector": (net_policy, {"collector_kwargs": {"compile_policy": {"backend": "eager"}}}),
    "plain nn.Module compiled": (Plain, {"collector_kwargs": {"compile_policy": {"backend": "eager"}}}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_policy_follows(start: Start, kind: str) -> None:
    """The first batch is version 1, each later one what was pushed before it, with its stamp, though no
    notification ever switches here, and nothing is compiled anew. Mutant: gate by a hook on the policy, which some
    kinds never call."""
    make, options = KINDS[kind]
    trainer = start(policy=make, workers=1, **options)
    trainer.do(by_memory)
    batch = trainer.do(collect)
    assert (rounded(batch.actions), batch.versions) == ([7.0], [1])
    compiled = trainer.do(ask, 0, graphs)
    trainer.do(push, 1.0)
    for value in (2.0, 3.0):
        report = trainer.do(push, value)
        batch = trainer.do(collect)
        assert (rounded(batch.actions), batch.versions) == ([value], [report.version])
    assert trainer.do(ask, 0, graphs) == compiled


def by_memory(world: SimpleNamespace) -> None:
    world.updater.notify = "memory"


def rounded(actions: list[float]) -> list[float]:
    return sorted({round(action, 6) for action in actions})


def graphs(collector: Any) -> int:
    """How often the policy has been compiled."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def act(tensordict: TensorDictBase) -> TensorDictBase:
    return tensordict.set("action", torch.full((1,), 7.0))


class Weightless(nn.Module):
    def forward(self, observation: Tensor) -> Tensor:
        return observation[..., :1].tanh()


def weightless() -> TensorDictModule:
    return TensorDictModule(Weightless(), in_keys=["observation"], out_keys=["action"])


def function() -> Callable[..., Any]:
    return act


@pytest.mark.parametrize(("make", "action"), [(weightless, 0.0), (function, 7.0)], ids=["module", "function"])
def test_a_policy_without_weights(start: Start, make: Any, action: float) -> None:
    """Two workers attach, two pushes are two versions, the steps are stamped, and nothing is left behind at the
    end. Mutant: take empty weights for none."""
    trainer = start(policy=make)
    trainer.do(push_what_there_is)
    report = trainer.do(push_what_there_is)
    assert (report.version, report.nbytes, report.leaves) == (3, 0, 0)
    assert [worker.in_use for worker in report.workers.values()] == [3, 3]
    batch = trainer.do(collect)
    assert (batch.actions, batch.versions) == ([action], [3])
    pids = [trainer.do(own_pid), *(trainer.do(ask, worker, pid_of) for worker in (0, 1))]
    assert min(map(segment_uses, pids)) > 0
    trainer.do(close)
    assert [segment_uses(pid) for pid in pids] == [0, 0, 0]


def push_what_there_is(world: SimpleNamespace) -> Any:
    world.collector.update_policy_weights_()
    return world.updater.last_push


def own_pid(world: SimpleNamespace) -> int:
    return pid_of(world)


def close(world: SimpleNamespace) -> None:
    world.updater.close()


class Normed(nn.Module):
    """Its output is (0 - running_mean[0]) / sqrt(running_var[0]): the buffers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, affine=False, eps=0.0)

    def forward(self, observation: Tensor) -> Tensor:
        return self.norm(observation.reshape(-1, 3)).reshape(observation.shape)[..., :1]


def normed() -> TensorDictModule:
    return TensorDictModule(Normed().eval(), in_keys=["observation"], out_keys=["action"])


def test_buffers_are_weights(start: Start) -> None:
    """All three of a BatchNorm arrive exactly, the counter not through a float. Mutant: publish parameters only."""
    trainer = start(policy=normed, workers=1)
    trainer.do(push_statistics)
    assert trainer.do(ask, 0, statistics) == ([1.0, 2.0, 3.0], [4.0, 5.0, 6.0], 2**40 + 1)
    assert trainer.do(collect).actions == [-0.5]


def push_statistics(world: SimpleNamespace) -> None:
    norm = world.policy.module.norm
    norm.running_mean.copy_(torch.tensor([1.0, 2.0, 3.0]))
    norm.running_var.copy_(torch.tensor([4.0, 5.0, 6.0]))
    norm.num_batches_tracked.fill_(2**40 + 1)
    world.collector.update_policy_weights_()


def statistics(collector: Any) -> tuple[Any, ...]:
    norm = collector.policy.module.norm
    return norm.running_mean.tolist(), norm.running_var.tolist(), norm.num_batches_tracked.item()


def exploring() -> TensorDictSequential:
    return TensorDictSequential(net_policy(), EGreedyModule(Corridor().action_spec, eps_init=0.0, eps_end=0.0))


def test_the_buffers_of_an_exploration_module_follow(start: Start) -> None:
    """0-dimensional ones, which the trainer anneals. Mutant: keep the worker's buffers."""
    trainer = start(policy=exploring, workers=1)
    assert trainer.do(collect).actions == [7.0]
    trainer.do(push_with_eps, 8.0, 0.25)
    assert trainer.do(ask, 0, eps_of) == 0.25
    trainer.do(push_with_eps, 9.0, 0.0)
    assert trainer.do(collect).actions == [9.0]


def push_with_eps(world: SimpleNamespace, value: float, eps: float) -> None:
    fill(world.policy, value)
    world.policy[-1].eps.fill_(eps)
    world.collector.update_policy_weights_(world.policy)


def eps_of(collector: Any) -> float:
    return collector.policy[-1].eps.item()


def lazy() -> TensorDictModule:
    return TensorDictModule(nn.LazyLinear(1), in_keys=["observation"], out_keys=["action"])


def test_a_policy_that_cannot_be_shared_is_refused_before_any_worker_starts(start: Start) -> None:
    """Naming the leaf. Mutant: find out at the first push."""
    with pytest.raises(UnsupportedLeaf, match=r"weight"):
        start(policy=lazy)


def test_a_worker_that_writes_its_weights_is_back_on_the_published_ones(start: Start) -> None:
    """Its own step harms nobody else, and is gone at the next version. Mutant: map the slots shared."""
    trainer = start(policy=partial(net_policy, size=5000), workers=2)
    trainer.do(push, 1.0)
    trainer.do(ask, 0, write)
    assert trainer.do(ask, 1, first_weight) == 1.0
    assert trainer.do(ask, 0, first_weight) == 101.0
    trainer.do(push, 2.0)
    trainer.do(push, 3.0)
    assert trainer.do(collect).actions == [3.0]
    assert trainer.do(trainers_weight) == 3.0


def write(collector: Any) -> None:
    with torch.no_grad():
        for parameter in collector.policy.parameters():
            parameter.add_(100.0)


def first_weight(collector: Any) -> float:
    return next(collector.policy.parameters())[0].item()


def trainers_weight(world: SimpleNamespace) -> float:
    return first_weight(world.collector)


@pytest.mark.parametrize("how", ["deepcopy", "double"])
def test_the_policy_in_use_gets_the_update_even_if_it_was_replaced(start: Start, how: str) -> None:
    """By a deep copy, or by other storages: either the update reaches it, or the push names the worker and says so.
    Mutant: update parameters that are no longer the policy's."""
    trainer = start(workers=1)
    trainer.do(push, 1.0)
    trainer.do(ask, 0, replace, how)
    error = trainer.do(error_of_push, 2.0)
    if error is None:
        assert trainer.do(collect).actions == [2.0]
    else:
        assert "worker 0" in str(error)
        assert "no longer" in str(error)


def error_of_push(world: SimpleNamespace, value: float) -> PushError | None:
    try:
        push(world, value)
    except PushError as error:
        return error
    return None


def replace(collector: Any, how: str) -> None:
    if how == "deepcopy":
        collector.policy = deepcopy(collector.policy)
    else:
        collector.policy.double()


def test_a_net_shows_what_it_is_filled_with() -> None:
    """The measuring instrument of these tests."""
    net = Net(3.0, layers=2)
    assert [x.item() for x in net(torch.zeros(3))] == [3.0, 3.0, 3.0]
    with torch.no_grad():
        net.layers[1][2] = 9.0
    assert [x.item() for x in net(torch.zeros(3))] == [3.0, 3.0, 9.0]
