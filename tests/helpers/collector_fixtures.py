"""Fixtures: real RPCCollectors. Each lives in a trainer, a process that ends with the module or test that asked for
it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.helpers import collectors
from tests.helpers.trainers import Trainer


def _starter() -> Iterator[Callable[..., Trainer]]:
    with ExitStack() as stack:

        def start(start_method: str = "forkserver", build: Any = collectors.build, **options: Any) -> Trainer:
            trainer = Trainer(collectors.MODULES, start_method)
            stack.callback(trainer.close)
            trainer.do(build, **options)
            return trainer

        yield start


@pytest.fixture
def start() -> Iterator[Callable[..., Trainer]]:
    """Starts a trainer with the collector that `build` (tests.helpers.collectors.build) makes of the options."""
    yield from _starter()


@pytest.fixture(scope="module")
def start_for_module() -> Iterator[Callable[..., Trainer]]:
    """As `start`, for a trainer that all tests of a module share."""
    yield from _starter()
