"""Several models under one version: no step shows an actor of one version and a critic or a normaliser of another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchrl.collectors
import torchrl.collectors.distributed.rpc as rpc_module
from tensordict import TensorDictBase
from torch import nn
from torchrl.collectors.distributed import RPCCollector
from torchrl.data import Unbounded

import shmsync
from shmsync import ShmSyncError
from shmsync.torchrl.together import Together
from tests.helpers.collectors import Background, Corridor, Net, fill, free_port, net_policy
from tests.helpers.trainers import Trainer

Start = Callable[..., Trainer]
CRITIC, NORMALISER = "env.value_net", "env.normaliser"
big = partial(Net, value=1.0, layers=8, size=50_000, pause=1e-4)


class Normaliser(nn.Module):
    """Running statistics, in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(50_000))
        self.register_buffer("count", torch.ones((), dtype=torch.int64))

    def forward(self) -> torch.Tensor:
        return torch.stack([self.mean.min(), self.mean.max(), self.count.float()])


class Valued(Corridor):
    """Judges each step by a critic of its own, and shows what its normaliser has."""

    def __init__(self) -> None:
        super().__init__()
        self.value_net, self.normaliser = big(), Normaliser()
        for key in ("value_low", "value_high"):
            self.observation_spec[key] = Unbounded((1,))
        self.observation_spec["statistics"] = Unbounded((3,))

    def _observe(self) -> dict[str, torch.Tensor]:
        if not hasattr(self, "normaliser"):
            return {
                **super()._observe(),
                **dict.fromkeys(("value_low", "value_high"), torch.zeros(1)),
                "statistics": torch.zeros(3),
            }
        _, low, high = self.value_net(torch.zeros(1, 3))
        return {**super()._observe(), "value_low": low[0], "value_high": high[0], "statistics": self.normaliser()}


