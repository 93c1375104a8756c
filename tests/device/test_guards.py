"""Guards that chance rarely needs: each case is made, once as it is and once with the guard off."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import shmsync
from shmsync import device, imports, ringtable
from shmsync import subscriber as subscribers
from tests.device.support import Reader, fill, policy
from tests.fakes.torch_side import FakeTorch

GUARD_ON_AND_OFF = pytest.mark.parametrize("guarded", [True, False], ids=["as it is", "guard off"])


@pytest.fixture
def reader(side: FakeTorch, publisher: object) -> Iterator[Callable[..., Reader]]:
    made: list[Reader] = []

    def make(of: shmsync.Publisher, index: int) -> Reader:
        made.append(Reader(side, of.handle, index))
        return made[-1]

    yield make
    while made:
        made.pop().close()


@GUARD_ON_AND_OFF
def test_a_lease_ends_when_the_streams_have_passed(side, publisher, reader, monkeypatch, guarded) -> None:
    """A long queue of forwards on a slot, which is left and then would be free to be written."""
    if not guarded:
        monkeypatch.setattr(subscribers, "_has_passed", lambda event, wait: True)
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
