"""The benchmark's own checks: wrong weights and mixed forwards are found, processes end, and small runs work."""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.board import Board
from bench.host import Host
from bench.interleave import crew
from bench.policy import ProbePolicy, value_of
from bench.processes import Child, ChildFailed
from bench.results import Results
from bench.rivals import PUSHING
from bench.rivals.base import Rival
from bench.workloads import ALL


class Silent(Rival):
    """Brings nothing to anybody."""

    title = "silent"

    def connect(self, policy: ProbePolicy) -> None: ...

    def send(self) -> None: ...

    def join(self, stand_in: Any) -> None: ...


class Sleeper:
    """A child that has a child."""

    def __init__(self) -> None:
        self.child = Child("inner", Plain)

    def pids(self) -> tuple[int, int]:
        return os.getpid(), self.child.pid

    def fail(self) -> None:
        raise ValueError("on purpose")

    def hang(self) -> None:
        time.sleep(60)


class Plain:
    """A child without anything."""


def _broken() -> None:
    raise ValueError("broken from the start")


def test_a_rival_that_delivers_nothing_is_found_out() -> None:
    """Mutant: Host.check compares nothing."""
    host = Child("host", Host, Silent, "cartpole", 1)
    try:
        with pytest.raises(ChildFailed, match="WrongWeights"):
            host.call("start")
    finally:
        host.end()


def test_a_forward_tells_its_version_and_a_mixture_of_two() -> None:
    """Mutant: only the first leaf is read; only the first element of a leaf is read."""
    policy = ProbePolicy(ALL["cartpole"])
    policy.fill(7)
    assert policy(None).tolist() == [7.0, 7.0]
    last = list(policy.leaves())[-1]
    last[-1] += 1
    assert policy(None).tolist() == [7.0, 8.0]


def test_a_leaf_under_another_name_is_no_version() -> None:
    """Mutant: the same value in all leaves."""
    policy = ProbePolicy(ALL["kb200"])
    policy.fill(7)
    first, second = list(policy.leaves())[:2]
    first.copy_(second)
    assert policy(None).tolist() != [7.0, 7.0]


def test_all_versions_are_exact_in_all_leaves() -> None:
    """fp32 has 24 bits. Mutant: a larger step between leaves."""
    policy = ProbePolicy(ALL["pieces2000"])
    for version in (1, 4095):
        policy.fill(version)
        assert policy(None).tolist() == [float(value_of(version))] * 2
    assert len({value_of(version) for version in range(1, 4096)}) == 4095
    assert value_of(4096) == 1


def test_the_board_counts_mixed_forwards_and_the_first_of_a_version() -> None:
    """Mutant: a mixed forward taken for one of its versions; the time of a later forward."""
    board = Board(2)
    for worker in (0, 1):
        board.note(worker, 3.0, 3.0)
    board.note(1, 4.0, 5.0)
    with pytest.raises(TimeoutError, match="version 4"):
        board.wait_seen(4, timeout=0.05)
    board.note(0, 4.0, 4.0)
    before = time.monotonic_ns()
    board.note(1, 4.0, 4.0)
    after = time.monotonic_ns()
    time.sleep(0.01)
    board.note(1, 4.0, 4.0)
    assert before <= board.wait_seen(4, timeout=0.05) <= after
    assert board.mixed().tolist() == [0, 1]
    assert np.array_equal(board.forwards(), [2, 4])
    assert Board(2, board.path).forwards().tolist() == [2, 4]


def test_an_answer_or_its_exception_comes_back_and_the_child_goes_on() -> None:
    child = Child("outer", Sleeper)
    try:
        with pytest.raises(ChildFailed, match="on purpose"):
            child.call("fail")
        assert child.call("pids")[0] == child.pid
    finally:
        child.end()


def test_a_failure_says_where_in_the_repository_and_not_on_which_machine() -> None:
    """Results are committed and sent around. Mutant: give the traceback as it is."""
    child = Child("outer", Sleeper)
    try:
        with pytest.raises(ChildFailed) as caught:
            child.call("fail")
    finally:
        child.end()
    assert '"tests/bench/test_harness.py"' in str(caught.value)


