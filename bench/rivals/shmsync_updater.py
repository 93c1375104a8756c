"""shmsync: its RPCWeightUpdater in the five-argument form, with notifications by RPC or in memory alone."""

from __future__ import annotations

import time

from tensordict import TensorDict

from .. import rpcnet
from ..policy import ProbePolicy
from ..standin import StandIn
from .base import Rival


def sweep_seconds(workers: int) -> float:
    """How long workers may still look through the slots that they have left: 10 ms later, for 2 ms each, on 2 cores."""
    return 0.02 + 0.002 * workers


class ShmSync(Rival):
    """Awaited notifications, the default."""

    title = "shmsync"
    notify = "rpc"

    @classmethod
    def footprint(cls, workers: int) -> int:
        return 1 + 3 + 1  # the trainer's own, slots, and for a moment a worker's first weights

    def prepare(self) -> None:
        import shmsync.torchrl.updater  # noqa: F401 - so that workers need not import it at their first message

        self._meeting = rpcnet.Meeting(self.workers)

    def connect(self, policy: ProbePolicy) -> None:
        from shmsync import RPCWeightUpdater

        self._meeting.start(0)
        infos, rrefs = rpcnet.collectors(self.workers)
        weights = TensorDict.from_module(policy).data.lock_()
        self.updater = RPCWeightUpdater(infos, StandIn, rrefs, weights, self.workers, notify=self.notify)
        self.updater.init()

    def send(self) -> None:
        self.updater.push_weights()

    def settle(self) -> None:
        time.sleep(sweep_seconds(self.workers))

    def doubt(self) -> None:
        self.updater._messenger._prompt.clear()

    def slots(self) -> int:
        return self.updater._publisher.stats()["slots"]

    def finish(self) -> None:
        self.updater.close()

    def close(self) -> None:
        rpcnet.stop()

    def join(self, stand_in: StandIn) -> None:
        rpcnet.offer(stand_in)
        self._meeting.start(stand_in.worker_idx + 1)

    def leave(self) -> None:
        rpcnet.stop()


class ShmSyncMemory(ShmSync):
    """No message at all: workers see the news at their next forward."""

    title = "shmsync, notify=memory"
    notify = "memory"
    confirms = False
