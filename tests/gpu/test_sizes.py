"""Many leaves, small ones, and a policy of 10 GB: complete at every worker when publish returns.

Mutants: a gather that stops at its first table of pointers; 32-bit sizes or offsets in the copy.
"""

from __future__ import annotations

import functools

import pytest

from tests.gpu import work
from tests.gpu.modules import Watched, fill
from tests.gpu.steps import attach, fitting, follow, on_gpu, share


@pytest.mark.parametrize(("leaves", "numel"), [(200, 125_000), (2000, 12_500)], ids=["200x500KB", "2000x50KB"])
def test_many_leaves(publisher, workers, leaves: int, numel: int) -> None:
    make = functools.partial(Watched, leaves, numel)
    source, crew = on_gpu(make), workers(2)
    channel = publisher(source)
    share(channel, source, crew, make)
    for version in range(3, 8):
        follow(channel, source, crew, version)


def test_ten_gigabytes(publisher, workers, capsys) -> None:
    """Less where it doesn't fit: trainer, worker and three slots on the device, two on the host, if need be."""
    wanted, leaves = 10 * 10**9, 40
    size = fitting(wanted, on_device=5, on_host=3)
    if size < wanted:
        with capsys.disabled():
            print(f"\nexpected room for a policy of 10 GB, got {size / 1e9:.1f} GB: tested with that")
    make = functools.partial(Watched, leaves, size // leaves // 4)
    source, [worker] = on_gpu(make), workers(1)
    channel = publisher(source)
    # Before the first version: so that the worker's wish is there when it comes, and it need not pass by the host.
    attach(channel, [worker], make)
    channel.publish(fill(source, 1))
    seen = worker.call(work.look)
    assert (seen.version, seen.low, seen.high) == (1, 1, 1)
    for version in (2, 3):
        follow(channel, source, [worker], version)
