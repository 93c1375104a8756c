"""What the steps of torchrl's collectors have used, while pushes go on without pause: mixtures, and wrong stamps."""

from __future__ import annotations

import itertools
import os
import threading
import time
import warnings
from collections import Counter
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

from .collecting import end, make_env
from .processes import free_port

FRAMES_PER_BATCH = 64
LAYERS, NUMBERS = 16, 1 << 16  # 4 MB
# By name: the rivals that push that way, shmsync's first.
WAYS = {
    "RPC updater": ("shmsync", "torchrl-updater"),
    "RPC scheme": ("shmsync", "torchrl-rpc-scheme"),
    "RPC scheme, inner processes": ("shmsync", "torchrl-rpc-scheme"),
    "multiprocessing scheme": ("shmsync", "torchrl-shared-mem"),
}


class Layers(nn.Module):
    """4 MB whose output tells the least and the greatest number in them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.zeros(NUMBERS) for _ in range(LAYERS))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Action, least, greatest."""
        found = [torch.aminmax(layer) for layer in self.layers]
        ends = torch.stack([pair.min for pair in found]).min(), torch.stack([pair.max for pair in found]).max()
        action = observation[..., :2] * 0.0
        return action, *(end.expand(*observation.shape[:-1], 1).clone() for end in ends)


class StepHost:
    """Served by a child process: a collector that is pushed to in one of `WAYS`. A push fills all with its number."""

    def __init__(self, way: str, rival: str) -> None:
        self._way, self._rival = way, rival
        self._pushed = 0

    def start(self) -> int:
        """Start collector and workers, and learn how far its stamps are from the numbers of the pushes."""
        torch.set_num_threads(1)
        os.environ.update(GLOO_SOCKET_IFNAME="lo", TP_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
        warnings.simplefilter("ignore")
        self._policy = TensorDictModule(Layers(), in_keys=["observation"], out_keys=["action", "low", "high"])
        self._collector = _collector(self._policy, self._way, self._rival)
        self._batches = iter(self._collector)
        next(self._batches)
        self._push()
        *_, data = itertools.islice(self._batches, 4)
        distances = Counter((_stamps(data) - data["low"].flatten()).tolist())
        ((self._distance, _),) = distances.most_common(1)
        return 0

    def watch(self, seconds: float) -> dict[str, int]:
        """Push without pause for so long: how many steps there were, mixed ones, and ones with a wrong stamp."""
        counts = dict.fromkeys(("steps", "mixed", "misstamped"), 0)
        stop, begin = threading.Event(), self._pushed
        pushing = threading.Thread(target=self._push_until, args=(stop,))
        pushing.start()
        try:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                data = next(self._batches)
                low, high = data["low"].flatten(), data["high"].flatten()
                counts["steps"] += low.numel()
                counts["mixed"] += int((low != high).sum())
                counts["misstamped"] += int((_stamps(data) - low != self._distance).sum())
        finally:
            stop.set()
            pushing.join()
        return {**counts, "pushes": self._pushed - begin}

    def _push_until(self, stop: threading.Event) -> None:
        while not stop.is_set():
            self._push()

    def _push(self) -> None:
        self._pushed += 1
        with torch.no_grad():
            for layer in self._policy.module.layers:
                layer.fill_(self._pushed)
        if self._way == "RPC updater":
            self._collector.weight_updater.push_weights()
        else:
            self._collector.update_policy_weights_()

    def close(self) -> None:
        """End the workers."""
        end(self._collector)


def _stamps(data: TensorDictBase) -> torch.Tensor:
    return data["next", "policy_version"].flatten()


def _collector(policy: nn.Module, way: str, rival: str) -> Any:
    if way == "multiprocessing scheme":
        return _multi_collector(policy, rival)
    from torchrl.collectors import Collector, MultiSyncCollector
    from torchrl.collectors.distributed import RPCCollector

    inner = way == "RPC scheme, inner processes"
    collector = RPCCollector(
        [make_env] * (1 if inner else 2),
        policy,
        collector_class=MultiSyncCollector if inner else Collector,
        num_workers_per_collector=2 if inner else 1,
        frames_per_batch=FRAMES_PER_BATCH,
        total_frames=1 << 40,
        sync=True,
        launcher="mp",
        tcp_port=free_port(),
        collector_kwargs={"track_policy_version": True},
        **_pushing(way, rival),
    )
    if rival == "torchrl-updater":  # nobody else does
        collector.weight_updater.collector_rrefs = collector.collector_rrefs
        collector.weight_updater.policy_weights = collector.policy_weights
    return collector


def _pushing(way: str, rival: str) -> dict[str, Any]:
    if way == "RPC updater":
        from torchrl.collectors import Collector
        from torchrl.collectors.distributed import RPCWeightUpdater as Theirs

        from shmsync import RPCWeightUpdater as Ours

        return {"weight_updater": Ours if rival == "shmsync" else partial(Theirs, None, Collector, None, None, 2)}
    from torchrl.weight_update import RPCWeightSyncScheme as TheirScheme

    from shmsync import RPCWeightSyncScheme as OurScheme

    return {"weight_sync_schemes": {"policy": OurScheme() if rival == "shmsync" else TheirScheme()}}


def _multi_collector(policy: nn.Module, rival: str) -> Any:
    from torchrl.collectors import MultiSyncCollector
    from torchrl.weight_update import SharedMemWeightSyncScheme as Theirs

    from shmsync import SharedMemWeightSyncScheme as Ours

    return MultiSyncCollector(
        [make_env] * 2,
        policy,
        frames_per_batch=FRAMES_PER_BATCH,
        total_frames=-1,
        weight_sync_schemes={"policy": Ours() if rival == "shmsync" else Theirs()},
        track_policy_version=True,
    )
