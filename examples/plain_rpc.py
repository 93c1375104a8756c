"""The updater over plain torch.distributed.rpc: no torchrl, any object that has a policy.

python examples/plain_rpc.py
"""

import multiprocessing as mp
import os
import socket
import warnings

import torch
from torch import Tensor, nn
from torch.distributed import rpc

import shmsync

WORKERS = 2

# torch about its own use of gloo, in every process.
warnings.filterwarnings("ignore", message="You are using a Backend", category=UserWarning)


def make_policy() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))


class Actor:
    """Lives in a worker. All that shmsync asks of it is an attribute `policy`."""

    def __init__(self) -> None:
        self.policy = make_policy()

    def act(self, observation: Tensor) -> Tensor:
        return self.policy(observation)


def run_worker(rank: int) -> None:
    torch.set_num_threads(1)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=WORKERS + 1)
    rpc.shutdown()  # serves requests until the trainer is done


def main() -> None:
    # RPC carries pickles and knows no passwords: keep it on the loopback interface.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port(), TP_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    spawn = mp.get_context("spawn")
    processes = [spawn.Process(target=run_worker, args=(rank,)) for rank in range(1, WORKERS + 1)]
    for process in processes:
        process.start()
    rpc.init_rpc("trainer", rank=0, world_size=WORKERS + 1)

    policy = make_policy()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    actors = [rpc.remote(f"worker{rank}", Actor) for rank in range(1, WORKERS + 1)]
    with shmsync.RPCWeightUpdater(collector_rrefs=actors, policy_weights=policy, num_workers=WORKERS) as updater:
        observation = torch.randn(8, 4)
        for step in range(3):
            policy(observation).square().mean().backward()
            optimizer.step()
            updater.push_weights()
            answers = [actor.rpc_sync().act(observation) for actor in actors]
            same = all(torch.equal(answer, policy(observation)) for answer in answers)
            report = updater.last_push
            versions = {worker: answer.in_use for worker, answer in report.workers.items()}
            print(f"step {step}: version {report.version}, {report.nbytes} bytes copied once, workers use {versions}")
            if not same:
                raise SystemExit("a worker answered with other weights")
    rpc.shutdown()
    for process in processes:
        process.join()


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


if __name__ == "__main__":
    main()
