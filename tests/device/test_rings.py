"""Rings: who is served where, by mapping or by copying, with which bytes."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn

import shmsync
from shmsync import device
from shmsync.errors import BindingError, DeviceError
from tests.device.support import Policy, Reader, fill, policy, push_on, values
from tests.fakes.torch_side import FakeTorch

HOST = device.HOST


def publish(side: FakeTorch, channel: shmsync.Publisher, module: nn.Module, version: int) -> None:
    fill(side, module, version)
    assert channel.publish(module).version == version


def check(side: FakeTorch, *readers: Reader) -> None:
    side.fake.drain()
    for one in readers:
        assert not one.wrong()


def test_the_first_versions_come_by_copy_and_from_the_next_push_on_by_mapping(side, publisher, reader) -> None:
    trainer = policy(side, HOST)
    channel = publisher(trainer)
    publish(side, channel, trainer, 1)
    worker = reader(channel, 0)
    assert (worker.forward(), worker.binding.mode) == (1, "copy")
    addresses = [tensor.data_ptr() for tensor in worker.module.parameters()]
    publish(side, channel, trainer, 2)
    assert (worker.forward(), worker.binding.mode) == (2, "map")
    assert worker.subscriber.stats()["device_slots_mapped"] == 1
    assert [tensor.data_ptr() for tensor in worker.module.parameters()] != addresses
    assert channel.stats()["rings"] == 1
    check(side, worker)


def test_what_all_read_on_devices_is_not_brought_to_the_host(side, publisher, reader) -> None:
    trainer = policy(side, 0)
    channel = publisher(trainer)
    publish(side, channel, trainer, 1)
    worker = reader(channel, 0)
    push_on(side, channel, trainer, range(2, 8), worker)
    data = worker.subscriber._data
    newest = shmsync.slots.slot_of(data.newest())
    assert data.on_host(newest) == 0
    check(side, worker)


@pytest.mark.parametrize("late", [HOST, 1, 0])
def test_a_late_comer_gets_what_was_published_on_devices_only(side, publisher, reader, late) -> None:
    """With no push after it: the publisher brings it there."""
    trainer = policy(side, 0)
    channel = publisher(trainer)
    publish(side, channel, trainer, 1)
    first = reader(channel, 0)
    for version in range(2, 6):
        publish(side, channel, trainer, version)
        first.forward()
    second = reader(channel, late)
    assert second.forward() == 5
    check(side, first, second)


def test_a_lease_brings_the_version_to_the_host(side, publisher, reader) -> None:
    trainer = policy(side, 0)
    channel = publisher(trainer)
    publish(side, channel, trainer, 1)
    worker = reader(channel, 0)
    push_on(side, channel, trainer, range(2, 6), worker)
    with worker.subscriber.lease() as lease:
        assert lease.version == 5
        assert set(lease.weights["a"].view(torch.uint8).tolist()) == {5}
    check(side, worker)


@pytest.mark.parametrize("trained_on", [HOST, 0, 1])
def test_readers_in_all_memories_at_once(side, publisher, reader, trained_on) -> None:
    trainer = policy(side, trained_on)
    channel = publisher(trainer)
    publish(side, channel, trainer, 1)
    readers = [reader(channel, index, mode) for index in (HOST, 0, 1) for mode in ("auto", "copy")]
    for version in range(2, 7):
        publish(side, channel, trainer, version)
        assert {one.forward() for one in readers} == {version}
    assert [one.binding.mode for one in readers] == ["map", "copy"] * 3
    check(side, *readers)


def test_a_policy_spread_over_memories_binds_each_leaf_on_its_own(side, publisher, reader) -> None:
    def spread(module: Policy) -> Policy:
        for name, index in (("a", 0), ("b", 1)):
            parameter = getattr(module, name)
            moved = side.zeros(parameter.data, index)
            moved.copy_(parameter.data)
            parameter.data = moved
        return module

    trainer = spread(Policy())
    channel = publisher(trainer)
    publish(side, channel, trainer, 1)
    subscriber = shmsync.Subscriber(channel.handle)
    worker = spread(Policy())
    binding = subscriber.bind(worker)
    for version in range(2, 5):
        publish(side, channel, trainer, version)
        subscriber.refresh()
        side.fake.drain()
        assert binding.version == version
        assert [side.memory_of(tensor) for tensor in worker.parameters()] == [0, 1, HOST, HOST]
        for tensor in worker.parameters():
            assert set(tensor.data.as_strided((tensor.numel(),), (1,)).view(torch.uint8).tolist()) == {version}
    assert subscriber.stats()["device_slots_mapped"] >= 2
    subscriber.close()


def test_partial_pushes_from_a_device(side, publisher, reader) -> None:
    trainer = policy(side, 0)
    channel = publisher(trainer)
    publish(side, channel, trainer, 1)
    readers = [reader(channel, index) for index in (0, 1, HOST)]
    publish(side, channel, trainer, 2)
    for version in range(3, 9):
        fill(side, trainer, version, ["b"])
        done = channel.publish({"b": trainer.b}, partial=True)
        assert done.version == version
        for one in readers:
            one.forward()
        side.fake.drain()
        for one in readers:
            _, seen = one.forwards.pop()
            assert values(seen) == {2, version}
    if readers[0].binding.mode != "map":
        pytest.fail("the reader on the device does not map")


def test_a_partial_push_after_the_host_was_left_out(side, publisher, reader) -> None:
    trainer = policy(side, 0)
    channel = publisher(trainer)
    publish(side, channel, trainer, 1)
    worker = reader(channel, 0)
    push_on(side, channel, trainer, range(2, 6), worker)
    late = reader(channel, HOST)
    fill(side, trainer, 6, ["a", "c"])
    channel.publish({"a": trainer.a, "c": trainer.c}, partial=True)
    late.forward()
    worker.forward()
    side.fake.drain()
    for one in (late, worker):
        assert values(one.forwards.pop()[1]) == {5, 6}


def test_buffers_are_copied_to_the_device_at_a_switch(side, publisher) -> None:
    def model() -> nn.Module:
        module = nn.BatchNorm1d(8)
        return side.to_device(module, 0)

    trainer, worker = model(), model()
    channel = publisher(trainer)
    channel.publish()
    subscriber = shmsync.Subscriber(channel.handle)
    binding = subscriber.bind(worker)
    for number in range(1, 4):
        trainer.running_mean.fill_(number)
        trainer.num_batches_tracked.fill_(number)
        channel.publish()
        subscriber.refresh()
        side.fake.drain()
        assert worker.running_mean.tolist() == [number] * 8
        assert worker.num_batches_tracked.item() == number
    assert binding.mode == "map"
    subscriber.close()


def test_a_channel_that_casts(side, publisher) -> None:
    trainer = side.to_device(nn.Linear(7, 5), 0)
    channel = publisher(trainer, dtype=torch.bfloat16)
    channel.publish()
    subscriber = shmsync.Subscriber(channel.handle)
    worker = side.to_device(nn.Linear(7, 5).bfloat16(), 0)
    binding = subscriber.bind(worker)
    channel.publish()
    subscriber.refresh()
    side.fake.drain()
    assert binding.mode == "map"
    assert torch.equal(worker.weight, trainer.weight.bfloat16())
    subscriber.close()


def test_without_waiting_the_version_shows_when_the_copies_are_done(side, publisher, reader) -> None:
    trainer = policy(side, 0)
    channel = publisher(trainer)
    publish(side, channel, trainer, 1)
    worker = reader(channel, 0)
    for version in range(2, 6):
        fill(side, trainer, version)
        assert channel.publish(wait=False).version == version
        fill(side, trainer, 250)  # on the trainer's stream, and so behind the copy
        worker.forward()
    assert channel.wait() == 5
    assert worker.forward() == 5
    check(side, worker)


def test_what_went_wrong_without_waiting_is_raised_by_the_next_call(side, publisher, reader) -> None:
    trainer = policy(side, 0)
    channel = publisher(trainer)
    publish(side, channel, trainer, 1)
    worker = reader(channel, 0)
    fill(side, trainer, 2)
    side.fake.fail_always("cudaStreamSynchronize", 719)
    channel.publish(wait=False)
    with pytest.raises(DeviceError, match="version does not show: .*cudaStreamSynchronize"):
        channel.wait()
    side.fake.fail_never()
    assert worker.forward() == 1
    fill(side, trainer, 3)
    assert channel.publish().version == 3
    assert worker.forward() == 3
    check(side, worker)


def test_slots_come_back_on_devices_too(side, publisher, reader) -> None:
    """A burst of slow readers lets the rings grow; long after it they are small again."""
    trainer = policy(side, 0)
    channel = publisher(trainer)
    publish(side, channel, trainer, 1)
    readers = [reader(channel, 0) for _ in range(5)]
    for version in range(2, 12):
        publish(side, channel, trainer, version)
        readers[version % 5].forward()
    grown = channel.stats()["device_nbytes"]
    for version in range(12, 200):
        publish(side, channel, trainer, version)
        for one in readers:
            one.forward()
        if version % 50 == 0:
            check(side, *readers)
    small = channel.stats()
    assert small["device_nbytes"] < grown
    check(side, *readers)


def test_a_ring_that_nobody_wishes_for_any_more_is_given_back(side, publisher, reader) -> None:
    trainer = policy(side, HOST)
    channel = publisher(trainer)
    publish(side, channel, trainer, 1)
    worker = reader(channel, 0)
    publish(side, channel, trainer, 2)
    worker.forward()
    assert channel.stats()["device_nbytes"] > 0
    worker.close()
    for version in range(3, 70):
        publish(side, channel, trainer, version)
    assert channel.stats()["device_nbytes"] == 0


def test_memory_that_is_still_mapped_outlives_the_publisher(side, publisher, reader) -> None:
    trainer = policy(side, HOST)
    channel = publisher(trainer)
    publish(side, channel, trainer, 1)
    worker = reader(channel, 0)
    publish(side, channel, trainer, 2)
    worker.forward()
    channel.close()
    before = side.fake.count("bytes")
    assert worker.forward() == 2
    check(side, worker)
    worker.close()
    with shmsync.Publisher(trainer):  # any other channel of the process sees to it
        shmsync.rings.sweep_parked()
    assert side.fake.count("bytes") < before


def test_an_explicit_map_that_cannot_be_is_an_error(side, publisher, monkeypatch) -> None:
    channel = publisher(policy(side, 0))
    channel.publish()
    subscriber = shmsync.Subscriber(channel.handle)
    monkeypatch.setattr(device.runtime, "reason", lambda: "nothing here")
    with pytest.raises(BindingError, match="cuda:0 can't be mapped: nothing here"):
        subscriber.bind(policy(side, 0), mode="map")
    subscriber.close()


def test_without_a_runtime_it_is_copied_with_one_warning(side, publisher, monkeypatch, caplog) -> None:
    trainer = policy(side, 0)
    channel = publisher(trainer)
    monkeypatch.setattr(device, "reason", lambda: "nothing here")
    fill(side, trainer, 1)
    side.fake.drain()
    channel.publish()
    with shmsync.Subscriber(channel.handle) as subscriber:
        module = policy(side, 0)
        with pytest.warns(RuntimeWarning, match="copies them from the host at each version: nothing here"):
            binding = subscriber.bind(module)
        for version in (2, 3):  # another warning would be an error
            fill(side, trainer, version)
            side.fake.drain()
            channel.publish()
            subscriber.refresh()
            assert (binding.version, binding.mode) == (version, "copy")
            seen = Policy.forward(module)
            side.fake.drain()
            assert values(seen) == {version}
    assert sum("one by one: nothing here" in record.getMessage() for record in caplog.records) == 1


def test_closing_leaves_the_module_with_its_values_on_its_device(side, publisher, reader) -> None:
    trainer = policy(side, 0)
    channel = publisher(trainer)
    publish(side, channel, trainer, 1)
    worker = reader(channel, 0)
    publish(side, channel, trainer, 2)
    worker.forward()
    module = worker.module
    check(side, worker)
    worker.close()
    channel.close()
    assert [side.memory_of(tensor) for tensor in module.parameters()] == [0] * 4
    seen = module()
    side.fake.drain()
    assert values(seen) == {2}


def test_forwards_on_several_threads_and_streams(side, publisher, reader) -> None:
    trainer = policy(side, 0)
    channel = publisher(trainer)
    publish(side, channel, trainer, 1)
    worker = reader(channel, 0)
    streams = [device.Stream(0) for _ in range(3)]
    stop = threading.Event()
    errors: list[BaseException] = []

    def run(stream: device.Stream) -> None:
        try:
            with side.on(0, stream.handle):
                while not stop.is_set():
                    worker.forward()
                    time.sleep(0)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(stream,)) for stream in streams]
    for thread in threads:
        thread.start()
    for version in range(2, 40):
        publish(side, channel, trainer, version)
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors
    side.fake.drain()
    mixed = [(v, values(seen)) for v, seen in worker.forwards if values(seen) != {v}]
    assert not mixed
    worker.forwards.clear()


@pytest.mark.parametrize("kind", ["asked for", "compiled"])
def test_what_may_be_in_a_graph_keeps_its_addresses(side, publisher, kind) -> None:
    """And is copied from the ring on its device: no other bytes go there."""
    trainer = policy(side, 0)
    channel = publisher(trainer)
    publish(side, channel, trainer, 1)
    module = policy(side, 0)
    if kind == "compiled":
        module.compile(backend="eager")
    addresses = [tensor.data_ptr() for tensor in module.parameters()]
    subscriber = shmsync.Subscriber(channel.handle)
    binding = subscriber.bind(module, mode="copy" if kind == "asked for" else "auto")
    for version in range(2, 6):
        publish(side, channel, trainer, version)
        subscriber.refresh()
        assert (binding.version, binding.mode) == (version, "copy")
        assert [tensor.data_ptr() for tensor in module.parameters()] == addresses
        seen = Policy.forward(module)
        side.fake.drain()
        assert values(seen) == {version}
    assert subscriber.stats()["device_slots_mapped"] > 0
    subscriber.close()


def test_another_thread_does_not_switch_what_may_be_in_a_graph(side, publisher) -> None:
    """It may be captured just then. Mutant: let `follow` switch whatever it is."""
    trainer = policy(side, 0)
    channel = publisher(trainer)
    publish(side, channel, trainer, 1)
    modules = {compiled: policy(side, 0) for compiled in (False, True)}
    modules[True].compile(backend="eager")
    with shmsync.Subscriber(channel.handle) as subscriber:
        bindings = {compiled: subscriber.bind(module) for compiled, module in modules.items()}
        publish(side, channel, trainer, 2)
        assert {compiled: binding.follow() for compiled, binding in bindings.items()} == {False: 2, True: 1}
        assert {binding.refresh() for binding in bindings.values()} == {2}


def test_a_forward_that_is_captured_in_a_graph_switches_nothing(side, publisher, reader) -> None:
    trainer = policy(side, 0)
    channel = publisher(trainer)
    publish(side, channel, trainer, 1)
    worker = reader(channel, 0, "copy")
    publish(side, channel, trainer, 2)
    with side.capture():
        assert worker.forward() == 1
    worker.forwards.clear()  # the fake has run it
    assert worker.forward() == 2
    check(side, worker)
