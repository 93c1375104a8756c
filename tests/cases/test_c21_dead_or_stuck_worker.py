"""C21: a stopped or killed worker delays a push by at most the timeout, and is named; the others are up to date.

Each test says its mutant.
"""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

from shmsync import PushError, PushTimeout
from tests.helpers.processes import stop
from tests.helpers.rpc_faults import TIMEOUT, look, outcome, report, start
from tests.helpers.rpc_worlds import bound_version, everywhere, own, pid_of, updater
from tests.helpers.trainers import Trainer, wait_for


def test_a_stopped_worker(trainer: Trainer) -> None:
    """PushTimeout within the timeout, naming it; the others are updated; once it goes on it catches up by itself, and a
    retry for it alone works. Mutant: wait for the workers one after the other, each with the whole timeout."""
    pids = trainer.do(start)
    stop(pids[0])
    try:
        error, seconds = trainer.do(outcome, 2.0)
        assert isinstance(error, PushTimeout)
        assert isinstance(error, TimeoutError)
        assert set(error.errors) == {0}
        assert "worker 0" in str(error)
        assert TIMEOUT <= seconds < TIMEOUT + 1
        assert trainer.do(report) == {0: None, 1: 2, 2: 2}
        assert trainer.do(look, 1) == ((2.0, 2.0), 2)
        error, seconds = trainer.do(outcome, 3.0, worker_ids=[1, 2])
        assert error is None
    finally:
        os.kill(pids[0], signal.SIGCONT)
    wait_for(lambda: trainer.do(look, 0) == ((2.0, 2.0), 2), "worker 0 catches up")
    assert trainer.do(outcome, 4.0, worker_ids=[0])[0] is None
    assert trainer.do(look, 0) == ((4.0, 4.0), 4)
    assert trainer.do(outcome, 5.0)[0] is None
    assert trainer.do(everywhere, bound_version) == [5, 5, 5]


def test_a_worker_that_is_stopped_before_it_has_attached(trainer: Trainer) -> None:
    """It is named, attaches by itself when it goes on, and the next push finds it attached. Mutant: send the first
    message without a timeout."""
    pid = trainer.do(prepare)[2]
    stop(pid)
    try:
        error, seconds = trainer.do(outcome, 1.0)
        assert isinstance(error, PushTimeout)
        assert set(error.errors) == {2}
        assert seconds < TIMEOUT + 1
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: trainer.do(look, 2) == ((1.0, 1.0), 1), "worker 2 attaches")
    assert trainer.do(outcome, 2.0)[0] is None
    assert trainer.do(everywhere, bound_version) == [2, 2, 2]


def prepare(world: SimpleNamespace) -> list[int]:
    """Nobody has attached yet; the workers' pids."""
    own(world)
    updater(world, timeout=TIMEOUT)
    return everywhere(world, pid_of)


def test_two_stopped_workers_cost_one_timeout_and_close_is_bounded_too(trainer: Trainer) -> None:
    """Mutant: give each worker's answer a timeout of its own."""
    pids = trainer.do(start)
    for pid in pids[:2]:
        stop(pid)
    try:
        error, seconds = trainer.do(outcome, 2.0)
        assert set(error.errors) == {0, 1}
        assert seconds < TIMEOUT + 1
        error, seconds = trainer.do(outcome, None)
        assert error is None
        assert seconds < TIMEOUT + 1
    finally:
        for pid in pids[:2]:
            os.kill(pid, signal.SIGCONT)
    assert trainer.do(look, 2)[0] == (2.0, 2.0)


def test_a_push_without_waiting_does_not_wait_for_a_stopped_worker(trainer: Trainer) -> None:
    """Its answer comes into `last_push` when it goes on; the others' are there before. Mutant: await each answer as
    it is sent."""
    pids = trainer.do(start)
    stop(pids[1])
    try:
        error, seconds = trainer.do(outcome, 2.0, wait=False)
        assert error is None
        assert seconds < TIMEOUT
        wait_for(lambda: trainer.do(report) == {0: 2, 1: None, 2: 2}, "the others' answers")
    finally:
        os.kill(pids[1], signal.SIGCONT)
    wait_for(lambda: trainer.do(report) == {0: 2, 1: 2, 2: 2}, "the answer of worker 1")


def test_a_killed_worker(fresh_trainer: Trainer) -> None:
    """The push is bounded and names it, now and later; the others are updated; the end of the updater is bounded too.
    Mutant: await the dead one's answer without a timeout."""
    trainer = fresh_trainer
    pids = trainer.do(start)
    os.kill(pids[0], signal.SIGKILL)
    for value in (2.0, 3.0):
        error, seconds = trainer.do(outcome, value)
        assert isinstance(error, PushError)
        assert set(error.errors) == {0}
        assert "worker 0" in str(error)
        assert seconds < TIMEOUT + 1
        assert trainer.do(look, 1)[0] == (value, value)
    assert trainer.do(lag) == {1: 0, 2: 0}
    error, seconds = trainer.do(outcome, None)
    assert error is None
    assert seconds < TIMEOUT + 1
    assert trainer.do(look, 2) == ((3.0, 3.0), 0)


def lag(world: SimpleNamespace) -> dict[int, int]:
    return world.updater.lag().workers
