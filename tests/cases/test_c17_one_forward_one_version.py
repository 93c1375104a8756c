"""C17: every forward sees exactly one version, whatever the trainer does meanwhile.

Mutants, each run here: a writer that takes no locks, a subscriber that gives its lease back at once, and a gate that
lets switches into a forward. Each of them must be seen to tear.
"""

import functools
import threading
from collections.abc import Iterator

import pytest
import torch

import shmsync.gate
import shmsync.leases
from tests.helpers import workers
from tests.helpers.models import Watched, fill
from tests.helpers.trainers import wait_for

LAST, BURST = 200, 20
SECONDS = 40.0


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The cores are busy with processes; torch's threads would wait for each other most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def attach(state, handle: str) -> None:
    workers.attach(state, handle, Watched)


def push(channel, source: Watched) -> None:
    """fill(k) as version k, without pause, but one that is too fast waits until all have used one of each BURST."""
    for k in range(1, LAST + 1):
        channel.publish(fill(source, k))
        if k % BURST == 0:
            wait_for(lambda k=k: all(line.used > k - BURST for line in channel.subscribers()), "a look", SECONDS)


def torn(seen: list[tuple[int, float, float]]) -> list[tuple[int, float, float]]:
    return [(version, low, high) for version, low, high in seen if not low == high == version]


@pytest.mark.parametrize("pauses", [(0.0,), (0.05, 0.0)], ids=["fast", "slow and fast"])
def test_a_forward_is_of_one_version(publisher, peer, pauses) -> None:
    source = Watched()
    channel = publisher(source)
    crew = [(peer(), pause) for pause in pauses]
    for worker, pause in crew:
        worker.call(attach, str(channel.handle))
        worker.start(workers.watch, LAST, pause, SECONDS)
    push(channel, source)
    for worker, _ in crew:
        seen = worker.result(SECONDS + 10)
        versions = [version for version, _, _ in seen]
        assert torn(seen) == []
        assert versions == sorted(versions), "versions went back"
        assert versions[-1] == LAST
        assert len(set(versions)) >= LAST / BURST, "the worker saw too few versions to prove anything"


def release_at_once(state, handle: str) -> None:
    attach(state, handle)
    locks = state.subscriber._locks

    def try_shared(slot: int) -> bool:
        got = shmsync.leases.Locks.try_shared(locks, slot)
        locks.unlock(slot)
        return got

    locks.try_shared = try_shared


def open_gate(state, handle: str) -> None:
    attach(state, handle)
    gate = state.binding._gate
    gate.enter = lambda: True
    gate.leave = lambda depth: None
    state.intruder = threading.Thread(target=switch_all_the_time, args=(state,), daemon=True)
    state.intruder.start()


def switch_all_the_time(state) -> None:
    while state.binding.refresh() < LAST:
        pass


def write_without_locks(monkeypatch) -> None:
    monkeypatch.setattr(shmsync.leases.Locks, "try_exclusive", lambda self, slot: True)


NO_CHANGE_HERE = functools.partial(lambda monkeypatch: None)
MUTANTS = [(attach, write_without_locks), (release_at_once, NO_CHANGE_HERE), (open_gate, NO_CHANGE_HERE)]


@pytest.mark.parametrize(("attach_mutant", "mutate_trainer"), MUTANTS, ids=["no locks", "no lease", "no gate"])
def test_with_a_guard_off_forwards_tear(publisher, peer, monkeypatch, attach_mutant, mutate_trainer) -> None:
    """The test above is worth something: it would have seen each of these."""
    source = Watched()
    channel = publisher(source)
    worker = peer()
    worker.call(attach_mutant, str(channel.handle))
    mutate_trainer(monkeypatch)
    worker.start(workers.watch, LAST, 0.05, SECONDS)
    push(channel, source)
    assert torn(worker.result(SECONDS + 10)), "the mutant survived"