def test_two_threads_that_push_send_each_its_own_models() -> None:
    """Each call of the collector is one push of what its own thread has brought. Mutant: one memory for all threads."""
    together, pushed = Together(["policy", "critic"]), []
    turns = threading.Barrier(2, timeout=20)

    class Collector:
        def update_policy_weights_(self, value: int) -> None:
            turns.wait()
            together.send("policy", value, [value], pushes)
            turns.wait()
            together.send("critic", value, [value], pushes)
            turns.wait()

    def pushes(sent: dict[str, Any], worker_ids: Any, partial: bool) -> None:
        pushed.append((sent, worker_ids, partial))

    collector = Collector()
    together.watch(collector, pushes)
    threads = [threading.Thread(target=collector.update_policy_weights_, args=(value,)) for value in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(pushed, key=str) == [({"policy": v, "critic": v}, [v], False) for v in (1, 2)]


def build(world: SimpleNamespace, *, kind: str, over: str, **options: Any) -> None:
    rpc_module.time = SimpleNamespace(sleep=lambda seconds: time.sleep(seconds / 100))
    world.policy, world.critic = net_policy(value=1.0, layers=8, size=50_000, pause=1e-4), big()
    cls = shmsync.RPCWeightSyncScheme if over == "rpc" else shmsync.SharedMemWeightSyncScheme
    world.normaliser = Normaliser()
    world.schemes = cls.together("policy", CRITIC, NORMALISER)
    world.schemes[CRITIC].model, world.schemes[NORMALISER].model = world.critic, world.normaliser
    common = {"weight_sync_schemes": world.schemes, "frames_per_batch": 20, "total_frames": 10**6}
    if over == "rpc":
        world.collector = RPCCollector(
            [Valued] * 2,
            world.policy,
            collector_class=getattr(torchrl.collectors, kind),
            launcher="mp",
            tcp_port=free_port(),
            collector_kwargs={"track_policy_version": True},
            **common,
            **options,
        )
    else:
        world.collector = getattr(torchrl.collectors, kind)(
            [Valued] * 2, world.policy, track_policy_version=True, **common
        )
    world.batches = iter(world.collector)


def push_all(world: SimpleNamespace) -> None:
    value = world.schemes["policy"].version + 1
    models = {"policy": world.policy, CRITIC: world.critic, NORMALISER: world.normaliser}
    for model in models.values():
        fill(model, value)
    for buffer in world.normaliser.buffers():
        buffer.fill_(value)
    world.collector.update_policy_weights_(weights_dict=models)
    assert world.schemes[CRITIC].version == value


def stream(world: SimpleNamespace, seconds: float) -> tuple[int, int, int]:
    """Collect under pushes of all: steps, versions, and steps that do not show one version of everything."""
    steps, bad, versions = 0, 0, set()
    deadline = time.monotonic() + seconds
    with Background(lambda: push_all(world)) as pushing:
        while time.monotonic() < deadline and (len(versions) < 15 or steps < 200):
            data: TensorDictBase = next(world.batches)
            keys = ("low", "high", ("next", "value_low"), ("next", "value_high"), ("next", "policy_version"))
            columns = [data[key].flatten().tolist() for key in keys]
            for row in zip(*columns, data["next", "statistics"].reshape(-1, 3).tolist(), strict=True):
                bad += len({*row[:-1], *row[-1]}) > 1
                versions.add(row[0])
                steps += 1
    assert pushing.error is None
    return steps, len(versions), bad


SETUPS: dict[str, dict[str, Any]] = {
    "RPC, Collector": {"over": "rpc", "kind": "Collector"},
    "RPC, MultiSyncCollector": {"over": "rpc", "kind": "MultiSyncCollector", "num_workers_per_collector": 1},
    "MultiSyncCollector": {"over": "shared", "kind": "MultiSyncCollector"},
    "MultiAsyncCollector": {"over": "shared", "kind": "MultiAsyncCollector"},
}


@pytest.mark.parametrize("setup", SETUPS)
def test_a_step_shows_one_version_of_all_models(start: Start, setup: str) -> None:
    """Mutant: send each model as it comes (Together.watch does nothing)."""
    steps, versions, bad = start(build=build, **SETUPS[setup]).do(stream, 60.0)
    assert steps >= 200
    assert versions >= 15
    assert bad == 0


def push_one(world: SimpleNamespace, value: float) -> int:
    fill(world.critic, value)
    world.collector.update_policy_weights_(world.critic, model_id=CRITIC)
    return world.schemes["policy"].version


def next_step(world: SimpleNamespace) -> tuple[list[float], list[float]]:
    data = next(world.batches)
    return sorted(set(data["low"].flatten().tolist())), sorted(set(data["next", "value_low"].flatten().tolist()))


def test_one_model_alone_leaves_the_other_as_it_is(start: Start) -> None:
    trainer = start(build=build, over="rpc", kind="Collector")
    assert trainer.do(next_step) == ([1.0], [1.0])
    assert trainer.do(push_one, 5.0) == 2
    for _ in range(20):  # some batches were begun before
        actor, critic = trainer.do(next_step)
        assert actor == [1.0]
        if critic == [5.0]:
            return
    raise AssertionError(f"the critic is still {critic}")


def test_without_a_collector_they_are_bound_together() -> None:
    schemes = shmsync.SharedMemWeightSyncScheme.together("policy", "critic")
    models = {name: nn.Linear(1, 1) for name in schemes}
    for name, scheme in schemes.items():
        scheme.init_on_sender(model=models[name], devices=[torch.device("cpu")], model_id=name)
    import pickle

    copies = pickle.loads(pickle.dumps(schemes))
    for scheme in schemes.values():
        scheme.connect()
    theirs = {name: nn.Linear(1, 1) for name in schemes}
    for name, copy in copies.items():
        copy.init_on_receiver(model_id=name, model=theirs[name], worker_idx=0)
        copy.connect()
    assert all(torch.equal(theirs[name].weight, models[name].weight) for name in models)
    fill(models["critic"], 3.0)
    schemes["critic"].send()
    theirs["policy"](torch.zeros(1, 1))
    assert theirs["critic"].weight.item() == 3.0
    for scheme in (*copies.values(), *schemes.values()):
        scheme.shutdown()


def test_names_are_checked() -> None:
    with pytest.raises(ShmSyncError, match="each once"):
        Together(["policy", "policy"])
