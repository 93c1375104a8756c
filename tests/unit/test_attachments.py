"""What runs in a worker process, without RPC: attachments, and the listener that answers the bell for them.

Mutants: say after the switch what has been seen; do not wait for the listener's end; let it outlive its channel.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch import nn

from shmsync import SubscribersExhausted, remote
from tests.helpers.models import fill, uniform
from tests.helpers.trainers import wait_for


class Local:
    """An RRef of something in this process."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def local_value(self) -> Any:
        return self.value


@pytest.fixture
def attached(nothing_left):
    """Attaches modules to channels, and detaches them at the end."""
    made: list[tuple[str, int]] = []

    def attach(channel: Any, module: nn.Module, worker_id: int = 0, listening: bool = True) -> Any:
        made.append((channel.handle.nonce, worker_id))
        return remote.attach(Local(module), str(channel.handle), worker_id, listening)

    yield attach
    for nonce, worker_id in made:
        remote.detach(nonce, worker_id)


def policy() -> nn.Module:
    return nn.Linear(3, 3)


def listeners() -> int:
    return sum(thread.name.startswith("shmsync-listener") for thread in threading.enumerate())


def test_a_version_that_comes_during_a_switch_is_not_answered_for(publisher, attached) -> None:
    """It is in use a moment later, and has an answer of its own."""
    source = policy()
    channel = publisher(fill(source, 1))
    channel.publish()
    assert attached(channel, policy(), listening=False)[:2] == (1, 1)
    attachment = remote.attached_as(channel.handle.nonce, 0)
    refresh = attachment._binding.follow

    def overtaken() -> int:
        used = refresh()
        channel.publish()
        return used

    attachment._binding.follow = overtaken
    channel.publish()
    assert attachment.notified() == (2, 2)
    del attachment._binding.follow
    assert attachment.notified() == (3, 3)


def test_detaching_and_attaching_again_needs_no_second_line(publisher, attached) -> None:
    source = policy()
    channel = publisher(fill(source, 1), max_subscribers=1)
    channel.publish()
    module = policy()
    for _ in range(30):
        assert attached(channel, module)[:2] == (1, 1)
        remote.detach(channel.handle.nonce, 0)
    assert listeners() == 0


def test_another_object_of_the_same_worker_takes_its_line(publisher, attached) -> None:
    """Where there is no other; the first one goes on by itself."""
    source = policy()
    channel = publisher(fill(source, 1), max_subscribers=1)
    channel.publish()
    first, second = policy(), policy()
    attached(channel, first)
    assert attached(channel, second)[:2] == (1, 1)
    channel.publish(fill(source, 2))
    assert remote.notify(channel.handle.nonce, 0, 2) == (2, 2)
    assert (uniform(first), uniform(second)) == (1, 2)


def test_a_full_roster_is_an_error_for_a_new_worker(publisher, attached) -> None:
    channel = publisher(policy(), max_subscribers=1)
    channel.publish()
    attached(channel, policy())
    said = attached(channel, policy(), worker_id=0)
    assert said[:2] == (1, 1)
    with pytest.raises(SubscribersExhausted):
        remote.attach_object(policy(), str(channel.handle), 0, lambda target, subscribe: (subscribe(), subscribe())[0])


def test_a_listener_ends_with_its_publisher(publisher, attached) -> None:
    channel = publisher(policy())
    channel.publish()
    attached(channel, policy())
    assert listeners() == 1
    channel.close()
    wait_for(lambda: listeners() == 0, "the end of the listener")


def test_a_listener_answers_for_what_it_has_done(publisher, attached) -> None:
    """With its pid, so that nobody takes it for another process's. Mutant: answer before reacting."""
    import os

    source, module = policy(), policy()
    channel = publisher(fill(source, 1))
    channel.publish()
    attached(channel, module)
    for version in range(2, 30):
        channel.publish(fill(source, version))
        wait_for(lambda version=version: channel.answer(0, os.getpid()) == (version, version), "the answer")
        assert uniform(module) == version


END = """
import sys, torch
from shmsync import Publisher, Subscriber
from shmsync.listener import Listener

class Copying:
    def __init__(self):
        self.begun = False
        self.pair = torch.zeros(20_000_000), torch.zeros(20_000_000)

    def react(self):
        self.begun = True
        for _ in range(8):
            torch._foreach_copy_([self.pair[0]], [self.pair[1]])
        return 0, 0

torch.set_num_threads(1)
channel = Publisher({"w": torch.zeros(3)})
follower, copying = Subscriber(channel.handle), Copying()
listener = Listener(follower, copying.react)
while not copying.begun:
    pass
"""


def test_a_process_may_end_while_its_listener_copies() -> None:
    """torch aborts a process whose thread comes out of a copy when the interpreter is gone."""
    done = subprocess.run([sys.executable, "-c", END], check=False, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")


class Owner:
    """What a worker owns: something that has a policy."""

    def __init__(self) -> None:
        self.policy: nn.Module = policy()


def test_a_policy_that_does_not_fit_for_a_while(publisher, attached) -> None:
    """It is an error at every notification, and its end brings the worker up again. Mutant: let the old policy go
    before the new one is bound."""
    owner, source = Owner(), policy()
    channel = publisher(fill(source, 1))
    channel.publish()
    attached(channel, owner, listening=False)
    own, owner.policy = owner.policy, nn.Linear(3, 5)
    for version in (2, 3):
        channel.publish(fill(source, version))
        assert remote.notify(channel.handle.nonce, 0, version)[0] == "LayoutMismatch"
    owner.policy = own
    assert remote.notify(channel.handle.nonce, 0, 3) == (3, 3)
    assert uniform(own) == 3
    channel.publish(fill(source, 4))
    own(torch.zeros(next(own.parameters()).shape[-1]))
    assert uniform(own) == 4
