"""Workers of plain RPC that fail, hang or die: a push is bounded, names them, and brings all others up to date."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

from shmsync import ChannelClosed, PushError, PushTimeout
from tests.helpers.processes import stop
from tests.helpers.rpc_worlds import (
    ask,
    bound_version,
    break_switch,
    everywhere,
    mend_switch,
    own,
    pid_of,
    push,
    shut_down,
    updater,
    weights_of,
)
from tests.helpers.trainers import Trainer, wait_for

TIMEOUT = 2.0


def start(world: SimpleNamespace, **options: Any) -> list[int]:
    """Workers at version 1, with the value 1; their pids."""
    own(world)
    updater(world, timeout=TIMEOUT, **options)
    push(world, 1.0)
    return everywhere(world, pid_of)


def outcome(world: SimpleNamespace, value: float | None, **options: Any) -> tuple[Any, float]:
    """The error of a push, and how long the push took in seconds. value None: of `close()`."""
    begin = time.monotonic()
    error = None
    try:
        if value is None:
            world.updater.close()
        else:
            push(world, value, **options)
    except Exception as caught:
        error = caught
    return error, time.monotonic() - begin


def look(world: SimpleNamespace, worker: int) -> tuple[Any, int]:
    return ask(world, worker, weights_of), ask(world, worker, bound_version)


def report(world: SimpleNamespace) -> dict[int, Any]:
    return {w: r.in_use for w, r in world.updater.last_push.workers.items()}


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


def test_a_worker_that_raises(trainer: Trainer) -> None:
    """The error names it and what it raised; the report has the others' versions; a retry for it alone brings it
    up. Mutant: let the first error end the push, before the others' answers are in."""
    trainer.do(start)
    trainer.do(ask, 1, break_switch)
    error, _ = trainer.do(outcome, 2.0)
    assert type(error) is PushError
    assert (error.version, set(error.errors)) == (2, {1})
    assert "worker 1" in str(error)
    assert "broken on purpose" in str(error)
    assert trainer.do(report) == {0: 2, 1: None, 2: 2}
    trainer.do(ask, 1, mend_switch)
    assert trainer.do(outcome, 3.0, worker_ids=[1])[0] is None
    assert trainer.do(report) == {1: 3}
    assert trainer.do(everywhere, bound_version) == [2, 3, 2]


def test_post_hooks_run_also_after_a_push_that_a_worker_did_not_confirm(trainer: Trainer) -> None:
    """The weights are published then. Mutant: raise before the hooks."""
    trainer.do(start)
    trainer.do(ask, 2, break_switch)
    assert trainer.do(push_with_hook) == ["hook"]
    trainer.do(ask, 2, mend_switch)


def push_with_hook(world: SimpleNamespace) -> list[str]:
    ran: list[str] = []
    world.updater.register_post_hook(lambda: ran.append("hook"))
    with pytest.raises(PushError):
        push(world, 2.0)
    return ran


def test_a_killed_worker(fresh_trainer: Trainer) -> None:
    """The push is bounded and names it, now and later; the others are updated; an exception in the updater's block
    comes out; the end of the updater is bounded. Mutant: await the dead one's answer without a timeout."""
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
    with pytest.raises(KeyError, match="real"):
        trainer.do(fail_in_block)
    assert trainer.do(outcome, None)[0] is None
    assert isinstance(trainer.do(outcome, 5.0)[0], ChannelClosed)
    assert trainer.do(look, 2) == ((4.0, 4.0), 0)


def lag(world: SimpleNamespace) -> dict[int, int]:
    return world.updater.lag().workers


def fail_in_block(world: SimpleNamespace) -> None:
    begin = time.monotonic()
    try:
        with world.updater:
            push(world, 4.0, worker_ids=[1, 2])
            raise KeyError("real")
    finally:
        assert time.monotonic() - begin < TIMEOUT + 1


def test_an_orderly_end(fresh_trainer: Trainer) -> None:
    """Everybody leaves with exit code 0, nothing complains, no process stays. Mutant: let `detach` raise in a
    worker that is at rest."""
    trainer = fresh_trainer
    trainer.do(start)
    assert trainer.do(close_and_shut_down) == [0, 0, 0]
    assert trainer.end() == 0
    wait_for(lambda: not trainer.processes(), "the end of all processes")
    for word in ("Traceback", "Warning", "rror"):
        assert word not in trainer.output()


def close_and_shut_down(world: SimpleNamespace) -> Any:
    world.updater.close()
    return shut_down(world)


def test_an_end_without_close(fresh_trainer: Trainer) -> None:
    """The trainer leaves with its updater open: no traceback, nobody hangs. Mutant: let the publisher's finalizer
    raise."""
    trainer = fresh_trainer
    trainer.do(start)
    assert trainer.do(shut_down) == [0, 0, 0]
    assert trainer.end() == 0
    wait_for(lambda: not trainer.processes(), "the end of all processes")
    for word in ("Traceback", "Warning", "rror"):
        assert word not in trainer.output()
