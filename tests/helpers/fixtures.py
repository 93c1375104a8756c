"""Fixtures of tests/unit and tests/cases: what they make is closed, and every test must leave nothing behind."""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import shmsync
from tests.helpers import probes
from tests.helpers.processes import Peer


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test no segment is open or mapped in this process, once all that it made is closed or dropped."""
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:  # the traceback keeps the test's objects alive
        return
    if probes.segment_descriptors() or probes.segment_maps():
        gc.collect()
    assert not probes.segment_descriptors(), "segments are still open"
    assert not probes.segment_maps(), "segments are still mapped"


@pytest.fixture
def publisher(nothing_left: None) -> Iterator[Callable[..., shmsync.Publisher]]:
    """Makes publishers."""
    made: list[shmsync.Publisher] = []

    def make(weights: Any = None, **options: Any) -> shmsync.Publisher:
        made.append(shmsync.Publisher(weights, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
    made.clear()


@pytest.fixture
def subscriber(publisher: Callable[..., shmsync.Publisher]) -> Iterator[Callable[..., shmsync.Subscriber]]:
    """Makes subscribers of a publisher or a handle."""
    made: list[shmsync.Subscriber] = []

    def make(of: Any, **options: Any) -> shmsync.Subscriber:
        made.append(shmsync.Subscriber(getattr(of, "handle", of), **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
    made.clear()


@pytest.fixture
def peer() -> Iterator[Callable[[], Peer]]:
    """Starts other processes; at the end of the test they must end by themselves, and must not have warned."""
    made: list[Peer] = []

    def start() -> Peer:
        made.append(Peer())
        return made[-1]

    yield start
    for one in made:
        one.end()
    warned = [warning for one in made for warning in one.warnings]
    assert not warned, warned


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty directory on tmpfs that SHMSYNC_DIR names, for channels in files."""
    made = Path(tempfile.mkdtemp(prefix="unit-", dir="/dev/shm"))
    monkeypatch.setenv("SHMSYNC_DIR", str(made))
    yield made
    shutil.rmtree(made)
