"""What the updater takes from a collector before its workers exist, and what it gives them to be made with."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from .collector import is_function
from .receiver import Receiver, stand_in


def weights_of(collector: Any) -> Any:
    """The trainer's module, which knows its ties and which buffers are persistent; else the weights that
    torchrl extracted."""
    policy = collector.policy
    return policy if isinstance(policy, torch.nn.Module) else getattr(collector, "policy_weights", None)


def devices_of(collector: Any, workers: int) -> list[torch.device]:
    """On which device each worker's policy is, as far as the collector says so."""
    given = getattr(collector, "policy_device", None)
    devices = list(given) if isinstance(given, (list, tuple)) else [given] * workers
    return [torch.device("cpu" if device is None else device) for device in devices]


def inject(collector: Any, handle_text: str, fallback: bool, stamped: bool, listening: bool) -> None:
    """Let each worker's collector be built with a receiver, where this torchrl release takes one and the
    user gave none. ``fallback``: a worker that can't map the channel is built all the same. ``stamped``,
    ``listening``: see Receiver."""
    kwargs, kind = getattr(collector, "collector_kwargs", None), getattr(collector, "collector_class", None)
    if not isinstance(kwargs, (list, tuple)) or not inspect.isclass(kind):
        return
    # A collector with inner processes hands its "senders" to them; a plain one takes receivers.
    inner = hasattr(kind, "_run_processes")
    if inner and is_function(getattr(collector, "policy", None)):
        return  # torchrl takes a scheme there as a promise that the policy is a module
    name = "weight_sync_schemes" if inner else "weight_recv_schemes"
    otherwise = stand_in(kind, fallback)
    constructors = [vars(base)["__init__"] for base in kind.__mro__ if "__init__" in vars(base)]
    if not any(name in inspect.signature(constructor).parameters for constructor in constructors):
        return
    of_each = [dict(given) for given in kwargs]  # the user may have given all workers the very same one
    for worker, given in enumerate(of_each):
        mine = given.get(name) is None or (getattr(collector, "policy", None) is None and _is_torchrls_own(given[name]))
        if mine:
            given[name] = {"policy": Receiver(handle_text, worker, otherwise, stamped=stamped, listening=listening)}
    collector.collector_kwargs = of_each


def _is_torchrls_own(schemes: Any) -> bool:
    """RPCCollector itself puts this in where a policy_factory feeds inner processes; ours takes its place."""
    return list(schemes) == ["policy"] and type(schemes["policy"]).__name__ == "SharedMemWeightSyncScheme"