def test_what_a_child_said_before_it_ended_is_reported() -> None:
    """Mutant: leave out the poll in Child.send."""
    child = Child("broken", _broken)
    try:
        deadline = time.monotonic() + 10
        while _runs(child.pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(ChildFailed, match="broken from the start"):
            child.call("pids")
    finally:
        child.end()


def test_children_of_a_killed_child_end_too() -> None:
    """Mutant: no death signal."""
    child = Child("outer", Sleeper)
    _, inner = child.call("pids")
    os.kill(child.pid, 9)
    child.end()
    deadline = time.monotonic() + 10
    try:
        while _runs(inner):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        if _runs(inner):
            os.kill(inner, 9)


def test_a_child_that_hangs_is_reported_and_ended() -> None:
    child = Child("outer", Sleeper)
    with pytest.raises(ChildFailed, match="did not answer"):
        child.call("hang", timeout=0.2)
    child.end(timeout=0.2)
    assert not _runs(child.pid)


def test_a_rival_that_fails_leaves_the_others_their_turns() -> None:
    """Mutant: the exception ends the round."""
    results, turns = Results(), []
    with crew(results, "here", {"bad": (Sleeper,), "good": (Sleeper,)}) as made:

        def turn(name: str, child: Child) -> None:
            turns.append(name)
            child.call("fail" if name == "bad" else "pids")

        made.rounds(3, turn)
    assert turns == ["bad", "good", "good", "good"]
    assert len(results.failures) == 1
    assert "here, bad" in results.failures[0]


def test_rounds_begin_with_another_rival_each_time() -> None:
    """Mutant: always the same order."""
    first: list[str] = []
    with crew(Results(), "here", {"a": (Plain,), "b": (Plain,)}) as made:
        made.rounds(2, lambda name, child: first.append(name))
    assert first == ["a", "b", "b", "a"]


def test_rounds_that_take_too_long_are_fewer_and_said_to_be() -> None:
    """Mutant: no limit; no round at all."""
    results, turns = Results({"phase_seconds": 0.0}), []
    with crew(results, "here", {"a": (Plain,)}) as made:
        made.rounds(5, lambda name, child: turns.append(name))
    assert turns == ["a"]
    assert results.notes == ["here: 1 of 5 rounds, they took too long"]


@pytest.mark.parametrize("name", ["shmsync", "shmsync-memory", "torchrl-updater", "lock"])
def test_a_small_comparison_runs(name: str) -> None:
    """One worker, all that a host can be asked. Pushes are checked inside."""
    if name != "lock":
        pytest.importorskip("torchrl")
    host = Child(name, Host, PUSHING[name], "cartpole", 1)
    try:
        host.call("start")
        assert 0 < host.call("push") < 10
        [(pushed, seen)] = host.call("push_busy", 1)
        assert 0 < pushed < 10
        assert 0 < seen < 10
        counts = host.call("push_steadily", 0.3)
        assert counts["pushes"] > 0
        assert counts["forwards"] > 0
        if name != "torchrl-updater":
            assert counts["mixed"] == 0
        sent = host.call("messages")
        assert (sent["nbytes"] > 18_000) == (name == "torchrl-updater")
        assert set(host.call("memory")) == {"trainer", "workers"}
    finally:
        host.end()


def test_counted_bytes_are_those_of_the_calls() -> None:
    """Mutant: tensors are not counted."""
    from multiprocessing.reduction import ForkingPickler

    import bench.counting

    with bench.counting.counted() as counter:
        ForkingPickler.dumps(bytes(1000))
    assert counter.messages == 1
    assert 1000 < counter.nbytes < 1100
    rpc = bench.counting.Counter()
    invoked = bench.counting._rpc(rpc, lambda *args: args)
    assert invoked("worker", b"12345", [torch.zeros(3)], 1.0, False)[1] == b"12345"
    assert (rpc.messages, rpc.nbytes) == (1, 5 + 12)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
