"""C18: two threads publish on one channel without pause, and another process tries to.

Right: every read is of one value, the version has advanced by exactly the number of pushes, and the other process is
refused by an error that names the owner. Mutants: no mutex around a publish; let a forked child publish.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch

from shmsync import NotThePublisher
from tests.helpers.models import uniform

PUSHES = 500


def weights(value: float) -> dict[str, torch.Tensor]:
    return {f"w{number}": torch.full((2000,), value) for number in range(8)}


def test_two_threads_take_turns(publisher, subscriber) -> None:
    channel = publisher(weights(0.0))
    channel.publish()
    follower = subscriber(channel)

    def write(value: float) -> None:
        mine = weights(value)
        for _ in range(PUSHES):
            channel.publish(mine)

    writers = [threading.Thread(target=write, args=(value,)) for value in (1.0, 2.0)]
    for writer in writers:
        writer.start()
    seen: list[tuple[int, float]] = []
    while any(writer.is_alive() for writer in writers):
        with follower.lease() as lease:
            seen.append((lease.version, uniform(lease.weights)))
    for writer in writers:
        writer.join()
    assert channel.version == 1 + 2 * PUSHES
    assert [version for version, _ in seen] == sorted(version for version, _ in seen)
    by_version: dict[int, float] = {}
    assert all(by_version.setdefault(version, value) == value for version, value in seen)


def publish_in_child(channel: Any) -> str:
    """What a forked child is told when it publishes."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            channel.publish(weights(3.0))
            text = "published"
        except NotThePublisher as error:
            text = str(error)
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


def test_another_process_is_refused_by_the_owners_name(publisher, subscriber) -> None:
    channel = publisher(weights(1.0))
    channel.publish()
    assert f"pid {os.getpid()}" in publish_in_child(channel)
    assert channel.version == 1
    with subscriber(channel).lease() as lease:
        assert (lease.version, uniform(lease.weights)) == (1, 1.0)


def test_a_publisher_cannot_be_sent(publisher) -> None:
    """A second one can come about by copying neither. Mutant: let pickle take its mappings apart."""
    import copy
    import pickle

    channel = publisher(weights(1.0))
    for copying in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(NotThePublisher, match=f"pid {os.getpid()}"):
            copying(channel)
