"""Forks beside threads that are in the middle of something, whatever locks they hold already and still want.

Mutants: wait for one lock while another is held; let an interrupt end the preparations of a fork.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shmsync

FORKS = 60


def publishing_first_weights(stop: threading.Event) -> None:
    weights = {f"l{i}": torch.ones(64) for i in range(300)}
    while not stop.is_set():
        with shmsync.Publisher(max_subscribers=4) as publisher:
            publisher.publish(weights)


def moving_to_other_channels(stop: threading.Event) -> None:
    weights = {"x": torch.ones(8)}
    with shmsync.Publisher(weights, max_subscribers=4) as first:
        first.publish()
        with shmsync.Subscriber(first.handle) as subscriber:
            while not stop.is_set():
                with shmsync.Publisher(weights, max_subscribers=4) as publisher:
                    publisher.publish()
                    subscriber.reattach(publisher.handle)


def moving_a_module_between_subscribers(stop: threading.Event) -> None:
    module = nn.Linear(8, 8)
    with shmsync.Publisher(module, max_subscribers=4) as publisher:
        publisher.publish()
        with shmsync.Subscriber(publisher.handle) as one, shmsync.Subscriber(publisher.handle) as other:
            while not stop.is_set():
                one.bind(module)
                other.bind(module)


def fork_beside(_: Any, busy: Callable[[threading.Event], None]) -> int:
    stop = threading.Event()
    thread = threading.Thread(target=busy, args=(stop,))
    thread.start()
    done = 0
    for _ in range(FORKS):
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
        done += 1
        time.sleep(0.002)
    stop.set()
    thread.join(30)
    return done


@pytest.mark.parametrize(
    "busy", [publishing_first_weights, moving_to_other_channels, moving_a_module_between_subscribers]
)
def test_a_fork_beside_a_thread_that_is(peer, busy) -> None:
    assert peer().call(fork_beside, busy, timeout=60.0) == FORKS


def fork_and_be_interrupted(_: Any, handle: str) -> list[Any]:
    """In the middle of a fork that waits for a publish, which waits for a slot."""
    source = {"x": torch.ones(8)}
    publisher = shmsync.Publisher(source, max_subscribers=4, max_slots=2, timeout=3.0)
    publisher.publish()
    # What can be seen of the locks then is another subscriber's, which forks hold too.
    follower = shmsync.Subscriber(handle)
    holder = shmsync.Subscriber(publisher.handle)
    lease = holder.lease()
    publisher.publish()
    errors: list[str] = []

    def publish() -> None:
        try:
            publisher.publish()
        except BaseException as error:
            errors.append(type(error).__name__)

    thread = threading.Thread(target=publish)
    thread.start()
    time.sleep(0.3)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    interrupted = False
    begin = time.monotonic()
    try:
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
        time.sleep(1)
    except KeyboardInterrupt:
        interrupted = True
    seconds = time.monotonic() - begin
    thread.join(20)
    lease.close()
    del lease
    follower.refresh()
    after = publisher.publish().version
    for one in (follower, holder, publisher):
        one.close()
    return [interrupted, seconds > 1.5, errors, after > 2]


def test_an_interrupt_does_not_break_into_a_fork(peer) -> None:
    """It is raised after it."""
    with shmsync.Publisher({"x": torch.ones(1)}) as other:
        other.publish()
        answer = peer().call(fork_and_be_interrupted, str(other.handle))
    assert answer == [True, True, ["SlotsExhausted"], True]
