"""C14: a worker that writes its weights harms nobody, lives, and is back on the published ones at its next version.

Mutants: map slots shared and writable (T and W1 change); read-only (W0 dies of SIGSEGV); leave out `drop_private` (W0
keeps its own page when the slot comes round again); map buffers like parameters (a warning for BatchNorm).
"""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.helpers import workers
from tests.helpers.models import fill, snapshot


class Paged(nn.Module):
    """Two parameters that fill whole pages, so that a page belongs to one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(2, 1024))
        self.second = nn.Parameter(torch.zeros(1024))

    def forward(self) -> torch.Tensor:
        return (self.first * self.second).sum()


def through_data(module: nn.Module) -> None:
    module.second.data.add_(1)


def through_an_sgd_step(module: nn.Module) -> None:
    optimizer = torch.optim.SGD([module.second], lr=0.1, momentum=0.9)
    module().backward()
    optimizer.step()


def through_adam(module: nn.Module) -> None:
    optimizer = torch.optim.AdamW([module.second], foreach=True)
    module().backward()
    optimizer.step()


def through_load_state_dict(module: nn.Module) -> None:
    module.load_state_dict({**module.state_dict(), "second": torch.full((1024,), 99.0)})


def through_numpy(module: nn.Module) -> None:
    module.second.detach().numpy()[5] = 99


def through_no_grad(module: nn.Module) -> None:
    with torch.no_grad():
        nn.init.normal_(module.second)


def through_clipping(module: nn.Module) -> None:
    nn.utils.vector_to_parameters(torch.full((1024,), 99.0), [module.second])


WAYS = [through_data, through_an_sgd_step, through_adam, through_load_state_dict, through_numpy, through_no_grad]


def write_and_follow(state, write: Callable[[nn.Module], None]) -> bool:
    """Write into a worker's module; whether its values changed."""
    before = snapshot(state.module)
    write(state.module)
    return snapshot(state.module) != before


@pytest.mark.parametrize("mode", ["map", "copy"])
@pytest.mark.parametrize("write", [*WAYS, through_clipping], ids=lambda write: write.__name__)
def test_nobody_else_sees_it_and_the_next_version_ends_it(publisher, peer, write, mode) -> None:
    source = fill(Paged(), 1)
    channel = publisher(source)
    channel.publish()
    writer, other = peer(), peer()
    for worker in (writer, other):
        worker.call(workers.attach, str(channel.handle), Paged, None, mode)
    for _ in range(4):  # often enough that every slot comes round again with the writer's pages in it
        published = snapshot(source)
        assert writer.call(workers.refreshed) == other.call(workers.refreshed) == (channel.version, published)
        assert writer.call(write_and_follow, write), "the write itself must work"
        assert other.call(workers.leased) == (channel.version, published)
        assert other.call(workers.refreshed)[1] == published
        assert snapshot(source) == published
        fill(source, channel.version + 1)
        channel.publish()
    assert writer.call(workers.refreshed) == other.call(workers.refreshed) == (5, snapshot(source))
    if mode == "map" and write is not through_clipping:
        assert len(writer.warnings) == 1, "one warning, not one per version"
        assert "wrote to shared weights" in writer.warnings[0]
        assert "`second`" in writer.warnings[0]
        writer.warnings.clear()


def write_a_lease(state) -> float:
    with state.subscriber.lease() as lease:
        lease.weights["second"].add_(7)
        return float(lease.weights["second"][0])


def test_a_write_into_a_lease_stays_in_its_process(publisher, peer) -> None:
    source = fill(Paged(), 1)
    channel = publisher(source)
    writer, other = peer(), peer()
    for worker in (writer, other):
        worker.call(workers.subscribe, str(channel.handle))
    for version in range(1, 5):
        fill(source, version)
        channel.publish()
        assert writer.call(workers.leased) == (version, snapshot(source))
        assert writer.call(write_a_lease) == version + 7
        assert other.call(workers.leased) == (version, snapshot(source))
    assert all("wrote to shared weights" in warning for warning in writer.warnings)
    writer.warnings.clear()


class Normalizer(nn.Module):
    """A running normaliser: one statistic is written in place, one is replaced by a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.bias = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.mean = self.mean + (x.mean(0) - self.mean) / self.count
        return self.norm(x - self.mean) + self.bias


def run(module: nn.Module, guard: Callable, count: int) -> None:
    with guard():
        for _ in range(count):
            module(torch.rand(4, 2) + 3)


@pytest.mark.parametrize("mode", ["map", "copy"])
@pytest.mark.parametrize("guard", [torch.enable_grad, torch.no_grad, torch.inference_mode], ids=lambda g: g.__name__)
def test_running_statistics_are_the_workers_own_until_the_next_version(publisher, peer, guard, mode) -> None:
    """In train mode and without a warning."""
    source = Normalizer()
    channel = publisher(source)
    channel.publish()
    writer, other = peer(), peer()
    for worker in (writer, other):
        worker.call(workers.attach, str(channel.handle), Normalizer, None, mode)
    for version in range(1, 5):
        _, counted = writer.call(workers.evaluate, run, guard, 3)
        assert counted["count"] != snapshot(source)["count"], "the worker's own statistics run"
        assert counted["norm.running_mean"] != snapshot(source)["norm.running_mean"]
        assert other.call(workers.refreshed) == (version, snapshot(source))
        run(source, torch.no_grad, 2)
        channel.publish()
        assert writer.call(workers.refreshed) == (version + 1, snapshot(source))
    assert writer.warnings == []
