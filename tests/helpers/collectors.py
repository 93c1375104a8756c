"""torchrl collectors for tests: an environment and policies that show which weights a step used.

The functions that take a `world` run in a trainer (tests.helpers.trainers); it holds the collector, the updater and the
trainer's policy.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torchrl.collectors
import torchrl.collectors.distributed.rpc as rpc_module
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributed import rpc
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase

import shmsync
from shmsync.binding import binding_of
from tests.helpers import releases

RPCCollector = releases.named(rpc_module, "RPCCollector")
MODULES = ("shmsync.torchrl.updater", "tests.helpers.collectors")


class Corridor(EnvBase):
    """Never ends; each step shows which process and which environment made it, and how many that has made before."""

    def __init__(self, batch_size: tuple[int, ...] = ()) -> None:
        super().__init__(batch_size=batch_size)
        shape = (*batch_size, 1)
        self.observation_spec = Composite(
            observation=Unbounded((*batch_size, 3)),
            process=Unbounded(shape, dtype=torch.int64),
            env=Unbounded(shape, dtype=torch.int64),
            count=Unbounded(shape, dtype=torch.int64),
            shape=batch_size,
        )
        self.action_spec = Unbounded(shape)
        self.reward_spec = Unbounded(shape)
        self.steps = 0

    def _observe(self) -> dict[str, torch.Tensor]:
        shape = (*self.batch_size, 1)
        return {
            "observation": torch.zeros(*self.batch_size, 3),
            "process": torch.full(shape, os.getpid()),
            "env": torch.full(shape, id(self)),
            "count": torch.full(shape, self.steps),
            "done": torch.zeros(shape, dtype=torch.bool),
        }

    def _reset(self, tensordict: Any, **kwargs: Any) -> TensorDictBase:
        return TensorDict(self._observe(), self.batch_size)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.steps += 1
        return TensorDict({**self._observe(), "reward": torch.ones(*self.batch_size, 1)}, self.batch_size)

    def _set_seed(self, seed: int | None) -> None:
        pass


class Net(nn.Module):
    """Gives the mean of its weights, and the lowest and the highest of them. `pause`: seconds after each layer."""

    def __init__(self, value: float = 7.0, layers: int = 1, size: int = 8, pause: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.full((size,), value) for _ in range(layers))
        self.pause = pause

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ends = []
        for layer in self.layers:
            ends += [layer.min(), layer.max()]
            if self.pause:
                time.sleep(self.pause)
        low, high = torch.stack(ends).min(), torch.stack(ends).max()
        shape = (*observation.shape[:-1], 1)
        return tuple(x.expand(shape).clone() for x in (self.layers[0].mean(), low, high))


def net_policy(**options: Any) -> TensorDictModule:
    return TensorDictModule(Net(**options), in_keys=["observation"], out_keys=["action", "low", "high"])


def free_port() -> str:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return str(one.getsockname()[1])


def build(
    world: SimpleNamespace,
    policy: Callable[[], Any] = net_policy,
    *,
    factory: Callable[[], Any] | None = None,
    updater: Any = None,
    kind: str = "Collector",
    env: Any = Corridor,
    workers: int = 2,
    frames: int = 20,
    collector_kwargs: Any = None,
    **options: Any,
) -> None:
    """An RPCCollector with `frames` per batch. `factory`: makes the workers' policies, instead of the trainer's.

    `updater`: a class or an instance, by default shmsync's class; `kind`: the collector class of the workers;
    `env`: makes an environment, or a list of one such per worker; `collector_kwargs`: a dict, or one per worker.
    """
    # It waits a second per worker for names that are known already.
    rpc_module.time = SimpleNamespace(sleep=lambda seconds: time.sleep(seconds / 100))
    world.policy, world.workers = policy(), workers
    world.collector = RPCCollector(
        env if isinstance(env, list) else [env] * workers,
        None if factory else world.policy,
        policy_factory=factory,
        collector_class=releases.named(torchrl.collectors, kind),
        weight_updater=shmsync.RPCWeightUpdater if updater is None else updater,
        frames_per_batch=frames,
        launcher="mp",
        tcp_port=free_port(),
        collector_kwargs=(
            collector_kwargs
            if isinstance(collector_kwargs, (list, tuple))
            else {**releases.tracking(), **(collector_kwargs or {})}
        ),
        **{"total_frames": 10**6, "sync": True, **options},
    )
    world.updater = world.collector.weight_updater
    world.batches = iter(world.collector)


def collect(world: SimpleNamespace, batches: int = 1) -> Any:
    """The last of so many batches: what its steps have used and are stamped with."""
    for _ in range(batches):
        data = next(world.batches)
    return seen_in(data)


def seen_in(data: TensorDictBase) -> SimpleNamespace:
    def values(key: Any) -> list[Any]:
        return sorted(set(data[key].flatten().tolist())) if key in data.keys(True) else []

    return SimpleNamespace(
        frames=data.numel(),
        actions=values("action"),
        processes=values("process"),
        versions=values(("next", "policy_version")),
    )


def collect_from_each(world: SimpleNamespace, processes: int, each: int) -> dict[int, list[Any]]:
    """Batches until each of so many processes has contributed to `each`; by process, what its steps of a batch show.

    A process may be slower than another, so nobody knows in which batch it will be seen.
    """
    found: dict[int, list[Any]] = defaultdict(list)
    while len(found) < processes or min(map(len, found.values())) < each:
        data = next(world.batches).reshape(-1)
        for process in set(data["process"].flatten().tolist()):
            found[process].append(seen_in(data[data["process"].flatten() == process]))
    return dict(found)


def fill(policy: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.fill_(value)


def push(world: SimpleNamespace, value: float | None = None, **options: Any) -> Any:
    """Give the trainer's policy a value and push it; the report of the push."""
    if value is not None:
        fill(world.policy, value)
    world.updater.push_weights(world.policy, **options)
    return world.updater.last_push


