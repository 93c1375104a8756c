"""A subscriber goes over to a later channel, its modules with it; whole, or not at all.

Mutants: take any epoch; open a channel anew that is followed already; look at the layout after the move; keep the
leases' counts; let the old channel switch meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shmsync import (
    ChannelClosed,
    ChannelError,
    LayoutMismatch,
    PublisherGone,
    ShmSyncError,
    SubscribersExhausted,
    WaitTimeout,
    moving,
    remote,
)
from tests.helpers import probes
from tests.helpers.models import fill, uniform
from tests.helpers.trainers import wait_for


def policy(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))


class Pair:
    """An older channel with a bound subscriber, and a later one."""

    def __init__(self, publisher: Any, subscriber: Any, **options: Any) -> None:
        self.source = policy()
        self.old, self.new = publisher(self.source, **options), publisher(self.source, **options)
        self.old.publish(fill(self.source, 5))
        self.old.publish()
        self.follower, self.module = subscriber(self.old, worker_id=1), policy().eval()
        self.binding = self.follower.bind(self.module)

    def move(self) -> int:
        return self.follower.reattach(str(self.new.handle))


@pytest.fixture(params=["memfd", "file"])
def pair(request, folder, publisher, subscriber) -> Pair:
    return Pair(publisher, subscriber, storage=request.param)


def test_modules_come_along(pair) -> None:
    pair.new.publish(fill(pair.source, 7))
    tensors = [*pair.module.parameters()]
    assert pair.move() == 1
    assert (pair.follower.handle, pair.binding.version, uniform(pair.module)) == (pair.new.handle, 1, 7)
    assert all(a is b for a, b in zip(tensors, pair.module.parameters(), strict=True))
    pair.new.publish(fill(pair.source, 8))
    pair.module(torch.zeros(1, 8))
    assert (pair.binding.version, uniform(pair.module)) == (2, 8)
    pair.old.publish(fill(pair.source, 9))
    pair.module(torch.zeros(1, 8))
    assert uniform(pair.module) == 8


def test_its_line_is_on_the_later_roster_and_no_other(pair) -> None:
    pair.new.publish()
    before = pair.follower._line
    pair.move()
    assert pair.old.subscribers() == [], "whatever keeps its line"
    assert before is not None
    (line,) = pair.new.subscribers()
    assert (line.worker_id, line.name, line.used) == (1, pair.follower.name, 1)
    pair.module(torch.zeros(1, 8))
    assert pair.new.subscribers()[0].forwards == 1


def test_the_older_channels_memory_is_let_go(pair) -> None:
    pair.move()
    before = probes.footprint()
    pair.old.close()
    after = probes.footprint()
    assert after.descriptors < before.descriptors
    assert pair.follower.stats()["slots_leased"] == 0


def test_without_weights_there_the_values_stay(pair) -> None:
    assert pair.move() == 0
    pair.old.publish(fill(pair.source, 9))
    pair.module(torch.zeros(1, 8))
    assert (pair.binding.version, uniform(pair.module)) == (0, 5)
    pair.new.publish(fill(pair.source, 6))
    pair.module(torch.zeros(1, 8))
    assert (pair.binding.version, uniform(pair.module)) == (1, 6)


def test_an_older_channel_is_refused(pair) -> None:
    pair.new.publish(fill(pair.source, 7))
    pair.move()
    pair.old.publish()
    with pytest.raises(ChannelError, match=rf"later channel.*epoch {pair.new.handle.epoch}"):
        pair.follower.reattach(pair.old.handle)
    assert (pair.binding.version, uniform(pair.module)) == (1, 7)


def test_its_own_channel_is_a_refresh(pair) -> None:
    """Also with a lease that is held."""
    with pair.follower.lease():
        pair.old.publish(fill(pair.source, 6))
        assert pair.follower.reattach(pair.old.handle) == pair.old.version
        assert uniform(pair.module) == 6
    assert len(pair.old.subscribers()) == 1


def test_after_the_publishers_death(peer, publisher, subscriber) -> None:
    trainer, module = peer(), policy().eval()
    follower = subscriber(trainer.call(lead))
    binding = follower.bind(module)
    pid = trainer.pid
    trainer.kill()
    with pytest.raises(PublisherGone, match=rf"pid {pid}.*version 1"):
        follower.wait(2, timeout=10)
    assert uniform(module) == 3
    later = publisher(fill(policy(), 4))
    later.publish()
    assert follower.reattach(later.handle) == binding.version == 1
    assert uniform(module) == 4
    assert follower.publisher_alive()


def lead(state: Any) -> Any:
    from shmsync import Publisher

    state.channel = Publisher(fill(policy(), 3))
    state.channel.publish()
    return state.channel.handle


def test_a_module_that_does_not_fit_changes_nothing(pair, publisher) -> None:
    other = publisher(policy(9))
    other.publish()
    with pytest.raises(LayoutMismatch, match="shape") as kept:
        pair.follower.reattach(other.handle)
    works_as_before(pair)
    assert other.subscribers() == [], "whatever keeps the traceback"
    assert kept.tb is not None


def test_a_full_roster_changes_nothing(pair, publisher, subscriber) -> None:
    other = publisher(pair.source, max_subscribers=2)
    crowd = [subscriber(other), subscriber(other)]
    with pytest.raises(SubscribersExhausted):
        pair.follower.reattach(other.handle)
    assert len(crowd) == 2
    works_as_before(pair)


def test_a_closed_channel_changes_nothing(pair) -> None:
    handle = pair.new.handle
    pair.new.close()
    with pytest.raises(PublisherGone):
        pair.follower.reattach(handle)
    works_as_before(pair)


def works_as_before(pair: Pair) -> None:
    pair.old.publish(fill(pair.source, 6))
    pair.module(torch.zeros(1, 8))
    assert (pair.follower.handle, uniform(pair.module)) == (pair.old.handle, 6)


def test_held_leases_are_refused_and_named(pair) -> None:
    lease = pair.follower.lease()
    version = pair.follower.version
    with pytest.raises(ShmSyncError, match=r"holds 1 lease"):
        pair.move()
    assert [binding.version for binding in pair.follower._bindings] == [version]  # not even left for a moment
    works_as_before(pair)
    lease.close()
    del lease
    assert pair.move() == 0


class Meanwhile:
    """Something that another thread begins in the middle of a move, when the modules have left their slots."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, action: Callable[[], Any]) -> None:
        self.results: list[Any] = []
        self.thread = threading.Thread(target=lambda: self.results.append(result_of(action)))
        adopt = moving._adopt

        def begin_and_adopt(*args: Any) -> None:
            self.thread.start()
            time.sleep(0.1)
            assert not self.results, "it did not wait"
            adopt(*args)

        monkeypatch.setattr(moving, "_adopt", begin_and_adopt)

    def result(self) -> Any:
        self.thread.join(20)
        return self.results[0]


