"""A CUDA graph that was captured over a module bound with mode="copy" shows each new version when it is replayed.

Mutants: mode="copy" that gives parameters new storage (the graph then reads what was there at its capture); a copy on
another stream than the current one.
"""

from __future__ import annotations

import torch

from tests.gpu import work
from tests.gpu.modules import Watched, fill
from tests.gpu.steps import attach, on_gpu


def test_replays_follow_the_channel(publisher, workers) -> None:
    source, [worker] = on_gpu(Watched), workers(1)
    channel = publisher(source)
    channel.publish(fill(source, 1))
    attach(channel, [worker], Watched, "copy")
    channel.publish(fill(source, 2))
    worker.call(work.capture)
    before = worker.call(work.addresses)
    for version in range(3, 20):
        channel.publish(fill(source, version), wait=version % 2 == 0)
        fill(source, -1)
        if version % 2:
            torch.cuda.synchronize()
            assert worker.call(work.wait, version) == version
        assert worker.call(work.replay) == work.Look(version, "copy", version, version)
    assert worker.call(work.addresses) == before
