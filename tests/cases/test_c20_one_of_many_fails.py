"""C20: one of many workers fails: it is named, the others are up to date and reported, and a retry for it alone works.

Each test says its mutant.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shmsync import PushError
from tests.helpers.rpc_faults import outcome, report, start
from tests.helpers.rpc_worlds import ask, bound_version, break_switch, everywhere, mend_switch, push
from tests.helpers.trainers import Trainer


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


def test_a_hook_hides_no_worker_that_did_not_confirm(trainer: Trainer) -> None:
    """It may raise, and may push again: the error is of this push. Mutants: let the hook's error out; take the version
    after the hooks."""
    trainer.do(start)
    trainer.do(ask, 2, break_switch)
    assert trainer.do(push_with_bad_hook) == [True, {2}, "ZeroDivisionError"]
    trainer.do(ask, 2, mend_switch)


def test_an_interrupt_in_a_hook_is_no_error_of_a_worker(trainer: Trainer) -> None:
    """Ctrl-C ends the program, whatever workers did. Mutant: let the workers' error out in its place."""
    trainer.do(start)
    trainer.do(ask, 2, break_switch)
    assert trainer.do(push_with_interrupt) == "KeyboardInterrupt"
    trainer.do(ask, 2, mend_switch)


def push_with_interrupt(world: SimpleNamespace) -> str:
    def hook() -> None:
        world.updater.post_hooks.clear()
        raise KeyboardInterrupt

    world.updater.register_post_hook(hook)
    try:
        push(world, 2.0)
    except BaseException as error:
        return type(error).__name__
    return "nothing"


def push_with_bad_hook(world: SimpleNamespace) -> list[Any]:
    def hook() -> None:
        world.updater.post_hooks.clear()
        push(world, 3.0, worker_ids=[0])
        raise ZeroDivisionError

    world.updater.register_post_hook(hook)
    before = world.updater.version
    with pytest.raises(PushError) as caught:
        push(world, 2.0)
    error = caught.value
    return [error.version == before + 1, set(error.errors), type(error.__context__).__name__]


def push_with_hook(world: SimpleNamespace) -> list[str]:
    ran: list[str] = []
    world.updater.register_post_hook(lambda: ran.append("hook"))
    with pytest.raises(PushError):
        push(world, 2.0)
    return ran
