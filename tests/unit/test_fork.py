"""After a fork parent and child are two subscribers: each has its own leases, and neither's end is the other's.

Mutants: leave the parent's description open in the child (its leases outlive it there, and the child has none); leave
the publisher's descriptors open (the owner seems alive after its death).
"""

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from shmsync import Publisher, Subscriber, forks
from tests.helpers import probes
from tests.helpers.models import filled, uniform
from tests.helpers.trainers import wait_for

SHAPES = {"leaf": (10,)}


class Child:
    """A forked process that runs `body(wait)`; `wait()` there returns when `go()` is called here."""

    def __init__(self, body: Callable[[Callable[[], None]], object]) -> None:
        answer, self._answer = os.pipe()
        go, self._go = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            signal.alarm(60)
            try:
                text = repr(body(lambda: (os.read(go, 1), None)[1]))
            except BaseException as error:
                text = f"{type(error).__name__}: {error}"
            os.write(self._answer, text.encode())
            os._exit(0)
        os.close(go)
        os.close(self._answer)
        self._read = answer

    def go(self) -> None:
        os.write(self._go, b"x")

    def result(self) -> str:
        text = os.read(self._read, 10_000).decode()
        os.waitpid(self.pid, 0)
        os.close(self._read)
        os.close(self._go)
        return text


def push_on(channel: Publisher, follower_refresh: Callable[[], object] = int, count: int = 6) -> None:
    for _ in range(count):
        channel.publish(filled(SHAPES, channel.version + 1))
        follower_refresh()


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.leaf = nn.Parameter(torch.zeros(10))

    def forward(self) -> float:
        return uniform(self.leaf)


@pytest.fixture
def channel(publisher):
    channel = publisher(filled(SHAPES, 0), max_subscribers=8)
    channel.publish(filled(SHAPES, 1))
    return channel


def test_a_childs_bound_module_keeps_its_version_and_follows(channel, subscriber) -> None:
    follower, worker = subscriber(channel), Policy()
    follower.bind(worker)

    def body(wait: Callable[[], None]) -> list:
        wait()
        return [uniform(worker.leaf), worker(), follower.version]

    child = Child(body)
    push_on(channel, follower.refresh)
    assert worker() == 7
    child.go()
    assert child.result() == "[1.0, 7.0, 7]"


def test_a_childs_end_takes_nothing_from_the_parent(channel, subscriber) -> None:
    follower, worker = subscriber(channel), Policy()
    binding = follower.bind(worker)
    with binding.hold():
        child = Child(lambda wait: follower.close())
        assert child.result() == "None"
        push_on(channel)
        assert uniform(worker.leaf) == 1
    assert worker() == 7
    assert [line.pid for line in channel.subscribers()] == [os.getpid()]


def test_a_parents_lease_ends_with_the_parent_though_the_child_lives(channel, subscriber) -> None:
    """The child's own hold on the slot is the child's; what the parent takes later is not kept by it."""
    follower = subscriber(channel)
    child = Child(lambda wait: wait())
    push_on(channel, count=1)
    lease = follower.lease()
    lease.close()
    follower.close()
    push_on(channel, count=8)
    assert channel.stats()["slots"] == 2
    child.go()
    child.result()


def test_a_lease_is_held_by_both_and_ends_with_the_later(channel, subscriber) -> None:
    follower = subscriber(channel)
    lease = follower.lease()

    def body(wait: Callable[[], None]) -> float:
        wait()
        return uniform(lease.weights)

    child = Child(body)
    lease.close()
    push_on(channel)
    assert channel.stats()["slots"] == 3
    child.go()
    assert child.result() == "1.0"
    push_on(channel)
    assert channel.stats()["slots"] == 3


