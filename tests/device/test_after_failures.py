"""After a call that failed, or with streams that are far behind: leases, queues and wishes are as they should be."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

import pytest

from shmsync import device, sweep
from shmsync.errors import DeviceError
from tests.device.support import fill, policy, publish, push_on


@pytest.fixture
def far_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Events that nobody sees coming until the end of the test."""
    with monkeypatch.context() as patch:
        patch.setattr(device.Event, "done", lambda self: False)
        yield


@pytest.mark.parametrize("call", ["cudaEventCreateWithFlags", "cudaEventRecord", "cudaStreamWaitEvent"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_parameters_are_never_on_a_slot_without_a_lease(side, publisher, reader, call, nth) -> None:
    """Whatever fails in a switch. Mutant: let what is recorded after the parameters were pointed raise."""
    trainer = policy(side, 0)
    channel = publisher(trainer)
    publish(side, channel, trainer, 1)
    worker = reader(channel, 0)
    push_on(side, channel, trainer, (2, 3), worker)
    publish(side, channel, trainer, 4)
    side.fake.fail(call, nth, 999)
    with contextlib.suppress(DeviceError):
        worker.forward()
    side.fake.fail_never()
    for version in range(5, 12):
        publish(side, channel, trainer, version)
    side.fake.drain()
    shown = {byte for tensor in worker.module.parameters() for byte in tensor.data.flatten().view(-1).tolist()}
    assert len(shown) <= 2  # one value per dtype
    worker.forward()
    side.fake.drain()
    assert not worker.wrong()


def test_one_entry_waits_in_the_sweeps_queue(side, publisher, reader, far_behind) -> None:
    trainer = policy(side, 0)
    channel = publisher(trainer)
    publish(side, channel, trainer, 1)
    worker = reader(channel, 0)
    push_on(side, channel, trainer, (2, 3), worker)
    assert worker.subscriber._passing
    for _ in range(300):
        worker.module()
        with worker.binding.hold():
            pass
    assert sweep._sweeper._due.qsize() < 10


def test_a_first_publish_that_gets_no_thread_is_whole(side, publisher, monkeypatch) -> None:
    trainer = policy(side, 0)
    channel = publisher(trainer)

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        for version in (1, 2):
            fill(side, trainer, version)
            assert channel.publish(wait=version == 2).version == version
    assert channel.version == 2
    publish(side, channel, trainer, 3)
    assert channel._serving is not None


def test_an_unbound_module_wishes_for_nothing(side, publisher, reader) -> None:
    trainer = policy(side, device.HOST)
    channel = publisher(trainer)
    publish(side, channel, trainer, 1)
    worker = reader(channel, 0)
    push_on(side, channel, trainer, range(2, 6), worker)
    worker.binding.unbind()
    assert worker.subscriber._wishing.said == ([], True)
    for version in range(6, 80):
        publish(side, channel, trainer, version)
        worker.subscriber.let_pass()
    assert channel.stats()["device_nbytes"] == 0
    assert worker.subscriber.stats()["device_slots_mapped"] == 0
    worker.forwards.clear()


def test_a_child_lets_its_parents_passing_leases_go(side, publisher, reader, far_behind) -> None:
    trainer = policy(side, 0)
    channel = publisher(trainer)
    publish(side, channel, trainer, 1)
    worker = reader(channel, 0)
    push_on(side, channel, trainer, (2, 3), worker)
    counts = worker.subscriber._data.holder.counts
    held = len(counts)
    assert held > 1
    answer, told = os.pipe()
    child = os.fork()
    if not child:
        os.write(told, str(len(worker.subscriber._data.holder.counts)).encode())
        os._exit(0)
    assert os.read(answer, 9) == b"1"
    os.waitpid(child, 0)
    os.close(answer)
    os.close(told)
    assert len(counts) == held


def test_all_streams_are_waited_for_though_one_fails(side, publisher, reader, monkeypatch) -> None:
    """Or the slot would be unlocked with copies into it still queued."""
    trainer = policy(side, device.HOST)
    channel = publisher(trainer)
    publish(side, channel, trainer, 1)
    readers = [reader(channel, index) for index in (0, 1)]
    for version in (2, 3):
        publish(side, channel, trainer, version)
        for one in readers:
            one.forward()
    waited, real = [], device.Stream.synchronize

    def synchronize(self: device.Stream) -> None:
        waited.append(self.index)
        real(self)
        if self.index == min(channel._store.rings._streams):
            raise DeviceError("this one")

    with monkeypatch.context() as patch:
        patch.setattr(device.Stream, "synchronize", synchronize)
        fill(side, trainer, 4)
        with pytest.raises(DeviceError, match="this one"):
            channel.publish()
    assert set(waited) == {0, 1}
    publish(side, channel, trainer, 5)
    for one in readers:
        assert one.forward() == 5
    side.fake.drain()
    assert not [text for one in readers for text in one.wrong()]
