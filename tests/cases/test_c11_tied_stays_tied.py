"""C11: tied parameters are stored once and stay one object in the worker.

Mutants: store each name on its own; point each name at a view of its own.
"""

import pytest
import torch
from torch import nn

from tests.helpers import workers
from tests.helpers.models import snapshot

TIED_NBYTES = 512 * 512 * 4


class EmbeddingAndHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, 512)
        self.head = nn.Linear(512, 512, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x))


class OneLayerTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(512, 512, bias=False)
        self.again = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.first(x))


PAIRS = {EmbeddingAndHead: ("embedding", "head"), OneLayerTwice: ("first", "again")}
both_kinds = pytest.mark.parametrize("kind", PAIRS)


def ties(module: nn.Module, kind: type) -> tuple[bool, bool, int]:
    one, other = (getattr(module, name).weight for name in PAIRS[kind])
    return one is other, one.data_ptr() == other.data_ptr(), len(list(module.named_parameters()))


@both_kinds
def test_stored_once(publisher, kind) -> None:
    channel = publisher(kind())
    assert channel.layout.nbytes == TIED_NBYTES
    assert channel.publish().nbytes == TIED_NBYTES
    assert channel.stats()["slot_nbytes"] == TIED_NBYTES


@both_kinds
def test_one_object_in_the_worker(publisher, peer, kind) -> None:
    source = kind()
    channel = publisher(source)
    worker = peer()
    worker.call(workers.attach, str(channel.handle), kind)
    for _ in range(3):
        with torch.no_grad():
            next(source.parameters()).add_(1)
        channel.publish()
        worker.call(workers.refreshed)
        tied, got = worker.call(workers.evaluate, ties, kind)
        assert tied == (True, True, 1)
        assert got == snapshot(source)


@both_kinds
@pytest.mark.parametrize("mode", ["map", "copy"])
def test_tied_still_after_the_end(publisher, subscriber, kind, mode) -> None:
    source, worker = kind(), kind()
    channel = publisher(source)
    follower = subscriber(channel)
    follower.bind(worker, mode)
    channel.publish()
    follower.refresh()
    follower.close()
    assert ties(worker, kind) == (True, True, 1)
    assert snapshot(worker) == snapshot(source)


@both_kinds
def test_tied_in_a_state_dict_and_in_a_lease(publisher, subscriber, kind) -> None:
    """A state dict holds two tensors over one memory: they are one leaf under two names too."""
    source = kind()
    channel = publisher(source.state_dict())
    channel.publish()
    assert len(channel.layout) == 1
    with subscriber(channel).lease() as lease:
        assert snapshot(lease.weights) == snapshot(source)


def test_tied_buffers_and_ties_across_models(publisher, subscriber) -> None:
    def models() -> dict[str, nn.Module]:
        actor, critic = nn.Linear(3, 3), nn.Linear(3, 3)
        critic.weight = actor.weight
        actor.register_buffer("scale", torch.ones(3))
        critic.register_buffer("scale", actor.scale)
        return {"actor": actor, "critic": critic}

    source, worker = models(), models()
    channel = publisher(source)
    assert len(channel.layout) == 4
    follower = subscriber(channel)
    follower.bind(worker)
    source["actor"].scale.fill_(3)
    channel.publish()
    follower.refresh()
    assert snapshot(worker["critic"]) == snapshot(source["critic"])
    assert worker["actor"].weight is worker["critic"].weight
    assert worker["actor"].scale is worker["critic"].scale