def test_the_child_is_on_the_roster_under_its_own_pid(channel, subscriber) -> None:
    """And not as the worker that its parent is: what it uses is nobody's lag. Mutant: let it be counted."""
    follower = subscriber(channel, worker_id=3, name="parent")
    child = Child(lambda wait: (follower.lease().close(), wait(), follower.worker_id)[-1])
    deadline = time.monotonic() + 30
    while len(lines := channel.subscribers()) < 2 and time.monotonic() < deadline:
        time.sleep(0.002)
    assert {(line.pid, line.worker_id) for line in lines} == {(os.getpid(), 3), (child.pid, None)}
    child.go()
    assert child.result() == "3"
    assert [line.pid for line in channel.subscribers()] == [os.getpid()]


def test_a_full_roster_takes_no_weights_from_the_child(publisher, subscriber) -> None:
    """It goes on without a line. Mutant: insist on one."""
    channel = publisher(filled(SHAPES, 0), max_subscribers=1)
    channel.publish(filled(SHAPES, 1))
    follower, worker = subscriber(channel), Policy()
    follower.bind(worker)

    def body(wait: Callable[[], None]) -> list:
        wait()
        return [uniform(worker.leaf), worker(), follower.wait(1) > 0]

    child = Child(body)
    push_on(channel, follower.refresh)
    child.go()
    assert child.result() == "[1.0, 7.0, True]"


class Failing:
    """What fails in a child."""

    def try_before_fork(self) -> bool:
        return True

    def after_fork_in_parent(self) -> None:
        pass

    def after_fork_in_child(self) -> None:
        raise OSError("no descriptors left")


def test_one_that_fails_in_the_child_leaves_no_other_locked(channel, subscriber, monkeypatch) -> None:
    """Whichever comes first. Mutant: end at the first error."""
    followers, failing = [subscriber(channel) for _ in range(2)], Failing()
    monkeypatch.setattr(forks, "_known", [followers[0], failing, followers[1]])
    child = Child(lambda wait: [follower.lease().version for follower in followers])
    assert child.result() == "[1, 1]"


def test_one_that_only_watches_does_so_in_the_child_too(channel, subscriber) -> None:
    watcher = subscriber(channel, listed=False)
    child = Child(lambda wait: (watcher.seen, len(watcher.peers())))
    assert child.result() == "(1, 0)"


def test_the_owner_is_not_alive_in_its_children(peer, nothing_left) -> None:
    """A trainer that forked something and is killed has gone, whatever the child does."""
    trainer = peer()
    handle, child = trainer.call(own_and_fork)
    with Subscriber(handle) as follower:
        assert follower.publisher_alive()
        trainer.kill()
        assert os.path.exists(f"/proc/{child}"), "the child must still live for this to prove anything"
        assert not follower.publisher_alive()
    os.kill(child, signal.SIGKILL)


def own_and_fork(state) -> tuple[str, int]:
    state.channel = Publisher(filled(SHAPES, 1))
    state.channel.publish()
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        signal.pause()
        os._exit(0)
    return str(state.channel.handle), child


def bind_and_fork(state, handle: str) -> int:
    """A worker that forks something at version 1 and then goes on to the newest; the child's pid."""
    state.follower, state.worker = Subscriber(handle), Policy()
    state.follower.bind(state.worker)
    assert state.worker() == 1
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        signal.pause()
        os._exit(0)
    return child


def take_the_news(state) -> float:
    return state.worker()


def test_what_a_killed_worker_took_after_a_fork_is_free_though_its_child_lives(channel, peer) -> None:
    """The child has its own hold on version 1, and none on what the parent took later."""
    worker = peer()
    child = worker.call(bind_and_fork, str(channel.handle))
    push_on(channel, count=1)
    assert worker.call(take_the_news) == 2
    worker.kill()
    push_on(channel, count=8)
    assert channel.stats()["slots"] == 3
    os.kill(child, signal.SIGKILL)


def test_the_publishers_slots_are_not_inherited(channel) -> None:
    """No page of them is copied on the trainer's next write because a child has it, too."""
    child = Child(lambda wait: (len(probes.segment_maps()), len(probes.segment_descriptors())))
    assert child.result() == "(0, 0)"


