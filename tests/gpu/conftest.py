"""Everything here needs a GPU. Without one all tests skip; with SHMSYNC_REQUIRE_GPU=1 a skip is a failure."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import shmsync
from tests.gpu import work
from tests.gpu.peers import Crew, Peer

NO_DEVICE = "no CUDA device"
# The reasons for which a test may be skipped on a machine that was chosen for these tests.
TWO_DEVICES = "needs two GPUs"
NO_KERNEL = "there was no nvcc when shmsync was built, so there is no gather kernel"


def required() -> bool:
    return os.environ.get("SHMSYNC_REQUIRE_GPU") == "1"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Where a GPU is required, a skipped test has proved nothing and must not look green."""
    report = yield
    if required() and report.skipped and call.excinfo is not None:
        reason = getattr(call.excinfo.value, "msg", None) or str(call.excinfo.value)
        if reason not in (TWO_DEVICES, NO_KERNEL):
            report.outcome = "failed"
            report.longrepr = f"Expected this test to run, since SHMSYNC_REQUIRE_GPU=1, got a skip: {reason}"
    return report


@pytest.fixture(scope="session", autouse=True)
def device() -> torch.device:
    """Of the whole session, so that nothing is started where there is no device."""
    if not torch.cuda.is_available():
        pytest.skip(NO_DEVICE)
    torch.cuda.init()
    return torch.device("cuda", 0)


@pytest.fixture
def two_devices(device: torch.device) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(TWO_DEVICES)


@pytest.fixture(scope="session")
def crew(device: torch.device) -> Iterator[Crew]:
    """All processes of the run, starting at the same time."""
    made = Crew()
    members = [made.member(str(number)) for number in range(made.MEMBERS)]
    for peer in members:
        peer.start(work.warm)
    for peer in members:
        peer.result(120)
    yield made
    made.end()


@pytest.fixture(autouse=True)
def memory_of_ones_own(device: torch.device) -> Iterator[None]:
    """Each test begins with nothing in torch's cache."""
    yield
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@pytest.fixture
def publisher(memory_of_ones_own: None) -> Iterator[Callable[..., shmsync.Publisher]]:
    """Makes publishers, in this process."""
    made: list[shmsync.Publisher] = []

    def make(weights: Any = None, **options: Any) -> shmsync.Publisher:
        made.append(shmsync.Publisher(weights, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
    made.clear()


@pytest.fixture
def workers(crew: Crew, publisher: Callable[..., shmsync.Publisher]) -> Iterator[Callable[[int], list[Peer]]]:
    """Lends processes with a CUDA context. They must not warn: a warning is a fallback."""
    lent: list[Peer] = []

    def lend(count: int) -> list[Peer]:
        lent.extend(crew.member(str(number)) for number in range(count))
        return list(lent)

    yield lend
    _take_back(lent)


@pytest.fixture
def on_host(crew: Crew, publisher: Callable[..., shmsync.Publisher]) -> Iterator[Peer]:
    """A process that works on the CPU only, although it could see the device."""
    peer = crew.member("on host")
    yield peer
    _take_back([peer])


@pytest.fixture
def blind(crew: Crew, publisher: Callable[..., shmsync.Publisher]) -> Iterator[Peer]:
    """A process that sees no device."""
    peer = crew.member("blind")
    yield peer
    _take_back([peer])


@pytest.fixture
def spare(crew: Crew, publisher: Callable[..., shmsync.Publisher]) -> Iterator[Callable[..., Peer]]:
    """Gives processes that may be killed, or that need variables of their own."""
    made: list[Peer] = []

    def give(env: dict[str, str] | None = None) -> Peer:
        made.append(Peer(env) if env else crew.spare())
        return made[-1]

    yield give
    for peer in made:
        if peer.alive() and peer.busy:
            peer.kill()
        peer.end()
    _check_warnings(made)


def _take_back(lent: list[Peer]) -> None:
    """One that is still busy belongs to a test that failed; the next test gets another in its place."""
    for peer in lent:
        if peer.alive() and peer.busy:
            peer.kill()
        if peer.alive():
            peer.call(work.reset)
    _check_warnings(lent)


def _check_warnings(peers: list[Peer]) -> None:
    warned = [warning for peer in peers for warning in peer.warnings if warning.startswith("RuntimeWarning")]
    for peer in peers:
        peer.warnings.clear()
    assert not warned, f"Expected no fallback, got {warned}"