def result_of(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except Exception as error:
        return error


def test_a_lease_of_another_thread_is_one_of_the_later_channel(pair, monkeypatch) -> None:
    """Mutant: let it have the older channel's, whose lock ends with the move."""
    pair.new.publish(fill(pair.source, 7))
    meanwhile = Meanwhile(monkeypatch, pair.follower.lease)
    pair.move()
    lease = meanwhile.result()
    for value in range(20, 26):
        pair.old.publish(fill(pair.source, value))
        pair.new.publish(fill(pair.source, value))
    assert (lease.version, uniform(lease.weights["0"])) == (1, 7)
    meanwhile.results.clear()


def test_a_module_that_another_thread_binds_follows_the_later_channel(publisher, subscriber, monkeypatch) -> None:
    """Which numbers its leaves otherwise. Mutant: bind at any time."""
    old, new = other_order(publisher)
    follower, module = subscriber(old), two_leaves()
    meanwhile = Meanwhile(monkeypatch, lambda: follower.bind(module))
    follower.reattach(new.handle)
    assert meanwhile.result().version == 1
    assert (uniform([module.one]), uniform([module.two])) == (10, 20)


def test_a_close_of_another_thread_ends_the_later_channels_line_too(pair, monkeypatch) -> None:
    meanwhile = Meanwhile(monkeypatch, pair.follower.close)
    with contextlib.suppress(ChannelClosed):
        pair.move()
    assert meanwhile.result() is None
    assert pair.new.subscribers() == pair.old.subscribers() == []


def test_two_moves_at_once_end_on_the_latest(pair, publisher, monkeypatch) -> None:
    """One of them is refused if it comes too late. Mutant: compare the epochs before it is one's turn."""
    latest = publisher(pair.source)
    latest.publish(fill(pair.source, 9))
    pair.new.publish(fill(pair.source, 8))
    meanwhile = Meanwhile(monkeypatch, lambda: pair.follower.reattach(pair.new.handle))
    pair.follower.reattach(latest.handle)
    assert isinstance(meanwhile.result(), ChannelError)
    pair.module(torch.zeros(1, 8))
    assert (pair.follower.handle, uniform(pair.module)) == (latest.handle, 9)


def test_a_fork_of_another_thread_waits_for_the_move(pair, monkeypatch) -> None:
    """Its child follows the later channel, with a line of its own. Mutant: fork in the middle."""
    pair.new.publish(fill(pair.source, 7))
    reader, writer = os.pipe()

    def fork() -> int:
        child = os.fork()
        if not child:
            pair.module(torch.zeros(1, 8))
            os.write(writer, f"{pair.binding.version} {uniform(pair.module)}".encode())
            os._exit(0)
        return child

    meanwhile = Meanwhile(monkeypatch, fork)
    pair.move()
    os.waitpid(meanwhile.result(), 0)
    assert os.read(reader, 100) == b"1 7.0"
    for fd in (reader, writer):
        os.close(fd)


@pytest.mark.parametrize("how", ["forward", "hold"])
def test_in_the_middle_of_a_forward_it_is_refused(pair, how) -> None:
    """What the forward returns could alias the slot that is left. Mutant: look at other threads only."""
    refused: list[Any] = []
    pair.module[0].register_forward_hook(lambda *_: refused.append(result_of(pair.move)))
    if how == "forward":
        pair.module(torch.zeros(1, 8))
    else:
        with pair.binding.hold():
            refused.append(result_of(pair.move))
    assert isinstance(refused[0], ShmSyncError)
    works_as_before(pair)


def test_a_forward_that_does_not_end_is_waited_for_and_then_said(pair, monkeypatch) -> None:
    """Nothing has changed then. Mutant: go on in its middle."""
    monkeypatch.setattr("shmsync.gate.UNBIND_PATIENCE_SECONDS", 0.3)
    inside, end = threading.Event(), threading.Event()

    def run() -> None:
        with pair.binding.hold():
            inside.set()
            end.wait(20)

    thread = threading.Thread(target=run)
    thread.start()
    inside.wait(20)
    with pytest.raises(WaitTimeout, match=r"0\.3 s"):
        pair.move()
    end.set()
    thread.join()
    works_as_before(pair)
    assert pair.new.subscribers() == []


def test_forwards_that_overlap_do_not_keep_it_out(pair, monkeypatch) -> None:
    """Two threads of which one is always inside. Mutant: let newcomers in while it waits."""
    monkeypatch.setattr("shmsync.gate.UNBIND_PATIENCE_SECONDS", 5.0)
    end = threading.Event()

    def run(turn: int) -> None:
        time.sleep(0.01 * turn)
        while not end.is_set():
            with pair.binding.hold():
                time.sleep(0.02)

    threads = [threading.Thread(target=run, args=(turn,)) for turn in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    try:
        pair.move()
    finally:
        end.set()
        for thread in threads:
            thread.join()


def test_a_closed_subscriber_stays_closed(pair) -> None:
    pair.follower.close()
    with pytest.raises(ChannelClosed):
        pair.move()


def test_no_forward_sees_two_channels_or_goes_back(pair) -> None:
    """Forwards go on in another thread, while both publishers publish and the follower moves."""
    linear, end, seen, torn = pair.module[0], threading.Event(), [], []

    def run() -> None:
        while not end.is_set():
            with pair.binding.hold():
                values = {t.item() for p in linear.parameters() for t in torch.aminmax(p.detach())}
            seen.append(min(values))
            if len(values) > 1:
                torn.append(values)

    thread = threading.Thread(target=run)
    thread.start()
    for value in range(10, 40):
        pair.old.publish(fill(pair.source, value))
    pair.new.publish(fill(pair.source, 100))
    pair.move()
    for value in range(101, 140):
        pair.old.publish(fill(pair.source, 1))
        pair.new.publish(fill(pair.source, value))
    wait_for(lambda: seen and seen[-1] == 139, "the last version")
    end.set()
    thread.join()
    assert torn == []
    assert seen == sorted(seen)


def test_a_listener_goes_over_too(pair) -> None:
    """As with a push: the attached worker hears the later channel's bell."""
    from shmsync.listener import Listener

    answers: list[int] = []

    class Reacting:
        def react(self) -> tuple[int, int]:
            answers.append(pair.follower.refresh())
            return answers[-1], answers[-1]

    reacting = Reacting()
    listener = Listener(pair.follower, reacting.react)
    pair.new.publish()
    pair.move()
    pair.new.publish()
    wait_for(lambda: pair.new.answer(1, os.getpid()) == (2, 2), "an answer on the later roster", timeout=0.9)
    listener.end()


def test_an_rpc_worker_refuses_the_trainer_before_its_own(pair) -> None:
    """The one that comes later may take it over, the one before it not any more."""
    target = policy()
    remote.attach_object(target, str(pair.new.handle), 0)
    try:
        with pytest.raises(ChannelError, match="later channel"):
            remote.attach_object(target, str(pair.old.handle), 0)
        pair.new.publish(fill(pair.source, 4))
        assert remote.notify(pair.new.handle.nonce, 0, 1) == (1, 1)
    finally:
        remote.forget(target)
    remote.attach_object(target, str(pair.old.handle), 0)  # it follows nobody any more
    remote.forget(target)


def two_leaves() -> nn.Module:
    module = nn.Module()
    for name in ("one", "two"):
        module.register_parameter(name, nn.Parameter(torch.zeros(4)))
    return module


def other_order(publisher: Any) -> Any:
    """A channel, and a later one with the same names in another order."""
    old = publisher({"one": torch.full((4,), 1.0), "two": torch.full((4,), 2.0)})
    new = publisher({"two": torch.full((4,), 20.0), "one": torch.full((4,), 10.0)})
    for channel in (old, new):
        channel.publish()
    return old, new


def test_a_channel_that_numbers_its_leaves_otherwise(publisher, subscriber) -> None:
    """The names count. Mutant: keep the numbers of the older channel."""
    old, new = other_order(publisher)
    follower, module = subscriber(old), two_leaves()
    follower.bind(module)
    assert (uniform([module.one]), uniform([module.two])) == (1, 2)
    follower.reattach(new.handle)
    assert (uniform([module.one]), uniform([module.two])) == (10, 20)
