"""torchrl's SharedMemWeightSyncScheme and MultiProcessWeightSyncScheme between forked processes.

The queues are made before the workers are forked, since they can only be inherited; a scheme keeps the queues that it
finds in its tables. Everything else goes through the schemes' public methods, as in torchrl's Multi* collectors.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from ..policy import ProbePolicy
from ..standin import StandIn
from .base import Rival


def as_parameter(tensor: Tensor) -> nn.Parameter:
    """The kind of leaf that ``TensorDict.from_module`` gives."""
    return nn.Parameter(tensor, requires_grad=False)


class _OverQueues(Rival):
    scheme_name = ""

    def prepare(self) -> None:
        import torchrl.weight_update

        self._scheme: Any = getattr(torchrl.weight_update, self.scheme_name)()
        context = multiprocessing.get_context("fork")
        if not hasattr(self._scheme, "_weight_init_queues"):
            self._scheme._weight_init_queues = {}
        for table in ("_weight_init_queues", "_instruction_queues", "_ack_queues"):
            getattr(self._scheme, table).update({worker: context.Queue() for worker in range(self.workers)})

    def connect(self, policy: ProbePolicy) -> None:
        self._weights = TensorDict.from_module(policy).data.lock_()
        # A clone: both schemes move what they are given here into shared memory, in place, and workers compute from it.
        # With the trainer's own parameters they would see its steps before they are pushed.
        first = TensorDict.from_module(policy).data.clone().apply(as_parameter)
        devices = [torch.device("cpu")] * self.workers
        self._scheme.init_on_sender(model_id="policy", weights=first, devices=devices)
        self._scheme.connect()

    def send(self) -> None:
        self._scheme.send(weights=self._weights)

    def join(self, stand_in: StandIn) -> None:
        stand_in.register_scheme_receiver({"policy": self._scheme})


class TorchRLSharedMem(_OverQueues):
    """One copy in shared memory that the workers compute from, written while they do."""

    title = "torchrl SharedMemWeightSyncScheme"
    scheme_name = "SharedMemWeightSyncScheme"

    @classmethod
    def footprint(cls, workers: int) -> int:
        return 3

    def prepare(self) -> None:
        super().prepare()
        self._scheme.shared_transport.register_weights({}, self._scheme._weight_init_queues)


class TorchRLMultiProcess(_OverQueues):
    """A copy through a queue to each worker."""

    title = "torchrl MultiProcessWeightSyncScheme"
    scheme_name = "MultiProcessWeightSyncScheme"

    @classmethod
    def footprint(cls, workers: int) -> int:
        return 4
