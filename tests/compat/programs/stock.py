"""A program for torchrl's own classes, of any release: it knows nothing of shmsync.

`stock.py updater PORT`: with an RPCWeightUpdater; `stock.py scheme PORT`: with a weight-sync scheme.
"""

import sys
from functools import partial

import torch
import torchrl.collectors
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import distributed
from torchrl.envs.libs.gym import GymEnv


def main(api: str, port: str) -> None:
    if hasattr(distributed, "RPCCollector"):
        kind, worker_kind = distributed.RPCCollector, torchrl.collectors.Collector
    else:
        kind, worker_kind = distributed.RPCDataCollector, torchrl.collectors.SyncDataCollector
    if api == "updater":
        options = {"weight_updater": distributed.RPCWeightUpdater}
    else:
        from torchrl.weight_update import RPCWeightSyncScheme

        options = {"weight_sync_schemes": {"policy": RPCWeightSyncScheme()}}
    net = nn.Linear(4, 2)
    policy = TensorDictModule(nn.Sequential(net, nn.Softmax(-1)), in_keys=["observation"], out_keys=["action"])
    collector = kind(
        [partial(GymEnv, "CartPole-v1", device="cpu")],
        policy,
        collector_class=worker_kind,
        frames_per_batch=40,
        total_frames=120,
        sync=True,
        launcher="mp",
        tcp_port=port,
        **options,
    )
    for number, data in enumerate(collector):
        with torch.no_grad():
            net.weight.zero_()
            net.bias.copy_(torch.tensor([0.0, 100.0] if number % 2 else [100.0, 0.0]))
        collector.update_policy_weights_()
        print("batch", data.numel(), data["action"].argmax(-1).unique().tolist(), flush=True)
    made_by = collector.weight_updater if api == "updater" else options["weight_sync_schemes"]["policy"]
    print(type(made_by).__module__, flush=True)
    collector.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
