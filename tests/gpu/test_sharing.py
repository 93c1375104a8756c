"""Workers of one GPU read the very same memory: a push costs one copy, and a worker has no weights of its own.

Mutants: bind() that copies device slots; a ring per subscriber instead of per device; handles exported for each push.
"""

from __future__ import annotations

import functools

import pytest
import torch

import shmsync
from tests.gpu import work
from tests.gpu.modules import Watched, fill, nbytes
from tests.gpu.steps import MIB, attach, follow, on_gpu, share, used

make = functools.partial(Watched, 16, MIB)  # 64 MiB


@pytest.mark.parametrize("count", [2, 4])
def test_workers_share_the_device_slots(publisher, workers, count: int) -> None:
    """The ring is all that a channel takes of the device, however many workers there are."""
    source, crew = on_gpu(make), workers(count)
    channel = publisher(source)
    channel.publish(fill(source, 1))
    attach(channel, crew, make)
    before = used()
    for version in range(2, 8):
        follow(channel, source, crew, version)
    stats, grown = channel.stats(), used() - before
    size = nbytes(source)
    assert stats["rings"] == 1
    assert size <= stats["device_nbytes"] <= stats["slots"] * (stats["slot_nbytes"] + (2 << 20))
    assert stats["slots"] <= 3, "Workers that follow each push lease one slot only"
    # The kernels that were used here for the first time are loaded into the device's memory too.
    assert grown < stats["device_nbytes"] + size // 2
    for worker in crew:
        memory = worker.call(work.memory)
        assert memory.allocated < MIB, f"Expected no weights in the worker's own memory, got {memory}"
        assert memory.foreign
        assert memory.span <= stats["slot_nbytes"]
        assert 1 <= worker.call(work.stats)["device_slots_mapped"] <= stats["slots"]


def test_slots_are_mapped_once(publisher, workers) -> None:
    """Versions come back to the addresses of earlier ones: nothing is exported or mapped anew per push."""
    source, [worker] = on_gpu(make), workers(1)
    channel = publisher(source)
    share(channel, source, [worker], make)
    seen = set()
    for version in range(3, 15):
        follow(channel, source, [worker], version)
        seen.add(worker.call(work.addresses)["layers.0"])
    assert 2 <= len(seen) <= channel.stats()["slots"]


def test_the_publishers_own_process(publisher) -> None:
    """A module that is bound in the trainer's process uses the slot directly; the trainer's own one is left alone."""
    source = on_gpu(make)
    addresses = [p.data_ptr() for p in source.parameters()]
    channel = publisher(source)
    channel.publish(fill(source, 1))
    policy = on_gpu(make)
    allocated = torch.cuda.memory_allocated()
    with shmsync.Subscriber(channel.handle) as subscriber:
        binding = subscriber.bind(policy)
        for version in (2, 3, 4):
            channel.publish(fill(source, version))
            fill(source, 99)
            subscriber.refresh()
            assert policy().tolist() == [version, version]
            assert (binding.version, binding.mode) == (version, "map")
        assert torch.cuda.memory_allocated() <= allocated - nbytes(policy) + MIB
        binding.unbind()
        channel.publish(fill(source, 5))
        assert policy().tolist() == [4, 4], "An unbound module keeps the weights that it had"
    assert [p.data_ptr() for p in source.parameters()] == addresses


def test_a_push_to_one_worker(publisher, workers) -> None:
    """Mutant: moving row 0 for every push."""
    source, crew = on_gpu(make), workers(2)
    channel = publisher(source)
    channel.publish(fill(source, 1))
    for number, worker in enumerate(crew):
        worker.call(work.attach, str(channel.handle), make, "auto", "cuda", number)
    follow(channel, source, crew, 2)
    channel.publish(fill(source, 3), worker_ids=[1])
    assert crew[0].call(work.look) == work.Look(2, "map", 2, 2)
    assert crew[1].call(work.look) == work.Look(3, "map", 3, 3)
