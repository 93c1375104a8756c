"""Real collectors whose workers hang, die or can't reach the channel, and every way for a run to end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import rpc
from torchrl.envs import EnvBase

from shmsync import PushError, PushTimeout, RPCWeightUpdater
from tests.helpers import collectors
from tests.helpers.collectors import Corridor, ask, collect, pid_of, push, value_of, version_of
from tests.helpers.processes import stop
from tests.helpers.trainers import Trainer, wait_for

Start = Callable[..., Trainer]
TIMEOUT = 2.0


def build(world: SimpleNamespace, **options: Any) -> None:
    collectors.build(world, updater=RPCWeightUpdater(timeout=TIMEOUT), **options)


def timed(world: SimpleNamespace, function: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, float]:
    """The error that it raised, and the seconds that it took."""
    begin = time.monotonic()
    try:
        function(world, *args, **options)
    except Exception as error:
        return error, time.monotonic() - begin
    return None, time.monotonic() - begin


def close(world: SimpleNamespace) -> None:
    world.updater.close()


def shut_down(world: SimpleNamespace) -> None:
    world.collector.shutdown()


def versions_reported(world: SimpleNamespace) -> dict[int, Any]:
    return {w: r.in_use for w, r in world.updater.last_push.workers.items()}


def test_a_stopped_worker_delays_a_push_by_its_timeout_and_is_named(start: Start) -> None:
    """torchrl's own push waits 10 000 s. The other worker is updated; once the stopped one goes on it has that
    version by itself, a retry for it alone works, and the run goes on. `close` is bounded too. Mutant: send
    messages without a timeout."""
    trainer = start(build=build)
    pid = trainer.do(ask, 0, pid_of)
    stop(pid)
    try:
        error, seconds = trainer.do(timed, push, 2.0)
        assert isinstance(error, PushTimeout)
        assert set(error.errors) == {0}
        assert "worker 0" in str(error)
        assert seconds < TIMEOUT + 1
        assert trainer.do(ask, 1, value_of) == 2.0
        assert trainer.do(versions_reported) == {0: None, 1: 2}
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: trainer.do(ask, 0, value_of) == 2.0, "worker 0 catches up by itself")
    trainer.do(push, 3.0, worker_ids=[0])
    assert [trainer.do(ask, worker, value_of) for worker in (0, 1)] == [3.0, 2.0]
    assert trainer.do(collect).actions == [2.0, 3.0]
    stop(pid)
    try:
        error, seconds = trainer.do(timed, close)
        assert error is None
        assert seconds < TIMEOUT + 1
    finally:
        os.kill(pid, signal.SIGCONT)
    assert trainer.do(timed, shut_down)[0] is None
    assert trainer.end() == 0


def test_a_killed_worker_is_named_and_the_other_updated(start: Start) -> None:
    """Now and at the next push; a push to the other alone works. The end of the updater is bounded; the collector's
    own is torchrl's affair. Mutant: let the first error end the push."""
    trainer = start(build=build)
    trainer.do(push, 1.0)
    os.kill(trainer.do(ask, 0, pid_of), signal.SIGKILL)
    for value in (2.0, 3.0):
        error, seconds = trainer.do(timed, push, value)
        assert isinstance(error, PushError)
        assert set(error.errors) == {0}
        assert "worker 0: ConnectionError: its process, pid" in str(error)
        assert seconds < TIMEOUT + 1
        assert trainer.do(ask, 1, value_of) == value
    assert trainer.do(timed, push, 4.0, worker_ids=[1])[0] is None
    error, seconds = trainer.do(timed, close)
    assert error is None
    assert seconds < TIMEOUT + 1
    assert (trainer.do(ask, 1, value_of), trainer.do(ask, 1, version_of)) == (4.0, 0)


def env_on_another_host_in_worker_1() -> EnvBase:
    """In the worker: this is another machine than the trainer's."""
    from shmsync import handle

    if rpc.get_worker_info().name == "COLLECTOR_NODE_2":
        handle._boot_id = lambda: "11111111-2222-3333-4444-555555555555"
    return Corridor()


def test_a_worker_on_another_host_is_named_before_its_first_batch(start: Start) -> None:
    """Where it was given the channel while it was built, it says so, with its host and what is needed; so does a push,
    which updates the other one. Mutant: let it collect with weights that will never change."""
    trainer = start(build=build, env=env_on_another_host_in_worker_1)
    error, seconds = trainer.do(timed, push, 2.0)
    assert isinstance(error, PushError)
    assert set(error.errors) == {1}
    for words in ("worker 1", "Worker 1 on host", "same host and the same pid namespace"):
        assert words in str(error)
    assert seconds < TIMEOUT + 1
    assert trainer.do(ask, 0, value_of) == 2.0
    with pytest.raises(Exception, match=r"Worker 1 on host"):
        trainer.do(collect)


@pytest.mark.parametrize(
    ("sync", "order"),
    [(False, (close, shut_down)), (True, (shut_down, close)), (False, (shut_down,))],
    ids=["updater first", "collector first", "no close"],
)
def test_a_run_ends_in_any_order_without_a_complaint(start: Start, sync: bool, order: tuple[Any, ...]) -> None:
    """No error, no traceback, no warning of ours, no process left. Mutant: need RPC at `close`."""
    trainer = start(sync=sync, workers=1)
    trainer.do(push, 2.0)
    trainer.do(collect, 2)
    for step in order:
        assert trainer.do(timed, step)[0] is None
    assert trainer.end() == 0
    wait_for(lambda: not trainer.processes(), "the end of all processes")
    assert "Traceback" not in trainer.output()
    assert "shmsync" not in trainer.output()
