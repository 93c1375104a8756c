"""Every forward sees exactly one version, while the trainer pushes without pause and changes its weights at once.

Mutants: the row moved before the copies' end; a lease that ends with the forward's Python scope instead of its work on
the device; the trainer's stream not made to wait for the gather; the gather not made to wait for the trainer's stream.
"""

from __future__ import annotations

import time

import pytest
import torch

from tests.gpu import work
from tests.gpu.modules import Watched, fill
from tests.gpu.steps import follow, on_gpu, share

SECONDS = 3.0
# Of the device's clock, about 2 GHz: 0.1 ms in the middle of a forward, and a second.
A_MOMENT, A_SECOND = 200_000, 2_000_000_000


@pytest.mark.parametrize("own_stream", [False, True], ids=["default stream", "own stream"])
@pytest.mark.parametrize("wait", [True, False], ids=["wait", "no wait"])
def test_forwards_under_pushes(publisher, workers, wait: bool, own_stream: bool) -> None:
    source, crew = on_gpu(Watched), workers(2)
    channel = publisher(source)
    share(channel, source, crew)
    for worker, pause in zip(crew, (0, A_MOMENT), strict=True):
        worker.start(work.watch, SECONDS, pause)
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    torch.cuda.synchronize()
    last = push_until(channel, source, stream, wait, time.monotonic() + SECONDS)
    for worker in crew:
        seen = worker.result()
        versions = [version for version, _, _ in seen]
        assert [one for one in seen if not one[0] == one[1] == one[2]] == [], f"mixed forwards of {len(seen)}"
        assert versions == sorted(versions), "versions went back"
        assert len(set(versions)) > 20, "the worker saw too few versions to prove anything"
    follow(channel, source, crew, last + 1)


def push_until(channel, source: Watched, stream: torch.cuda.Stream, wait: bool, end: float) -> int:
    """Publish without pause, and spoil the weights right after each push; the last version."""
    version = channel.version
    with torch.cuda.stream(stream):
        while time.monotonic() < end:
            version += 1
            assert channel.publish(fill(source, version), wait=wait).version == version
            fill(source, -1)
    torch.cuda.synchronize()
    return version


@pytest.mark.parametrize("own_stream", [False, True], ids=["default stream", "own stream"])
def test_a_push_that_is_not_awaited_shows_when_it_is_complete(publisher, workers, own_stream: bool) -> None:
    source, [worker] = on_gpu(Watched), workers(1)
    channel = publisher(source)
    share(channel, source, [worker])
    follow(channel, source, [worker], 3)  # so that the slots are there
    ready = torch.cuda.Event()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream() if own_stream else torch.cuda.current_stream()):
        torch.cuda._sleep(A_SECOND)
        fill(source, 4)
        ready.record()
        begin = time.monotonic()
        assert channel.publish(wait=False).version == 4
        seconds = time.monotonic() - begin
        fill(source, -1)
        seen = worker.call(work.look)
        assert not ready.query(), "the device was not busy long enough to prove anything"
    assert seconds < 0.3
    assert seen == work.Look(3, "map", 3, 3)
    assert worker.call(work.wait, 4) == 4
    assert worker.call(work.look) == work.Look(4, "map", 4, 4)


def test_the_next_push_comes_after_one_that_was_not_awaited(publisher, workers) -> None:
    source, [worker] = on_gpu(Watched), workers(1)
    channel = publisher(source)
    share(channel, source, [worker])
    for version in range(3, 9):
        torch.cuda._sleep(A_MOMENT)
        channel.publish(fill(source, version), wait=False)
        fill(source, -1)
    follow(channel, source, [worker], 9)


def test_a_slot_is_held_until_the_device_has_read_it(publisher, workers) -> None:
    """A forward has come back in Python and rests half way on the device; its slot must not be written meanwhile."""
    source, [worker] = on_gpu(Watched), workers(1)
    channel = publisher(source)
    share(channel, source, [worker])
    follow(channel, source, [worker], 3)
    assert worker.call(work.begin_slowly, A_SECOND) == 3
    channel.publish(fill(source, 4))
    version, seconds = worker.call(work.refresh_timed)
    for later in range(5, 12):
        channel.publish(fill(source, later))
    assert not worker.call(work.slowly_done) or seconds > 0.2, "the forward was not slow enough to prove anything"
    assert version in (3, 4)  # it may switch under the forward, or later
    assert worker.call(work.slow_result) == (3, 3)
    assert worker.call(work.look) == work.Look(11, "map", 11, 11)
