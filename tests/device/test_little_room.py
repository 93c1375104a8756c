"""Devices without room, calls that fail, and what must hold then: nobody's leased slot is written, nothing is mixed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shmsync
from shmsync import device
from shmsync.errors import DeviceError
from tests.device import remote
from tests.device.support import Policy, Reader, fill, policy, publish, push_on, values
from tests.fakes.torch_side import FakeTorch
from tests.helpers.processes import Peer

HOST = device.HOST
PLENTY = 1 << 40


def no_more_room(side: FakeTorch) -> None:
    side.fake.limit(0, side.fake.count("bytes"))


def shown(side: FakeTorch, module: Policy) -> set[int]:
    side.fake.drain()
    seen = module()
    side.fake.drain()
    return values(seen)


def test_a_worker_without_room_for_a_copy_writes_nobodys_slot(side, publisher, reader) -> None:
    """Its ring has no room for a slot more, so it has to copy, for which there is no room either. Mutant: say that a
    parameter is copied before it has memory of its own."""
    trainer = policy(side, HOST)
    channel = publisher(trainer)
    publish(side, channel, trainer, 1)
    one, other = reader(channel, 0), reader(channel, 0)
    publish(side, channel, trainer, 2)
    assert (one.forward(), other.forward()) == (2, 2)
    no_more_room(side)
    for version in (3, 4, 5):
        publish(side, channel, trainer, version)
        with pytest.raises(DeviceError, match="cudaMalloc"):
            one.forward()
    assert other.binding.version == 2
    side.fake.drain()
    assert not other.wrong()
    assert set(torch.cat([_flat(p) for p in other.module.parameters()]).tolist()) == {2}
    side.fake.limit(0, PLENTY)
    assert (one.forward(), other.forward()) == (5, 5)
    side.fake.drain()
    assert not one.wrong() + other.wrong()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.data.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def test_closing_without_room_can_be_done_again(side, publisher, reader) -> None:
    trainer = policy(side, 0)
    channel = publisher(trainer)
    publish(side, channel, trainer, 1)
    worker = reader(channel, 0)
    publish(side, channel, trainer, 2)
    worker.forward()
    no_more_room(side)
    with pytest.raises(DeviceError, match="cudaMalloc"):
        worker.subscriber.close()
    side.fake.limit(0, PLENTY)
    worker.subscriber.close()
    assert worker.subscriber._locks.fd == -1
    assert shown(side, worker.module) == {2}


def test_partial_pushes_go_on_where_the_ring_has_no_room(side, publisher, reader) -> None:
    trainer = policy(side, 0)
    channel = publisher(trainer)
    publish(side, channel, trainer, 1)
    worker = reader(channel, 0)
    push_on(side, channel, trainer, (2, 3), worker)
    late = reader(channel, HOST)
    late_version = late.forward()
    assert late_version == 3
    late.subscriber.close()
    publish(side, channel, trainer, 4)
    no_more_room(side)
    for version in (5, 6, 7, 8):
        publish(side, channel, trainer, version, "b")
    with shmsync.Subscriber(channel.handle) as follower, follower.lease() as lease:
        assert lease.version == 8
        found = {name: set(_flat(tensor).tolist()) for name, tensor in lease.weights.items()}
    assert found == {"a": {4}, "b": {8}, "c": {4}, "d": {4}}


@pytest.mark.parametrize("trained_on", [0, HOST])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_partial_push_that_failed_leaves_no_lie(side, publisher, reader, trained_on, nth) -> None:
    """What it did not copy must not count as copied. Mutant: stamp the leaves before the copies are done."""
    trainer = policy(side, trained_on)
    channel = publisher(trainer)
    publish(side, channel, trainer, 1)
    worker = reader(channel, 0)
    push_on(side, channel, trainer, (2, 3, 4), worker)
    publish(side, channel, trainer, 5, "b")
    worker.forward()
    worker.forwards.clear()
    side.fake.fail("cudaMemcpyBatchAsync", nth, 999)
    with contextlib.suppress(DeviceError):
        publish(side, channel, trainer, 6, "a")
    side.fake.fail_never()
    for version in (7, 8, 9):
        publish(side, channel, trainer, version, "a")
        worker.subscriber.refresh()
        side.fake.drain()
        found = {name: set(_flat(tensor).tolist()) for name, tensor in worker.module.named_parameters()}
        assert found == {"a": {version}, "b": {5}, "c": {4}, "d": {4}}


def test_one_error_does_not_end_a_ring(side, publisher, reader) -> None:
    trainer = policy(side, HOST)
    channel = publisher(trainer)
    publish(side, channel, trainer, 1)
    worker = reader(channel, 0)
    side.fake.fail("cudaStreamCreateWithFlags", 1, 999)
    publish(side, channel, trainer, 2)
    assert worker.forward() == 2
    for version in range(3, 70):
        publish(side, channel, trainer, version)
    assert (worker.forward(), worker.binding.mode) == (69, "map")


def test_a_publish_that_gets_no_thread_waits(side, publisher, reader, monkeypatch) -> None:
    trainer = policy(side, 0)
    channel = publisher(trainer)
    publish(side, channel, trainer, 1)

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        fill(side, trainer, 2)
        assert channel.publish(wait=False).version == 2
    assert channel.version == channel.wait() == 2


def test_forwards_within_hold_alone_let_their_slots_go(side, publisher, reader) -> None:
    trainer = policy(side, 0)
    channel = publisher(trainer, max_slots=3, timeout=5.0)
    publish(side, channel, trainer, 1)
    worker = reader(channel, 0)
    for version in (2, 3, 4):
        publish(side, channel, trainer, version)
        with worker.binding.hold():
            Policy.forward(worker.module)
    for version in (5, 6, 7):
        publish(side, channel, trainer, version)


def test_two_subscribers_of_a_process_open_a_slot_once(peer) -> None:
    trainer, worker = peer(), peer()
    for one in (trainer, worker):
        one.call(remote.begin, {})
    handle = trainer.call(remote.train, 0)
    trainer.call(remote.publish, 1)
    worker.call(_two_readers, handle)
    for version in (2, 3, 4):
        trainer.call(remote.publish, version)
        assert worker.call(_both) == [version, version]
    assert worker.call(_close_both) == ({}, [])
    assert trainer.call(remote.end_training) == ({}, [])


def _two_readers(state: Any, handle: str) -> None:
    state.readers = [Reader(state.side, handle, 0) for _ in range(2)]


def _both(state: Any) -> list[int]:
    found = [reader.forward() for reader in state.readers]
    state.side.fake.drain()
    assert not [text for reader in state.readers for text in reader.wrong()]
    assert all(reader.binding.mode == "map" for reader in state.readers)
    return found


def _close_both(state: Any) -> tuple[dict[str, int], list[str]]:
    state.reader = state.readers.pop()
    state.readers.pop().close()
    return remote.detach(state)


def test_a_dead_trainers_newest_slot_that_was_never_mapped_is_copied_from_the_host(peer) -> None:
    trainer, worker, other = peer(), peer(), peer()
    for one in (trainer, worker, other):
        one.call(remote.begin, {})
    handle = trainer.call(remote.train, HOST)
    trainer.call(remote.publish, 1)
    worker.call(remote.attach, handle, 0)
    trainer.call(remote.publish, 2)
    assert worker.call(remote.forward)[0] == 2
    other.call(remote.attach, handle, HOST)
    trainer.call(remote.publish, 3)
    trainer.kill()
    assert worker.call(remote.forward) == (3, {3}, "copy")
    worker.warnings.clear()
    for one in (worker, other):
        assert one.call(remote.detach) == ({}, [])


def test_an_open_that_fails_later_is_one_warning(peer: Callable[[], Peer]) -> None:
    trainer, worker = peer(), peer()
    trainer.call(remote.begin, {})
    worker.call(remote.begin, {"fail": "cudaIpcOpenMemHandle:2:2"})
    handle = trainer.call(remote.train, 0)
    trainer.call(remote.publish, 1)
    worker.call(remote.attach, handle, 0)
    for version in range(2, 8):
        trainer.call(remote.publish, version)
        used, seen, _ = worker.call(remote.forward)
        assert seen == {used}
        assert used >= version - 1  # the publisher learns only now that the host is needed
    assert used == version
    assert len(worker.warnings) == 1
    worker.warnings.clear()
    assert worker.call(remote.detach) == ({}, [])
    assert trainer.call(remote.end_training) == ({}, [])
