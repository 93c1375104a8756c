"""Trainer and worker on different sides of the bus, and a trainer that has no GPU at all.

Mutants: a copy to the host that is not waited for before the row moves; a wish that a publisher without CUDA takes for
an error; mode="copy" that gives parameters new storage.
"""

from __future__ import annotations

import pytest

from tests.gpu import work
from tests.gpu.modules import Watched, fill
from tests.gpu.steps import attach, follow, on_gpu


def test_trainer_on_the_gpu_worker_on_the_cpu(publisher, on_host) -> None:
    """The host's slots are mapped as ever, and no device ring is made for nobody."""
    source = on_gpu(Watched)
    channel = publisher(source)
    channel.publish(fill(source, 1))
    on_host.call(work.attach, str(channel.handle), Watched, "auto", "cpu")
    for version in range(2, 12):
        follow(channel, source, [on_host], version)
    assert (channel.stats()["rings"], channel.stats()["device_nbytes"]) == (0, 0)


def test_trainer_on_the_cpu_worker_on_the_gpu(publisher, workers) -> None:
    source, [worker] = Watched(), workers(1)
    channel = publisher(source)
    channel.publish(fill(source, 1))
    attach(channel, [worker], Watched)
    for version in range(2, 12):
        follow(channel, source, [worker], version)
    assert channel.stats()["rings"] == 1


def test_a_trainer_that_sees_no_gpu(workers, blind) -> None:
    """It can't make a ring: the worker copies every version from the host."""
    [worker] = workers(1)
    handle = blind.call(work.lead, Watched, "cpu")
    blind.call(work.push, 1)
    worker.call(work.attach, handle, Watched)
    for version in range(2, 6):
        blind.call(work.push, version)
        assert worker.call(work.look) == work.Look(version, "copy", version, version)
    for process in (worker, blind):
        fallbacks = [warning for warning in process.warnings if warning.startswith("RuntimeWarning")]
        assert len(fallbacks) <= 1, "One warning says why; the next versions come without"
        process.warnings.clear()


@pytest.mark.parametrize("side", ["cuda", "cpu"])
def test_copies_keep_the_parameters_storage(publisher, workers, side: str) -> None:
    source, [worker] = on_gpu(Watched, side), workers(1)
    channel = publisher(source)
    channel.publish(fill(source, 1))
    assert attach(channel, [worker], Watched, "copy") == [("copy", 1)]
    before = worker.call(work.addresses)
    for version in range(2, 8):
        follow(channel, source, [worker], version, "copy")
    assert worker.call(work.addresses) == before
