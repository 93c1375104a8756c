"""A worker is killed at every step of attaching, of a switch, of a lease and of its end; nobody else notices.

The trainer goes on, with no more slots than before; the other worker has every version, whole; the dead one's line is
free for its successor. Mutants: hold leases by a counter in shared memory; claim a line by writing a pid into it.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import shmsync
from shmsync import faults
from tests.crash.support import killed
from tests.helpers import workers
from tests.helpers.models import fill, uniform


def policy() -> nn.Module:
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))


def live_until_killed(state: Any, handle: str, step: str) -> None:
    """Attach, take versions and leases as they come, and leave: somewhere in there is the step."""
    faults.arm(step)
    live(handle)


def live(handle: str) -> None:
    module = policy()
    with shmsync.Subscriber(handle, worker_id=1) as follower:
        follower.bind(module)
        for _ in range(3):
            follower.wait(follower.version + 1, 30)
            with follower.lease():
                follower.refresh()
                assert uniform(module) == follower.version


def look(state: Any) -> tuple[int, float]:
    state.subscriber.refresh()
    return state.binding.version, uniform(state.module)


STEPS = [
    *("attach.open", "attach.claim", "attach.claimed", "attach.data", "attach.slot", "attach.slot:2"),
    *("subscribe.enter", "subscribe.load_row", "subscribe.load_row:4", "subscribe.try_shared"),
    *("subscribe.try_shared:3", "subscribe.load_slot_version", "subscribe.load_slot_version:3"),
    *("subscribe.drop_private", "subscribe.drop_private:3", "subscribe.point", "subscribe.point:2"),
    *("subscribe.leave", "subscribe.leave:4", "subscribe.unlock", "close.unbind", "close.let_go"),
]


@pytest.mark.parametrize("step", STEPS)
def test_the_others_go_on(publisher, peer, step: str) -> None:
    source = policy()
    channel = publisher(fill(source, 1), max_subscribers=2)
    channel.publish()
    other, victim = peer(), peer()
    other.call(workers.attach, str(channel.handle), policy, 0)
    victim.start(live_until_killed, str(channel.handle), step)
    while not killed(victim):
        channel.publish(fill(source, channel.version + 1))
        assert other.call(look) == (channel.version, float(channel.version))
    for _ in range(8):
        channel.publish(fill(source, channel.version + 1))
        assert other.call(look) == (channel.version, float(channel.version))
    for _ in range(70):  # those that the two of them needed together have been given back by then
        channel.publish(fill(source, channel.version + 1))
    assert channel.stats()["slots"] <= 3
    assert [line.pid for line in channel.subscribers()] == [other.pid]
    successor = peer()
    assert successor.call(workers.attach, str(channel.handle), policy, 1) == channel.version
    assert successor.call(look) == (channel.version, float(channel.version))


def steps_of_a_life(state: Any, handle: str) -> set[str]:
    faults.arm("nowhere")
    live(handle)
    return {step for step in faults.steps if step.split(".")[0] in ("attach", "subscribe", "close")}


def test_every_step_is_killed_at(publisher, peer) -> None:
    """No step of a subscriber is missing above, but looking again, which takes a publisher in between."""
    source = policy()
    channel = publisher(fill(source, 1))
    channel.publish()
    one = peer()
    one.start(steps_of_a_life, str(channel.handle))
    while not one.done():
        channel.publish(fill(source, channel.version + 1))
    assert one.result() - {"subscribe.again"} == {step.partition(":")[0] for step in STEPS}