def ask(world: SimpleNamespace, worker: int, function: Callable[..., Any], *args: Any) -> Any:
    """`function(collector, *args)` in a worker, where `collector` is the worker's."""
    rref = world.collector.collector_rrefs[worker]
    return rpc.rpc_sync(rref.owner(), _with_local, args=(rref, function, *args), timeout=20)


def _with_local(rref: Any, function: Callable[..., Any], *args: Any) -> Any:
    return function(rref.local_value(), *args)


def value_of(collector: Any) -> float:
    """The value that the collector's policy is filled with; it must be the same everywhere."""
    values = {value for parameter in collector.policy.parameters() for value in parameter.flatten().tolist()}
    (value,) = values
    return float(value)


def version_of(collector: Any) -> int:
    """The version that the collector's policy is bound to."""
    binding = binding_of(collector.policy)
    return binding.version if binding else 0


def values(world: SimpleNamespace) -> list[float]:
    """What the policies of all workers are filled with."""
    return [ask(world, worker, value_of) for worker in range(world.workers)]


def settled_values(world: SimpleNamespace) -> list[float]:
    """The same after each has taken all news that is addressed to it, as its next forward would."""
    for worker in range(world.workers):
        ask(world, worker, settle)
    return values(world)


def settle(collector: Any) -> None:
    binding_of(collector.policy).refresh()


def versions(world: SimpleNamespace) -> list[int]:
    return [ask(world, worker, version_of) for worker in range(world.workers)]


def pid_of(collector: Any) -> int:
    return os.getpid()


def one_thread() -> None:
    torch.set_num_threads(1)


def shut_down(world: SimpleNamespace) -> None:
    world.updater.close()
    world.collector.shutdown()


class Background:
    """Runs `step()` again and again in a thread of its own until the end of its block."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self._step, self._stop = step, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.error: Exception | None = None
        self.steps = 0

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._step()
                self.steps += 1
        except Exception as error:
            self.error = error

    def __enter__(self) -> Background:
        self._thread.start()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stop.set()
        self._thread.join(30)
        if self.error is not None:
            raise self.error
