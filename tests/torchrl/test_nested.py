"""What a push to workers with inner processes costs, and that it finds out what has become of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import shmsync
from shmsync import PushError
from shmsync.torchrl.answers import runs
from tests.helpers import collectors
from tests.helpers.collectors import ask, collect, pid_of, push
from tests.helpers.rpc_worlds import messages, watch_messages
from tests.helpers.trainers import Trainer, wait_for

Start = Callable[..., Trainer]
NESTED = {"kind": "MultiSyncCollector", "workers": 1, "num_workers_per_collector": 2}
FLAT = {"kind": "Collector", "workers": 1}
TIMEOUT = 10.0


def build(world: SimpleNamespace, **options: Any) -> None:
    collectors.build(world, updater=shmsync.RPCWeightUpdater(timeout=TIMEOUT), **options)


def inner_pids(world: SimpleNamespace) -> list[int]:
    return [line.pid for line in world.updater._publisher.subscribers() if line.worker_id == 0]


def pushed(world: SimpleNamespace, values: list[float]) -> list[tuple[Any, ...]]:
    """What each of these pushes has cost, and what it says of worker 0."""
    found = []
    for value in values:
        report = push(world, value)
        worker = report.workers[0]
        costs = (report.nbytes, report.notification_nbytes, report.rpc_nbytes)
        found.append((costs, worker.seen == report.version, worker.via, worker.error))
    return found


def cost_of_pushes(start: Start, options: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    trainer = start(build=build, **options)
    trainer.do(collect)
    trainer.do(pushed, [1.0, 2.0])  # which attach the worker, and find out whether it answers to the bell
    trainer.do(watch_messages)
    found = trainer.do(pushed, [3.0, 4.0, 5.0])
    return found, trainer.do(messages)


def test_a_push_costs_as_many_bytes_as_to_a_collector_without_inner_processes(start: Start) -> None:
    """None but those of the weights, and no message. Mutant: report for no worker with inner processes."""
    flat, nested = cost_of_pushes(start, FLAT), cost_of_pushes(start, NESTED)
    assert flat == nested
    assert nested == ([((32, 0, 0), True, "map", None)] * 3, [])


def test_the_report_says_what_the_inner_processes_use(start: Start) -> None:
    """The oldest of them counts. Mutant: report the version that is pushed as the one in use."""
    trainer = start(build=build, **NESTED)
    trainer.do(collect)
    trainer.do(push, 2.0)
    assert trainer.do(in_use_after_a_push, 3.0) == 1  # that of the batch before, since they rest
    trainer.do(collect)
    assert trainer.do(in_use_after_a_push, 4.0) == 3


def in_use_after_a_push(world: SimpleNamespace, value: float) -> Any:
    return push(world, value).workers[0].in_use


def test_a_killed_worker_is_named_though_its_inner_processes_live(start: Start) -> None:
    """Stopped, they outlive it for as long as the test wants. Mutant: look at the roster's lines alone."""
    trainer = start(build=build, **NESTED)
    trainer.do(push, 2.0)
    inner = trainer.do(inner_pids)
    assert len(inner) == 2
    for pid in inner:
        os.kill(pid, signal.SIGSTOP)
    outer = trainer.do(ask, 0, pid_of)
    os.kill(outer, signal.SIGKILL)
    wait_for(lambda: not runs(outer), "the end of the worker")
    begin = time.monotonic()
    with pytest.raises(PushError, match="worker 0") as caught:
        trainer.do(push, 3.0)
    assert set(caught.value.errors) == {0}
    assert time.monotonic() - begin < TIMEOUT + 1
    assert trainer.do(inner_pids) == inner


def test_a_worker_whose_inner_processes_have_died_is_asked_itself(start: Start) -> None:
    """Mutant: take lines of the dead for an answer."""
    trainer = start(build=build, **NESTED)
    trainer.do(push, 2.0)
    for pid in trainer.do(inner_pids):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not trainer.do(inner_pids), "the end of the inner processes")
    trainer.do(watch_messages)
    assert trainer.do(in_use_after_a_push, 3.0) == 0
    assert [name for name, *_ in trainer.do(messages)] == ["notify"]
