"""How far workers are behind, and the bound on it: `lag()`, `max_lag=`, `on_lag=`. Three workers of plain RPC."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shmsync import LagExceeded, LagTimeout, PushError, PushTimeout, RPCWeightUpdater, ShmSyncError
from shmsync.binding import binding_of
from tests.helpers.processes import stop
from tests.helpers.rpc_worlds import ask, bound_version, everywhere, module_of, own, pid_of, push, run_forward, updater
from tests.helpers.trainers import Trainer


def start(world: SimpleNamespace, within: float = 60.0, **options: Any) -> None:
    """Attached workers at version 1; what the updater logs is kept."""
    own(world)
    world.log = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: world.log.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shmsync").handlers = [handler]
    updater(world, timeout=within, **options)
    push(world, 1.0)


def hold(owned: Any, seconds: float) -> None:
    """Run in a worker: for so long no switch happens there, as in a long forward. A rest follows, without forwards."""
    began = threading.Event()

    def holding() -> None:
        binding = binding_of(module_of(owned))
        assert binding is not None
        with binding.hold():
            began.set()
            time.sleep(seconds)

    threading.Thread(target=holding, daemon=True).start()
    began.wait(10)


def pushes(world: SimpleNamespace, count: int, **options: Any) -> tuple[Exception | None, float]:
    """So many pushes; the error that one of them raised, and the seconds that they took."""
    begin, error = time.monotonic(), None
    try:
        for _ in range(count):
            push(world, world.updater.version + 1.0, **options)
    except Exception as caught:
        error = caught
    return error, time.monotonic() - begin


def state(world: SimpleNamespace) -> tuple[int, list[int], dict[int, int]]:
    return world.updater.version, everywhere(world, bound_version), world.updater.lag().workers


def forward(world: SimpleNamespace, worker: int) -> None:
    ask(world, worker, run_forward)


def logged(world: SimpleNamespace) -> list[str]:
    return world.log


def hold_worker(world: SimpleNamespace, worker: int, seconds: float) -> int:
    ask(world, worker, hold, seconds)
    return ask(world, worker, pid_of)


def summary(world: SimpleNamespace) -> Any:
    lag = world.updater.lag()
    return lag.min, lag.mean, lag.max, lag.workers


def test_lag_is_least_mean_and_most_over_the_workers(trainer: Trainer) -> None:
    """Of what is addressed to each. Mutant: the newest version of all in place of the addressed one."""
    trainer.do(start, notify="memory")
    assert trainer.do(summary) == (0, 0.0, 0, {0: 0, 1: 0, 2: 0})
    trainer.do(pushes, 2, worker_ids=[1])
    trainer.do(pushes, 1, worker_ids=[2])
    assert trainer.do(summary) == (0, 5 / 3, 3, {0: 0, 1: 2, 2: 3})
    trainer.do(forward, 1)
    assert trainer.do(summary) == (0, 1.0, 3, {0: 0, 1: 0, 2: 3})


@pytest.mark.parametrize("notify", ["rpc", "memory"])
@pytest.mark.parametrize("wait", [True, False])
def test_a_push_waits_for_who_is_too_far_behind(trainer: Trainer, notify: str, wait: bool) -> None:
    """And when it returns nobody is, though the worker rests after its forward. Mutants: no look after the push; no
    nudge."""
    trainer.do(start, notify=notify, max_lag=0)
    trainer.do(hold_worker, 1, 1.5)
    error, seconds = trainer.do(pushes, 1, wait=wait)
    assert error is None
    assert 0.4 < seconds < 20
    assert trainer.do(state) == (2, [2, 2, 2], {0: 0, 1: 0, 2: 0})


def test_within_the_bound_a_push_does_not_wait(trainer: Trainer) -> None:
    """Mutant: >= in place of >."""
    trainer.do(start, max_lag=2)
    trainer.do(hold_worker, 1, 5.0)
    error, seconds = trainer.do(pushes, 2)
    assert error is None
    assert seconds < 4
    assert trainer.do(summary)[3] == {0: 0, 1: 2, 2: 0}


@pytest.mark.parametrize("notify", ["rpc", "memory"])
def test_who_is_within_the_bound_has_not_confirmed_for_that(trainer: Trainer, notify: str) -> None:
    """The report says who has answered or has the version, and nothing of one that may be behind. Mutant: say what it
    uses."""
    trainer.do(start, notify=notify, max_lag=1)
    trainer.do(hold_worker, 1, 30.0)
    if notify == "rpc":
        trainer.do(stop_worker, 1)  # else it answers that it has seen it
    error, _ = trainer.do(pushes, 1, wait=False)
    assert error is None
    assert trainer.do(reported, 1) == (None, None, "not confirmed")
    assert trainer.do(summary)[3][1] == 1
    if notify == "rpc":
        trainer.do(go_on)


def stop_worker(world: SimpleNamespace, worker: int) -> None:
    world.stopped = ask(world, worker, pid_of)
    stop(world.stopped)


def go_on(world: SimpleNamespace) -> None:
    os.kill(world.stopped, signal.SIGCONT)


def reported(world: SimpleNamespace, worker: int) -> tuple[int | None, int | None, str]:
    report = world.updater.last_push.workers[worker]
    return report.in_use, report.seen, report.status


@pytest.mark.parametrize("notify", ["rpc", "memory"])
def test_who_does_not_catch_up_in_time_is_named(trainer: Trainer, notify: str) -> None:
    """Worker, process and versions; the others are up to date. Mutant: wait for ever; an error without the pid."""
    trainer.do(start, notify=notify, max_lag=1, within=1.0)
    pid = trainer.do(hold_worker, 1, 30.0)
    error, seconds = trainer.do(pushes, 2)
    assert isinstance(error, PushTimeout)
    assert 0.9 < seconds < 10
    assert isinstance(error.errors[1], LagTimeout)
    assert set(error.errors) == ({1} if notify == "rpc" else {1})
    assert f"worker 1: LagTimeout: pid {pid} uses version 1, 2 behind version 3; max_lag is 1" in str(error)
    assert "worker_ids" not in str(error)
    assert trainer.do(state)[0] == 3


def test_raise_is_an_error_at_once(trainer: Trainer) -> None:
    """The version is published all the same. Mutant: wait first."""
    trainer.do(start, max_lag=1, on_lag="raise")
    trainer.do(hold_worker, 2, 30.0)
    assert trainer.do(pushes, 1)[0] is None
    error, seconds = trainer.do(pushes, 1)
    assert type(error) is PushError
    assert seconds < 10
    assert {worker: type(one) for worker, one in error.errors.items()} == {2: LagExceeded}
    assert trainer.do(state) == (3, [3, 3, 1], {0: 0, 1: 0, 2: 2})


def test_warn_says_it_once_until_the_worker_has_caught_up(trainer: Trainer) -> None:
    """Per worker, and again the next time. Mutants: at each push; never again."""
    trainer.do(start, notify="memory", max_lag=0, on_lag="warn")
    assert trainer.do(pushes, 3)[0] is None
    first = trainer.do(logged)
    assert [text.split(":")[0] for text in first] == ["Worker 0", "Worker 1", "Worker 2"]
    assert "uses version 1, 1 behind version 2; max_lag is 0" in first[0]
    trainer.do(forward, 1)
    trainer.do(pushes, 1, worker_ids=[0])
    assert trainer.do(logged) == first
    trainer.do(pushes, 2)
    assert [text.split(":")[0] for text in trainer.do(logged)[3:]] == ["Worker 1"]


def test_a_worker_that_nothing_newer_was_addressed_to_is_not_behind(trainer: Trainer) -> None:
    """However many versions the others got, and it delays no push to them. Mutant: look at all workers' distance to the
    newest version."""
    trainer.do(start, max_lag=0, on_lag="raise", within=2.0)
    trainer.do(hold_worker, 0, 30.0)
    assert trainer.do(pushes, 5, worker_ids=[1, 2])[0] is None
    assert trainer.do(state) == (6, [1, 6, 6], {0: 0, 1: 0, 2: 0})


def test_who_does_not_answer_is_not_waited_for_twice(trainer: Trainer) -> None:
    """A worker whose notification failed is named for that. Mutant: look at it all the same."""
    trainer.do(start, max_lag=0, within=1.5)
    error, seconds = trainer.do(push_where_switching_is_broken)
    assert type(error) is PushError
    assert "broken on purpose" in str(error.errors[1])
    assert seconds < 1.4


def push_where_switching_is_broken(world: SimpleNamespace) -> Any:
    from tests.helpers.rpc_worlds import break_switch

    ask(world, 1, break_switch)
    return pushes(world, 1)


def test_numpys_numbers_are_numbers() -> None:
    """Mutant: take Python's alone."""
    assert type(RPCWeightUpdater(max_lag=np.int64(2))._staleness.max_lag) is int


@pytest.mark.parametrize("options", [{"max_lag": -1}, {"max_lag": 1.0}, {"max_lag": True}, {"on_lag": "cry"}], ids=str)
def test_bad_bounds_are_named(options: dict[str, Any]) -> None:
    """Mutant: take them as they come."""
    ((name, value),) = options.items()
    with pytest.raises(ShmSyncError, match=name) as caught:
        RPCWeightUpdater(**options)
    assert repr(value) in str(caught.value)
