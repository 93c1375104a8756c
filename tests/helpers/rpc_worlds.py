"""Worlds of plain torch.distributed.rpc, without torchrl: a trainer, and workers that own objects with a policy.

The functions that take a `world` run in a trainer (tests.helpers.trainers).
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed import rpc
from torch.distributed.rpc import api

import shmsync
from shmsync import handle
from shmsync.binding import binding_of

# torchrl is hidden first: what is imported afterwards does not find it.
MODULES = ("tests.helpers.no_torchrl", "tests.helpers.rpc_worlds", "shmsync.torchrl.updater")


class Policy(nn.Module):
    """`sizes`: numbers of float32 in its parameters, all `value` at first. A forward gives its lowest and highest."""

    def __init__(self, value: float = 0.0, sizes: tuple[int, ...] = (8,)) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.full((size,), value) for size in sizes)

    def forward(self) -> tuple[float, float]:
        return min(w.min().item() for w in self.weights), max(w.max().item() for w in self.weights)


class Player:
    """What a worker owns: an object whose `policy` is a module, or anything else."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy

    def act(self) -> tuple[float, float]:
        return self.policy()


def build(world: SimpleNamespace, workers: int = 3) -> None:
    """Start the RPC agents."""
    with socket.socket() as one:
        one.bind(("localhost", 0))
        port = one.getsockname()[1]
    world.workers, world.names = workers, [f"worker{i}" for i in range(workers)]
    world.processes = [
        multiprocessing.Process(target=_agent, args=(name, i + 1, workers + 1, port))
        for i, name in enumerate(world.names)
    ]
    for process in world.processes:
        process.start()
    _init("trainer", 0, workers + 1, port)


def _init(name: str, rank: int, size: int, port: int) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://localhost:{port}", rpc_timeout=60)
    rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)


def _agent(name: str, rank: int, size: int, port: int) -> None:
    torch.set_num_threads(1)
    _init(name, rank, size, port)
    rpc.shutdown()


def own(
    world: SimpleNamespace, make: Callable[..., Any] = Player, of: Callable[..., Any] = Policy, **options: Any
) -> None:
    """Let every worker own a `make(of(**options))`, and give the trainer a policy."""
    world.policy = of(**options)
    world.rrefs = [rpc.remote(name, _make, args=(make, of, options)) for name in world.names]


def _make(make: Callable[..., Any], of: Callable[..., Any], options: dict[str, Any]) -> Any:
    return make(of(**options))


def updater(world: SimpleNamespace, rrefs: Any = None, **options: Any) -> Any:
    """torchrl's five arguments, for RRefs that nobody but us has made."""
    world.updater = shmsync.RPCWeightUpdater(
        None, None, world.rrefs if rrefs is None else rrefs, world.policy, world.workers, **options
    )
    return world.updater


def push(world: SimpleNamespace, value: float | None = None, **options: Any) -> Any:
    """Give the trainer's policy a value and push it; the report of the push."""
    if value is not None:
        with torch.no_grad():
            for parameter in world.policy.parameters():
                parameter.fill_(value)
    world.updater.push_weights(world.policy, **options)
    return world.updater.last_push


def ask(world: SimpleNamespace, worker: int, function: Callable[..., Any], *args: Any) -> Any:
    """`function(object, *args)` in the worker that owns the object."""
    rref = world.rrefs[worker]
    return rpc.rpc_sync(rref.owner(), _with_local, args=(rref, function, *args), timeout=20)


def _with_local(rref: Any, function: Callable[..., Any], *args: Any) -> Any:
    return function(rref.local_value(), *args)


def module_of(owned: Any) -> nn.Module:
    return owned if isinstance(owned, nn.Module) else owned.policy


def weights_of(owned: Any) -> tuple[float, float]:
    """The lowest and the highest weight, without a forward."""
    return Policy.forward(module_of(owned))


def bound_version(owned: Any) -> int:
    """The version that it is bound to; 0 = it is not bound, or to nothing yet."""
    binding = binding_of(module_of(owned))
    return binding.version if binding else 0


def run_forward(owned: Any) -> tuple[float, float]:
    return module_of(owned)()


def pid_of(owned: Any) -> int:
    return os.getpid()


def everywhere(world: SimpleNamespace, function: Callable[..., Any]) -> list[Any]:
    return [ask(world, worker, function) for worker in range(world.workers)]


def shut_down(world: SimpleNamespace) -> list[int | None]:
    """An orderly end of all agents; their exit codes."""
    rpc.shutdown(timeout=30)
    for process in world.processes:
        process.join(30)
    return [process.exitcode for process in world.processes]


def watch_messages(world: SimpleNamespace) -> None:
    """Record what RPC sends of shmsync's from now on: function, bytes and number of tensors of each message."""
    if hasattr(world, "messages"):
        world.messages.clear()
        return
    world.messages = []
    pickled: dict[bytes, str] = {}
    serialize, send = api._default_pickler.serialize, api._invoke_rpc_python_udf

    def serializing(call: Any) -> Any:
        data, tensors = serialize(call)
        function = getattr(call, "func", None)
        if getattr(function, "__module__", "").startswith("shmsync"):
            pickled[data] = function.__name__
        return data, tensors

    def sending(to: Any, data: bytes, tensors: Any, *rest: Any) -> Any:
        if data in pickled:
            world.messages.append((pickled[data], len(data), len(tensors)))
        return send(to, data, tensors, *rest)

    api._default_pickler.serialize, api._invoke_rpc_python_udf = serializing, sending


def messages(world: SimpleNamespace) -> list[tuple[str, int, int]]:
    """What has been sent since the last call."""
    found = list(world.messages)
    world.messages.clear()
    return found


_boot_id = handle._boot_id


def lose_the_way(owned: Any) -> None:
    """Run in a worker: from now on it takes itself to be on another host."""
    handle._boot_id = lambda: "another-host"


def find_the_way(owned: Any) -> None:
    handle._boot_id = _boot_id


def break_switch(owned: Any) -> None:
    """Run in a worker: from now on it raises whenever it is told to switch, by the bell or by a message."""
    from shmsync import remote

    def broken() -> int:
        raise ValueError("broken on purpose")

    for attachment in remote._attached.values():
        attachment._binding.follow = broken  # type: ignore[attr-defined]


def mend_switch(owned: Any) -> None:
    from shmsync import remote

    for attachment in remote._attached.values():
        attachment._binding.__dict__.pop("follow", None)  # type: ignore[attr-defined]


def deafen(owned: Any) -> None:
    """Run in a worker: from now on it does not answer to the bell, so that it needs messages."""
    from shmsync import remote

    for attachment in remote._attached.values():
        attachment._subscriber.answer = lambda version: None  # type: ignore[attr-defined]


def undeafen(owned: Any) -> None:
    from shmsync import remote

    for attachment in remote._attached.values():
        attachment._subscriber.__dict__.pop("answer", None)  # type: ignore[attr-defined]
