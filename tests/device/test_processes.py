"""Rings between real processes: mapping by IPC handles, deaths on both sides, other numbers for the same device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from shmsync import device
from tests.device import remote
from tests.helpers.processes import Peer

HOST = device.HOST
Start = Callable[..., Peer]


@pytest.fixture
def process(peer: Callable[[], Peer]) -> Start:
    """Starts a process that sees these devices, in this order."""

    def start(devices: str = "0,1", **options: Any) -> Peer:
        made = peer()
        made.call(remote.begin, {"devices": devices, **options})
        return made

    return start


def test_workers_map_the_trainers_memory(process: Start) -> None:
    trainer, *workers = (process(seed=number) for number in range(4))
    handle = trainer.call(remote.train, 0)
    trainer.call(remote.publish, 1)
    for worker, index in zip(workers, (0, 0, HOST), strict=True):
        assert worker.call(remote.attach, handle, index) == 1
    for version in range(2, 7):
        stats = trainer.call(remote.publish, version, version % 2 == 0)
        for worker in workers:
            assert worker.call(remote.forward) == (version, {version}, "map")
    assert workers[0].call(remote.counts)["opens"] == workers[0].call(remote.stats)["device_slots_mapped"] > 0
    assert stats["device_nbytes"] <= 4 * (2 << 20)  # blocks of the runtime's
    for worker in workers:
        assert worker.call(remote.detach) == ({}, [])
    assert trainer.call(remote.end_training) == ({}, [])


def test_devices_are_known_by_their_uuid(process: Start) -> None:
    """CUDA_VISIBLE_DEVICES gives them other numbers in every process."""
    trainer, worker = process("0,1"), process("1")
    handle = trainer.call(remote.train, 0)
    trainer.call(remote.publish, 1)
    worker.call(remote.attach, handle, 0)  # its device 0 is the trainer's device 1
    trainer.call(remote.publish, 2)
    assert worker.call(remote.forward) == (2, {2}, "map")
    assert worker.call(remote.detach) == ({}, [])
    assert trainer.call(remote.end_training) == ({}, [])


def test_a_device_that_the_trainer_does_not_see_is_copied_to(process: Start) -> None:
    trainer, worker = process("0"), process("0,1")
    handle = trainer.call(remote.train, 0)
    trainer.call(remote.publish, 1)
    worker.call(remote.attach, handle, 1)
    for version in (2, 3):
        trainer.call(remote.publish, version)
        assert worker.call(remote.forward) == (version, {version}, "copy")
    assert worker.call(remote.detach) == ({}, [])
    assert trainer.call(remote.end_training) == ({}, [])


def test_where_ipc_is_refused_one_warning_says_so_and_it_is_copied(process: Start) -> None:
    trainer, worker = process(), process(fail="cudaIpcOpenMemHandle:*:801")
    handle = trainer.call(remote.train, 0)
    trainer.call(remote.publish, 1)
    worker.call(remote.attach, handle, 0)
    for version in (2, 3, 4):
        trainer.call(remote.publish, version)
        assert worker.call(remote.forward) == (version, {version}, "copy")
    assert len(worker.warnings) == 1
    warning = worker.warnings.pop()
    assert "cudaIpcOpenMemHandle" in warning
    assert "docker: --pid=host" in warning
    assert f"pid {trainer.pid}" in warning
    assert worker.call(remote.detach) == ({}, [])
    assert trainer.call(remote.end_training) == ({}, [])


def test_a_worker_on_the_host_makes_no_context(process: Start) -> None:
    trainer, worker = process(), process()
    handle = trainer.call(remote.train, 0)
    trainer.call(remote.publish, 1)
    worker.call(remote.attach, handle, HOST)
    trainer.call(remote.publish, 2)
    assert worker.call(remote.forward)[:2] == (2, {2})
    assert worker.call(remote.host_context) == (0, True)
    worker.call(remote.detach)
    trainer.call(remote.end_training)


@pytest.mark.parametrize("trained_on", [0, HOST])
def test_forwards_under_continuous_pushes(process: Start, trained_on: int) -> None:
    trainer, *workers = (process(seed=number) for number in range(4))
    handle = trainer.call(remote.train, trained_on)
    trainer.call(remote.publish, 1)
    for worker, index in zip(workers, (0, 1, HOST), strict=True):
        worker.call(remote.attach, handle, index)
        worker.start(remote.read, 60.0)
    trainer.start(remote.publish_until_told, 2)
    time.sleep(2.5)
    trainer.tell("enough")
    last = trainer.result()
    for worker in workers:
        worker.tell("enough")
        forwards, versions, wrong = worker.result()
        assert not wrong
        assert forwards > 20
        assert versions > 3
        assert worker.call(remote.forward)[:2] == (last, {last})
        assert worker.call(remote.detach) == ({}, [])
    assert trainer.call(remote.end_training) == ({}, [])


def test_a_killed_worker_costs_nothing(process: Start) -> None:
    trainer, first, second = process(), process(), process()
    handle = trainer.call(remote.train, 0)
    trainer.call(remote.publish, 1)
    first.call(remote.attach, handle, 0)
    second.call(remote.attach, handle, 0)
    for version in range(2, 5):
        before = trainer.call(remote.publish, version)["device_nbytes"]
        first.call(remote.forward)
        second.call(remote.forward)
    first.kill()
    for version in range(5, 12):
        after = trainer.call(remote.publish, version)["device_nbytes"]
        assert second.call(remote.forward) == (version, {version}, "map")
    assert after <= before
    assert second.call(remote.detach) == ({}, [])
    assert trainer.call(remote.end_training) == ({}, [])


def test_a_killed_trainer_leaves_its_workers_alive(process: Start) -> None:
    """And a trainer that is started anew takes them over."""
    trainer, worker, next_trainer = process(), process(), process()
    handle = trainer.call(remote.train, 0)
    trainer.call(remote.publish, 1)
    worker.call(remote.attach, handle, 0)
    trainer.call(remote.publish, 2)
    assert worker.call(remote.forward) == (2, {2}, "map")
    trainer.kill()
    assert worker.call(remote.forward) == (2, {2}, "map")
    handle = next_trainer.call(remote.train, 0)
    next_trainer.call(remote.publish, 3)
    worker.call(_reattach, handle)
    next_trainer.call(remote.publish, 4)  # the second version of its channel
    assert worker.call(remote.forward) == (2, {4}, "map")
    assert worker.call(remote.detach) == ({}, [])
    assert next_trainer.call(remote.end_training) == ({}, [])


def _reattach(state: Any, handle: str) -> None:
    state.reader.subscriber.reattach(handle)


@pytest.mark.parametrize(
    ("rule", "who", "violation"),
    [
        ("a slot is opened once", "worker", "opened twice"),
        ("mapped memory is not freed", "trainer", "freed under a mapping"),
    ],
)
@pytest.mark.parametrize("broken", [False, True])
def test_rules_between_processes(process: Start, rule: str, who: str, violation: str, broken: bool) -> None:
    """Kept, nothing is wrong; each of them broken, the fake says what."""
    trainer, worker = process(), process()
    handle = trainer.call(remote.train, 0)
    trainer.call(remote.publish, 1)
    worker.call(remote.attach, handle, 0)
    if broken:
        (trainer if who == "trainer" else worker).call(remote.break_rule, rule)
    for version in range(2, 8):
        trainer.call(remote.publish, version)
        worker.call(remote.forward)
    trainer.call(remote.give_back)
    wrong = worker.call(_violations) + trainer.call(_violations)
    assert any(violation in text for text in wrong) == broken, wrong
    if not broken:
        assert worker.call(remote.detach) == ({}, [])
        assert trainer.call(remote.end_training) == ({}, [])


def _violations(state: Any) -> list[str]:
    return state.side.fake.violations()
