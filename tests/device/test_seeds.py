"""Publishing and reading on devices whose streams do their work in any order: 100 seeds, and mutants that they find.

Trainer and readers are in one process here, and each of them has a stream of its own on each device. Every byte of
version v is v, so a reader's kernel that is not done before its bytes change, or begins before they are there, sees it.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

import shmsync
from shmsync import device, gathering, rings, streams
from shmsync.errors import DeviceError
from tests.device.support import OVERWRITTEN, Policy, Reader, fill, policy
from tests.fakes.torch_side import FakeTorch

SEEDS = 100
VERSIONS = 8
PLACES = ((0, "auto"), (device.HOST, "auto"), (1, "auto"), (0, "copy"), (0, "auto"))


def run(side: FakeTorch, seed: int) -> list[str]:
    """Train, publish and read; what went wrong."""
    side.fake.seed(seed)
    chance = random.Random(seed)
    trained_on = chance.choice((0, 0, 1, device.HOST))
    trainer = policy(side, trained_on)
    used = [device.Stream(index) for index in (0, 1) for _ in PLACES]
    with shmsync.Publisher(trainer) as channel:
        fill(side, trainer, 1)
        channel.publish()
        readers = [Reader(side, channel.handle, *place) for place in chance.sample(PLACES, 3)]
        wrong: list[str] = []
        try:
            for version in range(2, VERSIONS):
                _push(side, channel, trainer, version, chance)
                if chance.random() < 0.2:
                    wrong += _leave(side, readers.pop(0))
                if chance.random() < 0.3:
                    readers.append(Reader(side, channel.handle, *chance.choice(PLACES)))
                for reader in readers:
                    for _ in range(chance.randrange(3)):
                        with side.on(0, chance.choice(used[: len(PLACES)]).handle):
                            reader.forward()
            channel.wait()
            for reader in readers:
                assert reader.forward() == VERSIONS - 1
            side.fake.drain()
            return wrong + [text for reader in readers for text in reader.wrong()]
        finally:
            for reader in readers:
                reader.close()
            side.fake.drain()


def _leave(side: FakeTorch, reader: Reader) -> list[str]:
    """Close a reader; what its forwards saw wrong."""
    side.fake.drain()
    wrong = reader.wrong()
    reader.close()
    return wrong


def _push(side: FakeTorch, channel: shmsync.Publisher, trainer: Policy, version: int, chance: random.Random) -> None:
    fill(side, trainer, version)
    if chance.random() < 0.5:
        channel.publish()
        return
    channel.publish(wait=False)
    if side.memory_of(trainer.a) != device.HOST:
        fill(side, trainer, OVERWRITTEN)  # the next step, on the same stream


@pytest.mark.parametrize("part", range(4))
def test_every_forward_sees_one_version_whatever_the_order(side: FakeTorch, part: int) -> None:
    for seed in range(part, SEEDS, 4):
        assert not run(side, seed), f"seed {seed}"


def test_the_same_without_the_gather_kernel(side: FakeTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "_kernels", {0: None, 1: None})
    for seed in range(0, SEEDS, 4):
        assert not run(side, seed), f"seed {seed}"


def _row_before_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rings.Rings, "_synchronize", lambda self: None)


def _source_before_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.Stream, "wait", lambda self, event: None)


def _trainer_before_the_gathering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rings.device, "wait", lambda index, stream, event: None)


def _forward_before_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams.ReaderStreams, "copied", lambda self: None)


def _copy_before_the_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams.ReaderStreams, "before_copying", lambda self, events: None)


MUTANTS = (
    _row_before_the_copy,
    _source_before_the_trainer,
    _trainer_before_the_gathering,
    _forward_before_the_copy,
    _copy_before_the_forwards,
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__.strip("_"))
def test_a_mutant_is_found(side: FakeTorch, mutant: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    for seed in range(SEEDS):
        try:
            if run(side, seed):
                return
        except DeviceError:
            return
    pytest.fail(f"not found by {SEEDS} seeds")
