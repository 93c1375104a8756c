"""Guards that chance rarely needs: each case is made, once as it is and once with the guard off."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from shmsync import device, imports, passing, ringtable
from tests.device.support import Reader, fill, policy, publish, values

GUARD_ON_AND_OFF = pytest.mark.parametrize("guarded", [True, False], ids=["as it is", "guard off"])


@GUARD_ON_AND_OFF
def test_a_lease_ends_when_the_streams_have_passed(side, publisher, reader, monkeypatch, guarded) -> None:
    """A long queue of forwards on a slot, which is left and then would be free to be written."""
    if not guarded:
        monkeypatch.setattr(passing, "_has_come", lambda event, wait: True)
    trainer = policy(side, 0)
    channel = publisher(trainer)
    for version in (1, 2):
        fill(side, trainer, version)
        channel.publish()
        if version == 1:
            worker = reader(channel, 0)
    stream = device.Stream(0)  # not the trainer's
    with side.on(0, stream.handle):
        for _ in range(60):
            assert worker.forward() == 2
    for version in (3, 4, 5):
        fill(side, trainer, version)
        channel.publish()
        with side.on(0, stream.handle):
            worker.forward()
    side.fake.drain()
    assert bool(worker.wrong()) != guarded


class _AlwaysThere(ringtable.RingSlots):
    def version(self, slot: int) -> int:
        return _Any()


class _Any(int):
    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


@GUARD_ON_AND_OFF
def test_a_ring_that_holds_another_version_is_not_read(side, publisher, reader, monkeypatch, guarded) -> None:
    """Its readers have left, and pushes have gone to the host alone."""
    if not guarded:
        monkeypatch.setattr(imports, "RingSlots", _AlwaysThere)
    trainer = policy(side, device.HOST)
    channel = publisher(trainer)
    fill(side, trainer, 1)
    channel.publish()
    first = reader(channel, 0)
    for version in (2, 3, 4):
        fill(side, trainer, version)
        channel.publish()
        first.forward()
    monkeypatch.setattr(channel._store.rings, "reclaim", lambda live: None)  # its slots are mapped elsewhere too, say
    first.close()
    for version in (5, 6, 7):
        fill(side, trainer, version)
        channel.publish()
    with channel._mutex:  # nothing is brought meanwhile
        second = reader(channel, 0)
        second.forward()
    side.fake.drain()
    assert bool(second.wrong()) != guarded


@pytest.mark.parametrize("moved_from", [device.HOST, 1])
def test_a_module_that_was_moved_to_a_device_is_read_in_the_order_of_its_streams(
    side, publisher, reader, moved_from
) -> None:
    """Mutant: look after the devices that it was on when it was bound."""
    trainer = policy(side, 0)
    channel = publisher(trainer)
    publish(side, channel, trainer, 1)
    worker = reader(channel, moved_from)
    side.to_device(worker.module, 0)
    stream = device.Stream(0)
    for version in (2, 3, 4):
        publish(side, channel, trainer, version)
    for version in (5, 6, 7, 8):
        with side.on(0, stream.handle):
            for _ in range(40):
                worker.forward()
        publish(side, channel, trainer, version)
        with side.on(0, stream.handle):
            worker.forward()
    side.fake.drain()
    assert not worker.wrong()


def test_a_forward_within_another_may_be_on_another_stream(side, publisher, reader) -> None:
    """Mutant: count the outermost one's stream alone."""
    trainer = policy(side, 0)
    channel = publisher(trainer)
    publish(side, channel, trainer, 1)
    worker = reader(channel, 0)
    publish(side, channel, trainer, 2)
    stream = device.Stream(0)
    for version in (3, 4, 5, 6):
        with worker.binding.hold() as used, side.on(0, stream.handle):
            for _ in range(60):
                worker.forwards.append((used, worker.module()))
        publish(side, channel, trainer, version)
    with worker.binding.hold():
        pass
    publish(side, channel, trainer, 7)
    side.fake.drain()
    assert not worker.wrong()


@pytest.mark.parametrize("mode", ["auto", "copy"])
def test_forwards_before_the_first_version_are_not_written_into(side, publisher, mode) -> None:
    """Nobody has noted their streams: the layout was not known. Mutant: begin to look after them with the switch."""
    trainer = policy(side, 0)
    channel = publisher()
    worker = Reader(side, channel.handle, 0, mode)
    fill(side, worker.module, 99)
    side.fake.drain()
    stream = device.Stream(0)
    with side.on(0, stream.handle):
        for _ in range(10):
            worker.forward()
    publish(side, channel, trainer, 1)
    worker.subscriber.refresh()
    side.fake.drain()
    assert {byte for version, seen in worker.forwards if not version for byte in values(seen)} == {99}
    worker.forwards.clear()
    assert worker.forward() == 1
    side.fake.drain()
    assert not worker.wrong()
    worker.close()


class _Called(Exception):
    pass


@pytest.mark.parametrize("handle", [0, 7])
def test_torchs_default_stream_is_not_wrapped(side, monkeypatch, handle) -> None:
    """Of the handle 0, which is that of the default stream, torch makes another stream."""
    real = device.Torch()

    def wrapped(stream: int, **_: object) -> object:
        raise _Called(stream)

    monkeypatch.setattr(torch.cuda, "ExternalStream", wrapped)
    monkeypatch.setattr(real, "stream", lambda index: handle)
    monkeypatch.setattr(real, "current", lambda index: nullcontext())
    into, out_of = torch.zeros(3), torch.ones(3)
    real.copy(0, handle, [into], [out_of])
    assert torch.equal(into, out_of)
    with pytest.raises(_Called):
        real.copy(0, 5, [into], [out_of])
