"""C28: what is sent and what a worker has to itself does not grow with the weights.

The notification's size is in tests/torchrl. Mutants: map a slot with MAP_POPULATE (copies every page); lock it in
memory; store the whole storage of a view.
"""

import pickle

import pytest
import torch
from torch import nn

from tests.helpers import probes, workers

MIB = 1 << 20
NUMEL = 16 * MIB  # 64 MiB of float32


class Big(nn.Module):
    def __init__(self, numel: int = NUMEL) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))

    def forward(self) -> torch.Tensor:
        return self.weight.sum()


def forwards(state, count: int) -> float:
    state.subscriber.refresh()
    return [float(state.module().detach()) for _ in range(count)][-1]


def write_a_page(state) -> None:
    state.module.weight.data[:4].add_(1)


@pytest.mark.parametrize("numel", [256, NUMEL])
def test_a_handle_is_small_and_of_one_size(publisher, numel) -> None:
    channel = publisher(Big(numel))
    channel.publish()
    assert len(str(channel.handle)) < 256
    assert len(pickle.dumps(channel.handle)) < 512


def test_a_worker_has_almost_nothing_to_itself(publisher, peer) -> None:
    source = Big()
    channel = publisher(source)
    channel.publish()
    crew = [peer(), peer(), peer()]
    for worker in crew:
        worker.call(workers.attach, str(channel.handle), Big)
        worker.call(forwards, 2)
    own, *theirs = [probes.segment_memory(), *(worker.call(workers.segment_memory) for worker in crew)]
    for memory in theirs:
        assert memory["Private_Clean"] + memory["Private_Dirty"] < MIB
        assert memory["Rss"] >= 64 * MIB, "the forward has read it all, in place"
        assert memory["Pss"] < 24 * MIB, "four processes share 64 MiB"
    assert own["Pss"] + sum(memory["Pss"] for memory in theirs) < 66 * MIB
    assert sum(memory.get("Swap", 0) + memory.get("Locked", 0) for memory in theirs) == 0


def test_a_write_costs_its_page_and_ends_with_the_version(publisher, peer) -> None:
    source = Big()
    channel = publisher(source)
    channel.publish()
    worker = peer()
    worker.call(workers.attach, str(channel.handle), Big)
    worker.call(forwards, 1)
    worker.call(write_a_page)
    assert worker.call(workers.segment_memory)["Private_Dirty"] <= 2 * 4096
    for _ in range(3):
        channel.publish()
        worker.call(forwards, 1)
    assert worker.call(workers.segment_memory)["Private_Dirty"] <= 4096
    assert len(worker.warnings) == 1
    worker.warnings.clear()


def test_eight_bytes_of_a_large_tensor_stay_eight_bytes(publisher, subscriber) -> None:
    large = torch.zeros(NUMEL)
    weights = {"view": large[:2]}
    channel = publisher(weights)
    for _ in range(3):  # until all slots that are ever needed are there
        channel.publish()
    before = probes.footprint()
    for k in range(20):
        large[0] = k
        assert channel.publish({"view": large[:2]}).nbytes == 8
    after = probes.footprint()
    assert channel.layout.nbytes == 8
    assert after.shared_nbytes == before.shared_nbytes < MIB
    assert after.rss_nbytes - before.rss_nbytes < MIB
    with subscriber(channel).lease() as lease:
        assert lease.weights["view"].tolist() == [19.0, 0.0]
        assert len(pickle.dumps(lease.weights["view"])) < 4096


def test_a_bound_parameter_is_pickled_without_its_slot(publisher, subscriber) -> None:
    """A mapped tensor's storage is its own bytes, not the slot."""
    source = nn.ParameterDict({"small": torch.ones(2), "large": torch.ones(MIB)})
    channel = publisher(source)
    with subscriber(channel) as follower:
        worker = nn.ParameterDict({"small": torch.zeros(2), "large": torch.zeros(MIB)})
        follower.bind(worker)
        channel.publish()
        follower.refresh()
        sent = pickle.dumps(worker["small"])
        assert len(sent) < 4096
        assert pickle.loads(sent).tolist() == [1.0, 1.0]
