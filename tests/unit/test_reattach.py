"""A subscriber goes over to a later channel, its modules with it; whole, or not at all.

Mutants: take any epoch; look at the layout after the move; keep the leases' counts; let the old channel switch
meanwhile.
"""

from __future__ import annotations

import threading
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
    Subscriber,
    SubscribersExhausted,
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
    for handle in (pair.old.handle, pair.new.handle):
        with pytest.raises(ChannelError, match=rf"later channel.*epoch {pair.new.handle.epoch}"):
            pair.follower.reattach(handle)
    assert (pair.binding.version, uniform(pair.module)) == (1, 7)


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
    with pytest.raises(ShmSyncError, match=r"holds 1 lease"):
        pair.move()
    works_as_before(pair)
    lease.close()
    del lease
    assert pair.move() == 0


def test_a_lease_that_ends_after_the_move_ends_no_other(pair, monkeypatch) -> None:
    """It was taken in the middle of it, by another thread. Mutant: count it in the later channel."""
    from shmsync import moving

    adopt, taken = moving.adopt, []

    def take_and_adopt(*args: Any) -> None:
        taken.append(pair.follower.lease())
        adopt(*args)

    monkeypatch.setattr(moving, "adopt", take_and_adopt)
    pair.new.publish()
    pair.move()
    taken.clear()
    assert pair.follower.stats()["slots_leased"] == 1
    pair.new.publish(fill(pair.source, 8))
    pair.module(torch.zeros(1, 8))
    assert (pair.follower.stats()["slots_leased"], uniform(pair.module)) == (1, 8)


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
    import os

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


def test_a_channel_that_numbers_its_leaves_otherwise(publisher) -> None:
    """The names count. Mutant: keep the numbers of the older channel."""
    source = {"one": torch.full((4,), 1.0), "two": torch.full((4,), 2.0)}
    module = nn.Module()
    for name, value in source.items():
        module.register_parameter(name, nn.Parameter(torch.zeros_like(value)))
    old = publisher(source)
    new = publisher({"two": torch.full((4,), 20.0), "one": torch.full((4,), 10.0)})
    for channel in (old, new):
        channel.publish()
    with Subscriber(old.handle) as follower:
        follower.bind(module)
        assert (uniform([module.one]), uniform([module.two])) == (1, 2)
        follower.reattach(new.handle)
        assert (uniform([module.one]), uniform([module.two])) == (10, 20)
