"""C23: an updater ends in order, whatever happens in its block and whoever is dead.

Each test says its mutant.
"""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

from shmsync import ChannelClosed
from tests.helpers.rpc_faults import TIMEOUT, look, outcome, start
from tests.helpers.rpc_worlds import push, shut_down
from tests.helpers.trainers import Trainer, wait_for


def test_an_exception_in_the_block_comes_out_while_a_worker_is_dead(fresh_trainer: Trainer) -> None:
    """And the end is bounded; a second close is nothing; a push after it says closed. Mutant: let the end's own errors
    out."""
    trainer = fresh_trainer
    pids = trainer.do(start)
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(KeyError, match="real"):
        trainer.do(fail_in_block)
    assert trainer.do(outcome, None)[0] is None
    assert isinstance(trainer.do(outcome, 5.0)[0], ChannelClosed)
    assert trainer.do(look, 2) == ((4.0, 4.0), 0)


def fail_in_block(world: SimpleNamespace) -> None:
    begin = time.monotonic()
    try:
        with world.updater:
            push(world, 4.0, worker_ids=[1, 2])
            raise KeyError("real")
    finally:
        assert time.monotonic() - begin < TIMEOUT + 1


def ends_without_a_word(trainer: Trainer) -> None:
    assert trainer.end() == 0
    wait_for(lambda: not trainer.processes(), "the end of all processes")
    for word in ("Traceback", "Warning", "rror"):
        assert word not in trainer.output()


def test_an_orderly_end(fresh_trainer: Trainer) -> None:
    """Everybody leaves with exit code 0, nothing complains, no process stays. Mutant: let `detach` raise in a
    worker that is at rest."""
    trainer = fresh_trainer
    trainer.do(start)
    assert trainer.do(close_and_shut_down) == [0, 0, 0]
    ends_without_a_word(trainer)


def close_and_shut_down(world: SimpleNamespace) -> Any:
    world.updater.close()
    return shut_down(world)


def test_an_end_without_close(fresh_trainer: Trainer) -> None:
    """The trainer leaves with its updater open: no traceback, nobody hangs. Mutant: let the publisher's finalizer
    raise."""
    trainer = fresh_trainer
    trainer.do(start)
    assert trainer.do(shut_down) == [0, 0, 0]
    ends_without_a_word(trainer)
