"""Fixtures: worlds of plain RPC, where torchrl is hidden."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers import rpc_worlds
from tests.helpers.trainers import Trainer


def _trainer() -> Iterator[Trainer]:
    trainer = Trainer(rpc_worlds.MODULES)
    try:
        trainer.do(rpc_worlds.build)
        yield trainer
    finally:
        trainer.close()


@pytest.fixture(scope="module")
def trainer() -> Iterator[Trainer]:
    """A trainer with three workers, for all tests of a module."""
    yield from _trainer()


@pytest.fixture
def fresh_trainer() -> Iterator[Trainer]:
    """The same for a test that breaks it."""
    yield from _trainer()
