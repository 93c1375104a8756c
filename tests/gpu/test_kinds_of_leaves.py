"""Whatever kinds of leaves a policy has, they arrive to the bit.

Mutants: a gather by elements of fp32; strided leaves copied as if they were contiguous; the cast left to the worker;
buffers that alias the slot; a partial push that leaves the rest of a slot as it was.
"""

from __future__ import annotations

import functools

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from tests.gpu import work
from tests.gpu.modules import Adapted, Zoo, digest, randomise
from tests.gpu.steps import attach, on_gpu

LINEAR = functools.partial(nn.Linear, 64, 32)
NORM = functools.partial(nn.BatchNorm1d, 64)


def half() -> nn.Module:
    return LINEAR().bfloat16()


@pytest.mark.parametrize(("asked", "mode"), [("auto", "map"), ("copy", "copy")])
@pytest.mark.parametrize("side", ["cuda", "cpu"])
def test_every_kind(publisher, workers, asked: str, mode: str, side: str) -> None:
    source, [worker] = on_gpu(Zoo, side), workers(1)
    channel = publisher(source)
    channel.publish(randomise(source, 1))
    attach(channel, [worker], Zoo, asked)
    assert worker.call(work.contents) == (1, "copy", digest(source))
    for version in (2, 3, 4, 5):
        channel.publish(randomise(source, version))
        assert worker.call(work.contents) == (version, mode, digest(source))
    places = worker.call(work.addresses)
    assert places["first.weight"] == places["second.weight"], "tied leaves have come apart"


def test_a_tensordict(publisher, workers) -> None:
    source, [worker] = on_gpu(LINEAR), workers(1)
    weights = TensorDict({name: p.data for name, p in source.named_parameters()})
    channel = publisher(weights)
    channel.publish(weights)
    attach(channel, [worker], LINEAR)
    for version in (2, 3, 4):
        randomise(source, version)
        channel.publish(weights)
        assert worker.call(work.contents) == (version, "map", digest(source))


def test_cast_to_bfloat16(publisher, workers) -> None:
    """Half of the bytes are stored: a bf16 worker maps them, an fp32 worker has a copy, cast back."""
    source, crew = on_gpu(LINEAR), workers(2)
    channel = publisher(source, dtype=torch.bfloat16)
    channel.publish(randomise(source, 1))
    attach(channel, crew[:1], half)
    attach(channel, crew[1:], LINEAR)
    for version in (2, 3, 4):
        channel.publish(randomise(source, version))
        rounded, back = on_gpu(half), on_gpu(LINEAR)
        rounded.load_state_dict(source.state_dict())
        back.load_state_dict(rounded.state_dict())
        assert crew[0].call(work.contents) == (version, "map", digest(rounded))
        assert crew[1].call(work.contents) == (version, "copy", digest(back))


def test_a_partial_push_costs_the_adapter(publisher, workers) -> None:
    """The rest is the newest version's; once all slots have it, the adapter's bytes are all that is copied."""
    source, [worker] = on_gpu(Adapted), workers(1)
    channel = publisher(source)
    channel.publish(randomise(source, 1))
    attach(channel, [worker], Adapted)
    channel.publish(randomise(source, 2))
    adapter = dict(source.adapter.named_parameters(prefix="adapter"))
    for version in range(3, 12):
        randomise(source.adapter, version)
        push = channel.publish(adapter, partial=True)
        assert worker.call(work.contents) == (version, "map", digest(source))
    assert (push.nbytes, push.leaves) == (sum(p.numel() * p.element_size() for p in adapter.values()), len(adapter))


def test_buffers_are_each_workers_own(publisher, workers) -> None:
    """One worker's running statistics change; neither the trainer nor the other worker sees it, and a push mends it."""
    source, crew = on_gpu(NORM), workers(2)
    channel = publisher(source)
    channel.publish(randomise(source, 1))
    attach(channel, crew, NORM)
    channel.publish(randomise(source, 2))
    expected = digest(source)
    assert [worker.call(work.contents) for worker in crew] == [(2, "map", expected)] * 2
    crew[0].call(work.train)
    assert crew[0].call(work.contents)[2] != expected
    assert crew[1].call(work.contents)[2] == expected
    assert digest(source) == expected
    channel.publish(randomise(source, 3))
    assert [worker.call(work.contents) for worker in crew] == [(3, "map", digest(source))] * 2
