"""torch.distributed and RPC between a host and its workers, started as torchrl's RPCCollector starts them."""

from __future__ import annotations

import multiprocessing
import os
import time
import warnings
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import rpc

from .standin import StandIn

_TIMEOUT_SECONDS = 60.0
_stand_in: StandIn | None = None


class Meeting:
    """Where a host (rank 0) and its workers (from 1 on) find each other. Made before the workers are forked.

    The port is chosen by the system when the host listens on it, and told through shared memory: a port that was merely
    free a moment ago may be another rival's by then.
    """

    def __init__(self, workers: int) -> None:
        self._world = workers + 1
        self._port = multiprocessing.get_context("fork").Value("i", 0, lock=False)

    def start_group(self, rank: int) -> None:
        """Join the process group, gloo over loopback."""
        if rank == 0:
            # Shared with the servers that gloo and RPC would start on this port.
            limit = timedelta(seconds=_TIMEOUT_SECONDS)
            self._store = dist.TCPStore("127.0.0.1", 0, self._world, True, limit, False, multi_tenant=True)
            self._port.value = self._store.port
        self._wait()
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self._port.value))
        os.environ.update(GLOO_SOCKET_IFNAME="lo", TP_SOCKET_IFNAME="lo")
        dist.init_process_group(backend="gloo", rank=rank, world_size=self._world)

    def start(self, rank: int) -> None:
        """Join the process group and RPC, with torchrl's own names and options."""
        from torchrl.collectors.distributed.default_configs import DEFAULT_TENSORPIPE_OPTIONS

        self.start_group(rank)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch about its own use of gloo
            rpc.init_rpc(
                f"COLLECTOR_NODE_{rank}" if rank else "TRAINER_NODE",
                rank=rank,
                world_size=self._world,
                backend=rpc.BackendType.TENSORPIPE,
                rpc_backend_options=rpc.TensorPipeRpcBackendOptions(**DEFAULT_TENSORPIPE_OPTIONS),
            )

    def _wait(self) -> None:
        end = time.monotonic() + _TIMEOUT_SECONDS
        while not self._port.value:
            if time.monotonic() > end:
                raise TimeoutError("The host did not open a port")
            time.sleep(1e-3)


def offer(stand_in: StandIn) -> None:
    """In a worker: this is the object that the host gets an RRef of."""
    global _stand_in
    _stand_in = stand_in


def _offered() -> Any:
    return _stand_in


def collectors(workers: int) -> tuple[list[Any], list[Any]]:
    """In the host: each worker's RPC info and the RRef of its stand-in, as RPCCollector has them."""
    infos = [rpc.get_worker_info(f"COLLECTOR_NODE_{rank}") for rank in range(1, workers + 1)]
    rrefs = [rpc.remote(info, _offered) for info in infos]
    for rref in rrefs:
        rref.rpc_sync().get_model("policy")  # until the object is there
    return infos, rrefs


def stop() -> None:
    """Leave at once; the processes end anyway."""
    rpc.shutdown(graceful=False)
