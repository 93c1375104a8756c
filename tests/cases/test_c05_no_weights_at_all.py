"""C05: a policy without weights is a policy too.

Mutant: map or reserve a slot of no bytes (mmap and fallocate of length 0 fail).
"""

import torch
from torch import nn

from tests.helpers import workers


def test_two_workers_of_a_tanh(publisher, peer) -> None:
    channel = publisher(nn.Tanh())
    peers = [peer(), peer()]
    for worker in peers:
        assert worker.call(workers.attach, str(channel.handle), nn.Tanh) == 0
    assert [channel.publish().version for _ in range(2)] == [1, 2]
    for worker in peers:
        assert worker.call(workers.refreshed) == (2, {})
        assert worker.call(workers.forward, [0.0]) == (2, [0.0])
        worker.call(workers.detach)
    assert channel.subscribers() == []


def test_a_lease_on_nothing(publisher, subscriber) -> None:
    channel = publisher(nn.Tanh())
    follower = subscriber(channel)
    channel.publish()
    with follower.lease() as lease:
        assert (lease.version, list(lease.weights.keys())) == (1, [])
    assert channel.stats()["nbytes"] == 0


def test_pushes_go_on_after_a_burst_of_leases(publisher, subscriber) -> None:
    """Spare slots are given back here as elsewhere, though there is nothing to give."""
    channel = publisher({})
    follower = subscriber(channel)
    leases = []
    for _ in range(6):
        channel.publish()
        leases.append(follower.lease())
    del leases
    for _ in range(200):
        channel.publish()
    assert channel.version == 206
    assert channel.stats()["slots"] <= 3


def test_a_weightless_model_beside_one_with_weights(publisher, subscriber) -> None:
    models = {"actor": nn.Linear(2, 2), "squash": nn.Tanh()}
    channel = publisher(models)
    mine = {"actor": nn.Linear(2, 2), "squash": nn.Tanh()}
    binding = subscriber(channel).bind(mine)
    channel.publish()
    mine["squash"](torch.zeros(1))
    assert binding.version == 1
    assert torch.equal(mine["actor"].weight, models["actor"].weight)
