"""Tests of the whole path on devices, over the fake CUDA runtime: real rows, locks and processes, no hardware.

The runtime is looked for once in a process, so all tests of a run have the fake; torch's side is put back after each.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest

import shmsync
from shmsync import device
from shmsync.devicering import sweep_parked
from tests.device.support import Reader
from tests.fakes.torch_side import FakeTorch, install
from tests.helpers.fixtures import nothing_left, peer, publisher, subscriber

__all__ = ["nothing_left", "peer", "publisher", "subscriber"]

# Before any test looks for a runtime.
_side = install(devices="0,1") if shmsync.has_extension else None
device.torch_side = device.Torch()


@pytest.fixture(scope="package", autouse=True)
def torch_side() -> Iterator[None]:
    """Torch's side, until all that these tests have made is gone."""
    before = device.torch_side
    if _side is not None:
        device.torch_side = _side
    yield
    gc.collect()
    device.torch_side = before


@pytest.fixture(autouse=True)
def side(nothing_left: None, request: pytest.FixtureRequest) -> Iterator[FakeTorch]:
    """The fake runtime. What a test gets of it must have been given back, and nothing done wrong with it.

    It is set up before what the test makes, and so looked at after that is closed.
    """
    if _side is None:
        pytest.skip("needs the compiled extension")
    failed, before = request.session.testsfailed, _counts(_side)
    known = len(_side.fake.violations())
    _side.fake.seed(0)
    yield _side
    _side.fake.fail_never()
    if request.session.testsfailed > failed:  # the traceback keeps the test's objects alive
        return
    after = _counts(_side)
    assert after == before, f"not given back: {after} instead of {before}"
    assert not _side.fake.violations()[known:]


@pytest.fixture
def reader(side: FakeTorch, publisher: object) -> Iterator[Callable[..., Reader]]:
    """Makes readers of a publisher, on a device or the host."""
    made: list[Reader] = []

    def make(of: shmsync.Publisher, index: int, mode: str = "auto") -> Reader:
        made.append(Reader(side, of.handle, index, mode))
        return made[-1]

    yield make
    side.fake.limit(0, 1 << 40)  # to let go takes room, which a test may have taken away
    while made:
        made.pop().close()


def _counts(side: FakeTorch) -> dict[str, int]:
    gc.collect()
    side.fake.drain()
    sweep_parked()  # what was still mapped when its channel was closed
    side.forget_streams()
    counts = side.fake.counts()
    del counts["contexts"]  # which stay until the end of the process
    return counts
