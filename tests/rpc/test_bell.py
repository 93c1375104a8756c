"""Workers answer to the channel's bell, without a message; those that do not get one."""

from __future__ import annotations

import os
import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from shmsync import PushError, PushTimeout
from tests.helpers.processes import stop
from tests.helpers.rpc_worlds import (
    ask,
    bound_version,
    deafen,
    everywhere,
    messages,
    own,
    pid_of,
    push,
    undeafen,
    updater,
    watch_messages,
    weights_of,
)
from tests.helpers.trainers import Trainer, wait_for


def start(world: SimpleNamespace, within: float = 60.0, **options: Any) -> None:
    """Workers at version 2 that have answered the bell once; pushes have so many seconds."""
    own(world)
    updater(world, timeout=within, **options)
    push(world, 1.0)
    push(world, 2.0)
    watch_messages(world)
    messages(world)


def pushed(world: SimpleNamespace, value: float, **options: Any) -> tuple[list[str], dict[int, Any]]:
    """The messages of a push, and the versions in use and seen of its report."""
    push(world, value, **options)
    return [name for name, _, _ in messages(world)], report(world)


def report(world: SimpleNamespace) -> dict[int, Any]:
    return {w: (r.in_use, r.seen) for w, r in world.updater.last_push.workers.items()}


def end(world: SimpleNamespace) -> None:
    world.updater.close()


def test_who_answers_the_bell_needs_no_message(trainer: Trainer) -> None:
    """The push waits for the answers all the same. Mutants: send to everybody; do not wait for the bell's answers."""
    trainer.do(start)
    version = trainer.do(push_without_message)
    assert trainer.do(report) == dict.fromkeys(range(3), (version, version))
    assert trainer.do(everywhere, bound_version) == [version] * 3
    alone = trainer.do(push_without_message, worker_ids=[1])
    assert trainer.do(report) == {1: (alone, alone)}
    assert trainer.do(everywhere, bound_version) == [version, alone, version]
    trainer.do(end)


def push_without_message(world: SimpleNamespace, **options: Any) -> int:
    """Push until no message was needed; the version. On a busy machine somebody may be late."""
    for _ in range(20):
        if not pushed(world, 3.0, **options)[0]:
            return world.updater.version
    raise AssertionError("each of 20 pushes sent a message")


def test_who_does_not_answer_gets_a_message_until_it_answers_again(trainer: Trainer) -> None:
    """Mutants: count on the roster alone; never trust a worker again that was silent once."""
    trainer.do(start)
    trainer.do(ask, 1, deafen)
    for version in (3, 4):
        assert trainer.do(pushed, float(version)) == (["notify"], dict.fromkeys(range(3), (version, version)))
    trainer.do(ask, 1, undeafen)
    trainer.do(pushed, 5.0)
    wait_for(lambda: trainer.do(pushed, 6.0)[0] == [], "a push without a message")
    trainer.do(end)


def test_a_push_without_waiting_has_the_answers_later(trainer: Trainer) -> None:
    """Also for those after it, and a worker that has not answered by the next push gets a message then. Mutant: trust
    a worker for ever that has answered once."""
    trainer.do(start)
    before = trainer.do(push_without_message)
    assert trainer.do(pushed, 3.0, wait=False)[0] == []
    wait_for(lambda: trainer.do(report) == dict.fromkeys(range(3), (before + 1,) * 2), "the answers")
    trainer.do(ask, 2, deafen)
    assert trainer.do(pushed, 4.0, wait=False)[0] == []
    others = {0: (before + 2,) * 2, 1: (before + 2,) * 2, 2: (None, None)}
    wait_for(lambda: trainer.do(report) == others, "the others' answers")
    assert trainer.do(pushed, 5.0, wait=False)[0] == ["notify"]
    wait_for(lambda: trainer.do(everywhere, bound_version) == [before + 3] * 3, "the last version")
    trainer.do(ask, 2, undeafen)
    trainer.do(end)


def test_in_memory_nobody_listens(trainer: Trainer) -> None:
    """And nobody is waited for. Mutant: let workers listen whatever `notify` says."""
    trainer.do(start, notify="memory")
    assert trainer.do(everywhere, listeners) == [0, 0, 0]
    assert trainer.do(pushed, 3.0) == ([], dict.fromkeys(range(3), (None, None)))
    trainer.do(end)


def listeners(owned: Any) -> int:
    return sum(thread.name.startswith("shmsync-listener") for thread in threading.enumerate())


@pytest.mark.parametrize("rounds", [3])
def test_a_listener_ends_with_its_channel(trainer: Trainer, rounds: int) -> None:
    """Mutant: do not wake it when its subscriber closes, and look for that only at a ring."""
    for _ in range(rounds):
        trainer.do(start)
        assert trainer.do(everywhere, listeners) == [1, 1, 1]
        trainer.do(end)
        wait_for(lambda: trainer.do(everywhere, listeners) == [0, 0, 0], "the end of the listeners")


def swap(world: SimpleNamespace) -> None:
    """Workers 0 and 1 are each other's objects from now on, in each other's process."""
    world.rrefs[0], world.rrefs[1] = world.rrefs[1], world.rrefs[0]


def test_a_worker_that_is_another_object_now_is_attached_anew(trainer: Trainer) -> None:
    """The old process still answers to the bell. Mutants: remember an attachment by the worker's number; an answer
    by the worker's number alone."""
    trainer.do(start)
    trainer.do(swap)
    trainer.do(pushed, 3.0)
    assert trainer.do(everywhere, weights_of) == [(3.0, 3.0)] * 3
    for worker, value in ((0, 4.0), (1, 5.0)):
        trainer.do(pushed, value, worker_ids=[worker])
        assert trainer.do(ask, worker, weights_of) == (value, value)
    assert trainer.do(ask, 0, weights_of) == (4.0, 4.0)
    trainer.do(end)


def init_again(world: SimpleNamespace) -> None:
    world.updater.init()


def test_init_asks_everybody_anew(fresh_trainer: Trainer) -> None:
    """Nothing is published by it, so an answer on the roster may be older than the worker's death. Mutant: take the
    roster's answer for a version that was answered before."""
    trainer = fresh_trainer
    trainer.do(start, within=3.0)
    trainer.do(init_again)
    os.kill(trainer.do(ask, 1, pid_of), signal.SIGKILL)
    with pytest.raises(PushError) as caught:
        trainer.do(init_again)
    assert set(caught.value.errors) == {1}


def test_a_worker_that_timed_out_is_let_go_too(trainer: Trainer) -> None:
    """Mutant: detach those only that confirmed the last push."""
    trainer.do(start, within=1.0)
    pid = trainer.do(ask, 1, pid_of)
    stop(pid)
    try:
        with pytest.raises(PushTimeout):
            trainer.do(push, 3.0)
        trainer.do(end)
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: trainer.do(everywhere, bound_version) == [0, 0, 0], "all modules unbound")
    assert trainer.do(everywhere, listeners) == [0, 0, 0]
