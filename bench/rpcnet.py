"""torch.distributed and RPC between a host and its workers, started as torchrl's RPCCollector starts them."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch.distributed as dist
from torch.distributed import rpc

from .standin import StandIn

_stand_in: StandIn | None = None


def start_group(rank: int, world: int, port: int) -> None:
    """Join the process group, gloo over loopback. Rank 0 is the host."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", TP_SOCKET_IFNAME="lo")
    dist.init_process_group(backend="gloo", rank=rank, world_size=world)


def start(rank: int, world: int, port: int) -> None:
    """Join the process group and RPC, with torchrl's own names and options."""
    from torchrl.collectors.distributed.default_configs import DEFAULT_TENSORPIPE_OPTIONS

    start_group(rank, world, port)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch about its own use of gloo
        rpc.init_rpc(
            f"COLLECTOR_NODE_{rank}" if rank else "TRAINER_NODE",
            rank=rank,
            world_size=world,
            backend=rpc.BackendType.TENSORPIPE,
            rpc_backend_options=rpc.TensorPipeRpcBackendOptions(**DEFAULT_TENSORPIPE_OPTIONS),
        )


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
