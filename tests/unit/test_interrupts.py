"""Signals whose handlers raise, at any moment of a worker's forward: later forwards still take every new version.

Mutants: count a forward out where it began, not where it ends; take the mutex again that an interrupt has left behind.
"""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest
import torch
from torch import nn

from shmsync import Publisher, Subscriber
from tests.helpers.models import fill, uniform

ROUNDS = 1500


class Interrupt(Exception):
    pass


def policy() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def live_with_interrupts(_: Any, switching: bool) -> tuple[int, bool]:
    """Publish and run forwards, and be interrupted in them: how often, and whether one goes on at the end."""

    def interrupt(*_: object) -> None:
        raise Interrupt

    signal.signal(signal.SIGALRM, interrupt)
    source, module, x = policy(), policy(), torch.ones(1, 2)
    channel = Publisher(source)
    binding = Subscriber(channel.handle).bind(module)
    interrupts = 0
    for number in range(1, ROUNDS + 1):
        channel.publish(fill(source, number))
        if not switching:
            module(x)
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, 2e-5 + number % 50 * 4e-6)
                for _ in range(4):
                    module(x)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except Interrupt:  # the timer has run out then
            interrupts += 1
        module(x)
        assert (binding.version, uniform(module)) == (number, number), f"after {interrupts} interrupts"
    return interrupts, binding.inside()


@pytest.mark.parametrize("switching", [False, True], ids=["forwards", "switches"])
def test_an_interrupted_forward_is_over(peer, switching) -> None:
    """In a process of its own: a slot may stay leased there that a switch was about to leave."""
    interrupts, inside = peer().call(live_with_interrupts, switching, timeout=30)
    assert interrupts > ROUNDS // 20
    assert not inside


def test_a_mutex_that_was_left_locked_is_taken_over(publisher, subscriber) -> None:
    """By the thread that it was left to, at its next switch; then the others go on too."""
    source, module = policy(), policy()
    channel = publisher(source)
    channel.publish(fill(source, 1))
    follower = subscriber(channel)
    follower.bind(module)
    channel.publish(fill(source, 2))
    follower._mutex.acquire()  # as an exception leaves it, between the lock and the next line
    others: list[int] = []
    thread = threading.Thread(target=lambda: others.append(follower.lease().version), daemon=True)
    thread.start()
    module(torch.ones(1, 2))
    thread.join(20)
    assert others == [2]
    assert uniform(module) == 2


def test_an_exception_in_the_middle_of_leaving_does_not_count_as_inside(publisher, subscriber, monkeypatch) -> None:
    module = policy()
    channel = publisher(module)
    binding = subscriber(channel).bind(policy())
    leave, raised = binding._gate.leave, []

    def once(depth: int) -> None:
        if not raised:
            raised.append(depth)
            raise Interrupt
        leave(depth)

    monkeypatch.setattr(binding._gate, "leave", once)
    with pytest.raises(Interrupt), binding.hold():
        pass
    assert not binding.inside()
