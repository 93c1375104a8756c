"""Trainer and worker on different GPUs. Devices are told apart by UUID: their numbers differ from process to process.

Mutants: a ring for the index in the wish; a ring on every device; a gather that takes all leaves to be on one device.
"""

from __future__ import annotations

import functools

import torch

from tests.gpu import work
from tests.gpu.modules import Watched, fill
from tests.gpu.steps import MIB, attach, follow, on_gpu, share, visible

make = functools.partial(Watched, 16, MIB)


def spread() -> Watched:
    """A policy of which the first half of the leaves is on one device, the rest on another."""
    policy = make()
    for number, layer in enumerate(policy.layers):
        layer.data = layer.data.to(f"cuda:{number * 2 // len(policy.layers)}")
    return policy


def test_a_worker_on_the_other_device(two_devices, publisher, spare) -> None:
    """What is cuda:1 here is cuda:0 there."""
    source, worker = on_gpu(make, "cuda:0"), spare({"CUDA_VISIBLE_DEVICES": visible(1)})
    channel = publisher(source)
    share(channel, source, [worker], make)
    for version in range(3, 10):
        follow(channel, source, [worker], version)
    assert worker.call(work.devices) == {"cuda:0"}
    assert worker.call(work.memory).foreign
    assert channel.stats()["rings"] == 1


def test_workers_on_both_devices(two_devices, publisher, spare, workers) -> None:
    source, crew = on_gpu(make, "cuda:0"), [*workers(1), spare({"CUDA_VISIBLE_DEVICES": visible(1)})]
    channel = publisher(source)
    share(channel, source, crew, make)
    for version in range(3, 10):
        follow(channel, source, crew, version)
    assert channel.stats()["rings"] == 2


def test_a_policy_spread_over_two_devices(two_devices, publisher, workers) -> None:
    """One worker has it whole on one device, another one spread like the trainer."""
    source, crew = on_gpu(spread), workers(2)
    channel = publisher(source)
    channel.publish(fill(source, 1))
    attach(channel, crew[:1], make, "auto", "cuda:1")
    attach(channel, crew[1:], spread)
    for version in range(2, 8):
        channel.publish(fill(source, version))
        fill(source, -1)
        torch.cuda.synchronize()
        for worker in crew:
            seen = worker.call(work.look)
            assert (seen.version, seen.low, seen.high) == (version, version, version)
    assert crew[0].call(work.devices) == {"cuda:1"}
    assert crew[1].call(work.devices) == {"cuda:0", "cuda:1"}
