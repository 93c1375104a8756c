"""A process is killed in the middle; the others go on, and the device's memory comes back.

Mutants: a lease that is a counter in shared memory instead of a kernel lock; a refresh that waits for its publisher;
a reattach that leaves the old ring mapped.
"""

from __future__ import annotations

import functools
import time

import shmsync
from tests.gpu import work
from tests.gpu.modules import Watched, fill
from tests.gpu.steps import MIB, attach, eventually, follow, on_gpu, share, used

SLOT_NBYTES = 256 * MIB  # so that one that is left behind can't be overlooked
make = functools.partial(Watched, 32, SLOT_NBYTES // 32 // 4)


def test_a_worker_is_killed(publisher, workers, spare) -> None:
    """It was running forwards. The publisher goes on, takes no more slots, and another worker joins."""
    source, (witness, newcomer), victim = on_gpu(make), workers(2), spare()
    channel = publisher(source)
    share(channel, source, [witness, victim], make)
    victim.start(work.watch, 60.0, 200_000)
    push(channel, source, 30)
    victim.kill()
    push(channel, source, 3)  # whatever was leased at its death may make one of them take another slot
    before, in_use = channel.stats()["device_nbytes"], used()
    push(channel, source, 30)
    assert channel.stats()["device_nbytes"] <= before
    assert used() <= in_use + MIB
    attach(channel, [newcomer], make)
    follow(channel, source, [witness, newcomer], channel.version + 1)


def test_the_trainer_is_killed(workers, spare) -> None:
    """In the middle of a push. Workers neither hang nor crash, and go over to the next trainer, each in its way."""
    crew, in_use = workers(2), used()
    first, second = spare(), spare()
    handle = first.call(work.lead, make, timeout=60)
    first.call(work.push, 1)
    for worker in crew:
        worker.call(work.attach, handle, make)
    first.call(work.push, 2)
    assert [worker.call(work.look) for worker in crew] == [work.Look(2, "map", 2, 2)] * 2
    first.start(work.push_for, 30.0)
    for _ in range(5):
        assert [worker.call(work.refresh) >= 2 for worker in crew] == [True, True]
    first.kill()
    assert [worker.call(work.refresh, timeout=20) >= 2 for worker in crew] == [True, True]
    handle = second.call(work.lead, make)
    second.call(work.push, 1)
    crew[0].call(work.reattach, handle)
    crew[1].call(work.rebind, handle)
    second.call(work.push, 2)
    assert [worker.call(work.look) for worker in crew] == [work.Look(2, "map", 2, 2)] * 2
    for process in (*crew, second):
        process.call(work.reset)
    second.end()
    eventually(
        lambda: used() < in_use + SLOT_NBYTES // 2, f"the dead trainer's slots of {SLOT_NBYTES} bytes to be free"
    )


def push(channel: shmsync.Publisher, source: Watched, count: int) -> None:
    for _ in range(count):
        begin = time.monotonic()
        channel.publish(fill(source, channel.version + 1))
        assert time.monotonic() - begin < 10, "a push waits for a process that is dead"
