"""C15: a trainer's steps are invisible until they are pushed, and its own parameters stay where they are.

Mutants: share the trainer's memory instead of copying it; move its parameters into the slot.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from tests.helpers import probes, workers
from tests.helpers.models import mlp, snapshot

SOURCES: dict[str, Callable[[nn.Module], Any]] = {
    "module": lambda module: module,
    "state dict": lambda module: module.state_dict(),
    "tensordict": TensorDict.from_module,
    "params": lambda module: TensorDict.from_module(module).data,
}


def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    module.train()
    optimizer.zero_grad()
    module(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    module.eval()


def where(module: nn.Module) -> dict[str, tuple[int, int, bool]]:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {key: (id(t), t.data_ptr(), t.is_shared()) for key, t in tensors}


def in_a_segment(address: int) -> bool:
    ranges = [line.split()[0].split("-") for line in probes.segment_maps()]
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


@pytest.mark.parametrize("mode", ["map", "copy"])
@pytest.mark.parametrize("source_of", SOURCES.values(), ids=SOURCES)
def test_a_step_is_seen_after_its_push_and_not_before(publisher, peer, source_of, mode) -> None:
    policy = mlp()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1, momentum=0.9)
    before = where(policy)
    source = source_of(policy)
    channel = publisher(source)
    channel.publish(source)
    worker = peer()
    worker.call(workers.attach, str(channel.handle), mlp, None, mode)
    for version in (1, 2, 3):
        published = snapshot(policy)
        step(policy, optimizer)
        assert snapshot(policy) != published
        assert worker.call(workers.refreshed) == (version, published)
        assert worker.call(workers.leased) == (version, published)
        channel.publish(source)
        assert worker.call(workers.refreshed) == (version + 1, snapshot(policy))
    assert where(policy) == before
    assert not any(shared for _, _, shared in before.values())
    assert not any(in_a_segment(address) for _, address, _ in before.values())


def test_the_optimizers_state_is_no_part_of_it(publisher) -> None:
    """Closing gives nothing back to the trainer and takes nothing away: it trains on."""
    policy = mlp()
    optimizer = torch.optim.Adam(policy.parameters())
    channel = publisher(policy)
    channel.publish()
    step(policy, optimizer)
    before, moments = where(policy), [id(state["exp_avg"]) for state in optimizer.state.values()]
    channel.close()
    step(policy, optimizer)
    assert where(policy) == before
    assert [id(state["exp_avg"]) for state in optimizer.state.values()] == moments
