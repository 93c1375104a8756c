"""C19: a push fails: by a leaf that does not fit, by an exception after half of the copy, by the trainer's death in it.

Right: workers read the old version, whole, until a good one comes, from this trainer or from another.
Mutants: write a leaf before the last one is checked; set the slot's version before the copy; move the row first.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shmsync
from shmsync import LayoutMismatch, Publisher, faults
from shmsync.copying import Filler
from tests.crash.support import killed
from tests.helpers import workers
from tests.helpers.models import fill, filled, uniform

SHAPES = {f"layer{number}": (500,) for number in range(10)}


def read(state: Any) -> tuple[int, float]:
    state.subscriber.refresh()
    return state.binding.version, uniform(state.module)


def policy() -> nn.Module:
    return nn.ParameterDict({key: nn.Parameter(torch.zeros(shape)) for key, shape in SHAPES.items()})


@pytest.fixture
def world(publisher, peer):
    """A trainer at version 1, and a worker of it in another process."""
    channel = publisher(filled(SHAPES, 1))
    channel.publish()
    worker = peer()
    worker.call(workers.attach, str(channel.handle), policy)
    return channel, worker


def test_a_last_leaf_of_another_shape(world) -> None:
    channel, worker = world
    wrong = {**filled(SHAPES, 2), "layer9": torch.zeros(501)}
    for _ in range(3):
        with pytest.raises(LayoutMismatch, match="layer9"):
            channel.publish(wrong)
        assert worker.call(read) == (1, 1.0)
    channel.publish(filled(SHAPES, 3))
    assert worker.call(read) == (channel.version, 3.0)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, MemoryError], ids=lambda error: error.__name__)
def test_an_exception_after_half_of_the_copy(world, monkeypatch, error) -> None:
    """Several times in a row, so that each slot has had half a copy; and a partial push after them takes none of it."""
    channel, worker = world
    whole = Filler.fill

    def half(filler: Filler, leaves: Any, sources: Any, *_: Any) -> None:
        whole(filler, leaves[: len(leaves) // 2], sources[: len(leaves) // 2])
        raise error("in the middle")

    for _ in range(5):
        with monkeypatch.context() as patch:
            patch.setattr(Filler, "fill", half)
            with pytest.raises(error, match="in the middle"):
                channel.publish(filled(SHAPES, 2))
        assert worker.call(read) == (1, 1.0)
    channel.publish({"layer0": torch.ones(500)}, partial=True)
    assert worker.call(read) == (channel.version, 1.0)
    channel.publish(filled(SHAPES, 3))
    assert worker.call(read) == (channel.version, 3.0)


def test_a_partial_push_that_failed_leaves_no_leaf_that_is_taken_for_copied(world, monkeypatch) -> None:
    """Its slot held an older version, and what would have been copied over from the newest is not there. Mutant: keep
    the stamps over a failed copy."""
    channel, worker = world
    whole = Filler.fill

    def fail(filler: Filler, *_: Any) -> None:
        raise RuntimeError("at the first leaf")

    for value in (2, 3, 4):
        channel.publish(filled(SHAPES, value))
        assert worker.call(read) == (channel.version, float(value))
    for _ in range(3):
        monkeypatch.setattr(Filler, "fill", fail)
        with pytest.raises(RuntimeError, match="at the first leaf"):
            channel.publish({"layer0": torch.full((500,), 4.0)}, partial=True)
        monkeypatch.setattr(Filler, "fill", whole)
        channel.publish({"layer0": torch.full((500,), 4.0)}, partial=True)
        assert worker.call(read) == (channel.version, 4.0)


def lead(state: Any) -> str:
    state.source = fill(policy(), 1)
    state.channel = Publisher(state.source)
    state.channel.publish()
    return str(state.channel.handle)


def die_in_a_push(state: Any) -> None:
    faults.arm("publish.copied_half")
    state.channel.publish(fill(state.source, 2))


def go_over(state: Any, handle: str) -> tuple[int, float]:
    old, state.subscriber = state.subscriber, shmsync.Subscriber(handle)
    state.binding = state.subscriber.bind(state.module)
    old.close()
    return read(state)


def test_the_trainers_death_in_the_middle_of_a_copy(peer) -> None:
    trainer, worker = peer(), peer()
    worker.call(workers.attach, trainer.call(lead), policy)
    trainer.start(die_in_a_push)
    while not killed(trainer):
        assert worker.call(read) == (1, 1.0)
    assert worker.call(read) == (1, 1.0)
    other = peer()
    handle = other.call(lead)
    assert worker.call(go_over, handle) == (1, 1.0)