def test_a_fork_in_the_middle_of_a_forward(channel, subscriber) -> None:
    """The forking thread is inside in the child as well, and comes out there."""
    follower = subscriber(channel)

    class Forking(Policy):
        child: Child | None = None

        def forward(self) -> float:
            if self.child is None:
                self.child = Child(lambda wait: (super(Forking, self).forward(), wait())[0])
            return super().forward()

    worker = Forking()
    follower.bind(worker)
    assert worker() == 1
    push_on(channel, follower.refresh)
    assert worker() == 7
    worker.child.go()
    assert worker.child.result() == "1.0"


def test_a_fork_waits_for_a_switch(channel, subscriber, monkeypatch) -> None:
    """In the middle of one the child would have a lease more than it knows of. Mutant: fork at any time."""
    follower, worker = subscriber(channel), Policy()
    binding = follower.bind(worker)
    point, in_switch, go_on = binding._targets.point, threading.Event(), threading.Event()

    def slow(*args: object) -> object:
        in_switch.set()
        go_on.wait(20)
        return point(*args)

    monkeypatch.setattr(binding._targets, "point", slow)
    channel.publish()
    switching = threading.Thread(target=follower.refresh)
    switching.start()
    assert in_switch.wait(20)
    threading.Timer(0.2, go_on.set).start()
    child = Child(lambda wait: dict(follower._data.holder.counts))
    switching.join()
    assert child.result().endswith(": 1}")


def test_a_dead_worker_is_off_the_roster_though_its_child_lives(channel, peer) -> None:
    """Mutant: leave the parent's mapping of CTL in the child."""
    worker = peer()
    child = worker.call(bind_and_fork, str(channel.handle))
    try:
        worker.kill()
        wait_for(lambda: [line.pid for line in channel.subscribers()] == [child], "the child alone on the roster")
    finally:
        os.kill(child, signal.SIGKILL)


def test_forks_do_not_add_up(channel, subscriber) -> None:
    follower, worker = subscriber(channel), Policy()
    follower.bind(worker)
    push_on(channel, worker)
    before = probes.footprint()
    for _ in range(20):
        assert Child(lambda wait: worker()).result() == repr(float(channel.version))
        push_on(channel, worker, count=1)
    after = probes.footprint()
    assert after.descriptors == before.descriptors
    assert after.mappings <= before.mappings + 2  # of Python's own allocator
    assert channel.stats()["slots"] <= 3


def test_a_fork_waits_for_a_publisher_that_is_being_made(monkeypatch) -> None:
    """Or the child would keep its owner's lock, and nobody would notice the trainer's death. Mutant: watch it only
    when it is made."""
    from shmsync import Publisher
    from shmsync.leases import Locks

    own, children = Locks.own, []

    def fork() -> None:
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
        children.append(child)

    thread = threading.Thread(target=fork)

    def own_and_be_forked(self: Locks) -> bool:
        owned = own(self)
        thread.start()
        time.sleep(0.2)
        assert not children
        return owned

    monkeypatch.setattr(Locks, "own", own_and_be_forked)
    channel = Publisher({"leaf": torch.zeros(1)})
    thread.join(20)
    try:
        with Subscriber(channel.handle) as follower:
            assert follower.publisher_alive()
            channel.close()
            wait_for(lambda: not follower._locks.owner_alive(), "the child to let it go")
    finally:
        os.kill(children[0], signal.SIGKILL)
        os.waitpid(children[0], 0)


def test_the_childs_line_says_which_version_it_has_from_its_parent(channel, subscriber) -> None:
    """For who looks who holds a slot, before it has made a forward. Mutant: a line that begins with nothing."""
    follower = subscriber(channel)
    lease = follower.lease()
    child = Child(lambda wait: (wait(), lease.version)[-1])
    wait_for(lambda: len(channel.subscribers()) == 2, "the child's line")
    expected = {(os.getpid(), 1, 0), (child.pid, 1, 0)}
    wait_for(lambda: {(line.pid, line.used, line.lag) for line in channel.subscribers()} == expected, "its version")
    child.go()
    assert child.result() == "1"
    lease.close()
