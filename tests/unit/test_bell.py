"""The bell: wakes whoever waits, in any process, and those who are about to.

Mutants: wake one only; a private futex; wait without comparing; ring before the rows have moved.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from typing import Any

import pytest
import torch

from shmsync import ChannelClosed, Subscriber
from shmsync import bell as bells
from shmsync.listener import Listener
from tests.helpers.trainers import wait_for

LONG_SECONDS = 60.0
SOON_SECONDS = 20.0


@pytest.fixture(params=["futex", "looking"])
def way(request, monkeypatch) -> str:
    """Both ways to wait: the system call, and looking where it is not known."""
    if request.param == "looking":
        monkeypatch.setattr(bells, "_SYS_FUTEX", None)
    return request.param


@pytest.fixture
def channel(publisher) -> Any:
    return publisher({"w": torch.zeros(4)})


def waiting(follower: Subscriber, version: int) -> tuple[threading.Thread, list[Any]]:
    """A thread in `wait(version)`, and what it comes back with."""
    back: list[Any] = []

    def wait() -> None:
        try:
            back.append(follower.wait(version, LONG_SECONDS))
        except Exception as error:
            back.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread, back


def test_a_ring_wakes_all_who_wait(channel, subscriber, monkeypatch) -> None:
    """Without a look in between: if they are not woken they come back too late."""
    monkeypatch.setattr("shmsync.subscriber.LOOK_SECONDS", LONG_SECONDS)
    crew = [waiting(subscriber(channel), 1) for _ in range(3)]
    time.sleep(0.1)
    begin = time.monotonic()
    channel.publish()
    for thread, back in crew:
        thread.join()
        assert back == [1]
    assert time.monotonic() - begin < SOON_SECONDS


def wait_there(state: Any, handle: str) -> int:
    import shmsync.subscriber

    shmsync.subscriber.LOOK_SECONDS = LONG_SECONDS
    with Subscriber(handle) as follower:
        state.ready = True
        return follower.wait(1, LONG_SECONDS)


def test_a_ring_is_heard_in_another_process(channel, peer) -> None:
    worker = peer()
    worker.start(wait_there, str(channel.handle))
    wait_for(lambda: len(channel.subscribers()) == 1, "the other process")
    time.sleep(0.1)
    begin = time.monotonic()
    channel.publish()
    assert worker.result() == 1
    assert time.monotonic() - begin < SOON_SECONDS


def test_a_ring_between_the_look_and_the_wait_is_not_slept_through(channel, subscriber, way) -> None:
    bell = subscriber(channel).bell
    before = bell.count
    channel.publish()
    assert bell.count == before + 1
    begin = time.monotonic()
    bell.wait(before, LONG_SECONDS)
    assert time.monotonic() - begin < SOON_SECONDS


def test_without_a_ring_the_wait_ends_after_its_time(channel, subscriber, way) -> None:
    bell = subscriber(channel).bell
    begin = time.monotonic()
    while time.monotonic() - begin < 0.05:
        bell.wait(bell.count, 0.05)
    bell.wait(bell.count, 0.0)
    assert time.monotonic() - begin < SOON_SECONDS


def test_a_stir_wakes_but_is_no_news(channel, subscriber) -> None:
    bell = subscriber(channel).bell
    before, woken = bell.count, threading.Event()

    def wait() -> None:
        bell.wait(before, LONG_SECONDS)
        woken.set()

    thread = threading.Thread(target=wait)
    thread.start()
    while not woken.wait(0.05):
        bell.stir()
    thread.join()
    assert bell.count == before


def test_a_failed_publish_rings_too(channel, subscriber, monkeypatch) -> None:
    """Its rows may have moved before it failed."""
    channel.publish()
    bell = subscriber(channel).bell
    before = bell.count

    def fail(row: int, word: int) -> None:
        channel._store._rows[row] = word
        raise KeyboardInterrupt

    monkeypatch.setattr(channel._store, "store_row", fail)
    with pytest.raises(KeyboardInterrupt):
        channel.publish()
    assert bell.count > before


def test_the_rows_have_moved_when_it_rings(channel, subscriber, monkeypatch) -> None:
    follower = subscriber(channel)
    seen: list[int] = []
    ring = bells.Bell.ring

    def look_and_ring(bell: bells.Bell) -> None:
        seen.append(follower.seen)
        ring(bell)

    monkeypatch.setattr(bells.Bell, "ring", look_and_ring)
    channel.publish()
    channel.publish()
    assert seen[:2] == [1, 2]
    monkeypatch.undo()


def test_closing_a_subscriber_ends_its_waits(channel, subscriber, monkeypatch) -> None:
    """Mutant: close without a stir."""
    monkeypatch.setattr("shmsync.subscriber.LOOK_SECONDS", LONG_SECONDS)
    follower = subscriber(channel)
    thread, back = waiting(follower, 1)
    time.sleep(0.1)
    begin = time.monotonic()
    follower.close()
    thread.join()
    assert isinstance(back[0], ChannelClosed)
    assert time.monotonic() - begin < SOON_SECONDS


def test_a_wait_that_is_closed_says_so_and_nothing_else(channel, monkeypatch) -> None:
    """Whatever it was looking at. Mutant: look at the owner's lock without the mutex."""
    interval = sys.getswitchinterval()
    monkeypatch.setattr("shmsync.subscriber.LOOK_SECONDS", 0.0)
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(150):
            follower = Subscriber(channel.handle)
            pairs = [waiting(follower, 1) for _ in range(3)]
            follower.close()
            for thread, back in pairs:
                thread.join()
                assert [type(error) for error in back] == [ChannelClosed]
    finally:
        sys.setswitchinterval(interval)


def test_the_count_wraps_around(channel, subscriber) -> None:
    bell = subscriber(channel).bell
    bell._word.value = 2**32 - 1
    channel.publish()
    assert bell.count == 0


class Failing:
    """A reaction that fails, each time with the next of these words."""

    def __init__(self, words: list[str]) -> None:
        self.words, self.calls = words, 0

    def react(self) -> tuple[int, int]:
        self.calls += 1
        raise ValueError(self.words[min(self.calls, len(self.words)) - 1])


def test_a_reaction_that_fails_is_said_once(channel, subscriber, caplog) -> None:
    """By each text; nobody else may hear of it. Mutants: say nothing; say it at each ring."""
    follower, failing = subscriber(channel), Failing(["one", "one", "two"])
    listener = Listener(follower, failing.react)
    for calls in (1, 2, 3, 4):
        wait_for(lambda calls=calls: failing.calls >= calls, "the reaction")
        channel.publish()
    listener.end()
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [text.rpartition(": ")[2] for text in said] == ["one", "two"]
    assert all(f"pid {os.getpid()}" in text for text in said)
