"""torchrl's RPCWeightUpdater and RPCWeightSyncScheme, the classes themselves.

Workers are plain RPC processes that hold a stand-in for the collector, so that eight of them start in seconds. What is
timed is torchrl's own code: ``rref.rpc_async().update_policy_weights_(TensorDict)`` to each worker and the wait for
all, or the scheme's RPC, ``TensorDict.isend`` and acknowledgement; the receiving members of the stand-in do what
torchrl's Collector does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tensordict import TensorDict

from .. import rpcnet
from ..policy import ProbePolicy
from ..standin import StandIn
from .base import Rival


@dataclass(eq=False)
class _Context:
    """What a scheme asks its collector for."""

    collector_infos: list[Any]
    collector_rrefs: list[Any]
    collector_class: type


class _OverRPC(Rival):
    def prepare(self) -> None:
        self._meeting = rpcnet.Meeting(self.workers)

    def join(self, stand_in: StandIn) -> None:
        rpcnet.offer(stand_in)
        self._meeting.start(stand_in.worker_idx + 1)

    def leave(self) -> None:
        rpcnet.stop()

    def close(self) -> None:
        rpcnet.stop()

    def connect(self, policy: ProbePolicy) -> None:
        self._meeting.start(0)
        infos, rrefs = rpcnet.collectors(self.workers)
        self._weights = TensorDict.from_module(policy).data.lock_()
        self._meet(infos, rrefs)

    def _meet(self, infos: list[Any], rrefs: list[Any]) -> None:
        raise NotImplementedError


class TorchRLUpdater(_OverRPC):
    """``torchrl.collectors.distributed.RPCWeightUpdater``."""

    title = "torchrl RPCWeightUpdater"

    def _meet(self, infos: list[Any], rrefs: list[Any]) -> None:
        from torchrl.collectors.distributed import RPCWeightUpdater

        self._updater = RPCWeightUpdater(infos, StandIn, rrefs, self._weights, self.workers)

    def send(self) -> None:
        self._updater.push_weights()


class TorchRLRPCScheme(_OverRPC):
    """``torchrl.weight_update.RPCWeightSyncScheme``."""

    title = "torchrl RPCWeightSyncScheme"

    def _meet(self, infos: list[Any], rrefs: list[Any]) -> None:
        from torchrl.weight_update import RPCWeightSyncScheme

        self._scheme = RPCWeightSyncScheme()
        for rref in rrefs:
            rref.rpc_sync().register_scheme_receiver({"policy": self._scheme})
        self._context = _Context(infos, rrefs, StandIn)  # the scheme keeps a weak reference only
        self._scheme.init_on_sender(model_id="policy", context=self._context, num_workers=self.workers)
        self._scheme.connect()

    def send(self) -> None:
        self._scheme.send(weights=self._weights)
