"""C27: two thousand small leaves need no more descriptors and mappings than two.

Mutant: one segment, or one mapping, per leaf.
"""

import torch
from torch import nn

import shmsync
from tests.helpers import probes, workers
from tests.helpers.models import fill, uniform

LEAVES = 2000
MOST_EXTRA = 8


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.leaves = nn.ParameterList([nn.Parameter(torch.zeros(3)) for _ in range(LEAVES)])

    def forward(self) -> None:
        return None


def publish(state, count: int) -> str:
    """A trainer in a process of its own; the handle's text."""
    if not hasattr(state, "channel"):
        state.source = Many()
        state.channel = shmsync.Publisher(state.source)
    for _ in range(count):
        state.channel.publish(fill(state.source, state.channel.version + 1))
    return str(state.channel.handle)


def step(state) -> tuple[int, float]:
    return state.subscriber.refresh(), uniform(torch.cat([leaf.detach() for leaf in state.module.leaves]))


def close(state) -> None:
    state.channel.close()
    del state.channel


def extra(before: probes.Footprint, after: probes.Footprint) -> tuple[int, int]:
    return after.descriptors - before.descriptors, after.mappings - before.mappings


def shmsync_mappings(state) -> int:
    return len(probes.segment_maps())


def test_a_hundred_pushes_of_two_thousand_leaves_with_128_descriptors(peer) -> None:
    trainer, *crew = processes = [peer(), peer(), peer()]
    before = []
    for process in processes:
        process.call(workers.limit_descriptors, 128)
        before.append(process.call(workers.footprint))
    handle = trainer.call(publish, 0)
    for worker in crew:
        worker.call(workers.attach, handle, Many)
    for version in range(1, 101):
        trainer.call(publish, 1)
        for worker in crew:
            assert worker.call(step) == (version, version)
    for process, footprint in zip(processes, before, strict=True):
        descriptors, _ = extra(footprint, process.call(workers.footprint))
        assert 0 < descriptors <= MOST_EXTRA
        assert 0 < process.call(shmsync_mappings) <= MOST_EXTRA
    for worker in crew:
        worker.call(workers.detach)
    trainer.call(close)
    for process, footprint in zip(processes, before, strict=True):
        assert extra(footprint, process.call(workers.footprint))[0] == 0
        assert process.call(shmsync_mappings) == 0
