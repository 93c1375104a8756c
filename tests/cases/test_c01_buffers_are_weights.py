"""C01: running statistics and counters arrive exactly, like parameters.

Mutants: leave buffers out of `weights.places`; copy through a float (2**40 + 1 becomes 2**40).
"""

import pytest
import torch
from torch import nn

from tests.helpers import workers
from tests.helpers.models import bits, snapshot

COUNT = 2**40 + 1


def trained() -> nn.Module:
    module = nn.BatchNorm1d(3)
    module.running_mean.copy_(torch.tensor([1.0, 2.0, 3.0]))
    module.running_var.copy_(torch.tensor([4.0, 5.0, 6.0]))
    module.num_batches_tracked.fill_(COUNT)
    return module.eval()


def fresh() -> nn.Module:
    return nn.BatchNorm1d(3).eval()


@pytest.mark.parametrize("mode", ["map", "copy"])
def test_a_worker_has_all_statistics_and_the_same_output(publisher, peer, mode) -> None:
    source = trained()
    channel = publisher(source)
    worker = peer()
    worker.call(workers.attach, str(channel.handle), fresh, None, mode)
    channel.publish()
    version, got = worker.call(workers.refreshed)
    assert version == 1
    assert got == snapshot(source)
    x = torch.randn(5, 3)
    assert worker.call(workers.forward, x.tolist())[1] == source(x).tolist()


def test_the_count_stays_an_int64_without_dimensions(publisher, subscriber) -> None:
    source = trained()
    channel = publisher(source)
    worker = fresh()
    subscriber(channel).bind(worker)
    channel.publish()
    worker(torch.zeros(1, 3))
    assert worker.num_batches_tracked.dtype == torch.int64
    assert worker.num_batches_tracked.shape == ()
    assert worker.num_batches_tracked.item() == COUNT


class Noise(nn.Module):
    """A buffer of every integer kind, and one that is not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool):
            self.register_buffer(str(dtype).split(".")[1], torch.zeros(3, dtype=dtype))
        self.register_buffer("seed", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self) -> torch.Tensor:
        return self.weight


def test_integer_bool_and_non_persistent_buffers_arrive_to_the_bit(publisher, subscriber) -> None:
    source, worker = Noise(), Noise()
    for buffer in source.buffers():
        top = 1 if buffer.dtype == torch.bool else torch.iinfo(buffer.dtype).max
        buffer.fill_(top)
    channel = publisher(source)
    subscriber(channel).bind(worker)
    channel.publish()
    worker()
    assert snapshot(worker) == snapshot(source)


def test_a_buffer_that_the_worker_replaced_is_refreshed_too(publisher, subscriber) -> None:
    source, worker = trained(), fresh()
    channel = publisher(source)
    subscriber(channel).bind(worker)
    worker.running_mean = worker.running_mean + 7
    channel.publish()
    worker(torch.zeros(1, 3))
    assert bits(worker.running_mean) == bits(source.running_mean)
