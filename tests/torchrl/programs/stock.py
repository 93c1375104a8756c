"""A program for torchrl's own RPCWeightUpdater: it knows nothing of shmsync."""

import sys
from functools import partial

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.collectors.distributed import RPCCollector, RPCWeightUpdater
from torchrl.envs.libs.gym import GymEnv


def main(batches: int, port: str) -> None:
    net = nn.Linear(4, 2)
    policy = TensorDictModule(nn.Sequential(net, nn.Softmax(-1)), in_keys=["observation"], out_keys=["action"])
    optimizer = torch.optim.Adam(policy.parameters(), 1e-2)
    collector = RPCCollector(
        [partial(GymEnv, "CartPole-v1", device="cpu")] * 2,
        policy,
        collector_class=Collector,
        frames_per_batch=40,
        total_frames=40 * batches,
        sync=True,
        launcher="mp",
        tcp_port=port,
    )
    weights = TensorDict.from_module(policy).data
    updater = RPCWeightUpdater(None, Collector, collector.collector_rrefs, weights, 2)
    for data in collector:
        loss = (policy(data)["action"][..., 0] * data["next", "reward"].squeeze(-1)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        updater.push_weights(weights)
        print("batch", data.numel(), type(updater), flush=True)
    collector.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
