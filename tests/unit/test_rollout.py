"""Attaching collectors that are in the middle of something, as collectors of several torchrl releases are built."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from shmsync import BindingError, Publisher, WaitTimeout, remote
from shmsync.torchrl import rollout
from shmsync.torchrl.collector import attachment
from tests.helpers.trainers import wait_for

SECONDS = 20


class Twice(nn.Module):
    """A forward that looks at its weight twice; `pause` is called in between."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([value]))
        self.pause: Callable[[], Any] = lambda: None

    def forward(self) -> tuple[float, float]:
        first = self.weight.item()
        self.pause()
        return first, self.weight.item()


class Earlier:
    """As a collector before torchrl 0.11: its rollout calls `policy`."""

    init_random_frames = 0

    def __init__(self, policy: Any) -> None:
        self.policy, self.policy_weights, self._frames = policy, None, 0
        self._iterator: Iterator[Any] | None = None

    def rollout(self) -> list[Any]:
        return [self.policy() for _ in range(2)]

    def batches(self) -> Iterator[Any]:
        while True:
            yield self.rollout()

    def __iter__(self) -> Iterator[Any]:
        return self.batches()

    def next(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(self)
        return next(self._iterator)

    def shutdown(self) -> None: ...


class Later(Earlier):
    """As a collector since then."""

    def __init__(self, policy: Any) -> None:
        super().__init__(policy)
        self._wrapped_policy_maybe_compiled = policy

    @property
    def _wrapped_policy(self) -> Any:
        return self._wrapped_policy_maybe_compiled

    def rollout(self) -> list[Any]:
        return [self._wrapped_policy() for _ in range(2)]


class Paused:
    """A forward that waits in its middle."""

    def __init__(self) -> None:
        self.inside, self.go = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.inside.set()
        assert self.go.wait(SECONDS)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    with Publisher(Twice(7.0)) as one:
        one.publish()
        yield one


def attach(collector: Any, publisher: Publisher) -> remote.Attachment:
    return remote.attach_object(collector, str(publisher.handle), 0, attachment)


@pytest.mark.parametrize("kind", [Earlier, Later])
def test_a_forward_that_was_begun_before_the_attachment_keeps_its_weights(
    kind: Any, publisher: Publisher, threads: ThreadPoolExecutor
) -> None:
    """And the one after it has the new ones. Mutants: wait for nobody; wait without a doorman, so that the next forward
    begins meanwhile; take the doorman for the policy."""
    policy = Twice(0.0)
    policy.pause = pause = Paused()
    collector = kind(policy)
    batch = threads.submit(collector.next)
    assert pause.inside.wait(SECONDS)
    attaching = threads.submit(attach, collector, publisher)
    with pytest.raises(TimeoutError):
        attaching.result(0.2)
    pause.go.set()
    attaching.result(SECONDS)
    assert batch.result(SECONDS) == [(0.0, 0.0), (7.0, 7.0)]
    assert collector.policy is policy
    remote.forget(collector)
    assert collector.next() == [(7.0, 7.0)] * 2
    assert policy.forward.__func__ is Twice.forward


def test_an_attachment_does_not_wait_for_ever(
    publisher: Publisher, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector goes on as it was, and is attached the next time. Mutant: leave the doorman there."""
    monkeypatch.setattr(rollout, "_FORWARD_SECONDS", 0.2)
    policy = Twice(0.0)
    policy.pause = pause = Paused()
    collector = Later(policy)
    batch = threads.submit(collector.next)
    assert pause.inside.wait(SECONDS)
    with pytest.raises(WaitTimeout, match="in the middle of a batch"):
        attach(collector, publisher)
    assert collector._wrapped_policy_maybe_compiled is policy
    pause.go.set()
    assert batch.result(SECONDS) == [(0.0, 0.0)] * 2
    attach(collector, publisher)
    assert collector.next() == [(7.0, 7.0)] * 2
    remote.forget(collector)


def test_random_steps_are_not_waited_for(publisher: Publisher, threads: ThreadPoolExecutor) -> None:
    """There is no forward that could be disturbed. Mutant: wait for the next one."""
    collector, going = Earlier(Twice(0.0)), threading.Event()
    collector.init_random_frames = 10
    collector.rollout = lambda: going.wait(SECONDS)  # type: ignore[method-assign,assignment,return-value]
    batch: Future[Any] = threads.submit(collector.next)
    wait_for(lambda: rollout.makes_a_batch(collector._iterator), "a batch")
    attach(collector, publisher)
    assert not batch.done()
    going.set()
    assert batch.result(SECONDS) is True
    remote.forget(collector)


def test_a_policy_that_is_no_module_is_found_where_it_is_called(publisher: Publisher) -> None:
    """Before torchrl 0.11 a compiled policy is a function around it, and a function alone has no weights: that it can't
    follow the channel is an error then. Mutant: bind `collector.policy` as it is."""
    policy = Twice(0.0)

    def compiled() -> Any:
        return policy()

    collector = Earlier(compiled)
    collector.compiled_policy = True  # type: ignore[attr-defined]
    compiled.__wrapped__ = policy  # type: ignore[attr-defined]
    attach(collector, publisher)
    assert collector.next() == [(7.0, 7.0)] * 2
    remote.forget(collector)
    assert collector.policy is compiled


class MultiSyncDataCollector(Earlier):
    """As a collector whose inner processes rest between two batches."""

    procs = ("somebody",)

    def __init__(self) -> None:
        super().__init__(Twice(0.0))
        self.value, self.pause = 0.0, Paused()

    def update_policy_weights_(self, weights: Any) -> None:
        self.value = weights["weight"].item()

    def rollout(self) -> list[Any]:
        first = self.value
        self.pause()
        return [first, self.value]


@pytest.mark.parametrize("begun", [True, False], ids=["begun before", "begun after"])
def test_versions_are_passed_on_to_inner_processes_between_two_batches(
    begun: bool, publisher: Publisher, threads: ThreadPoolExecutor
) -> None:
    """At once where they rest. Mutants: pass on at once in any case; forget what came during a batch."""
    collector = MultiSyncDataCollector()
    batch = threads.submit(collector.next) if begun else None
    assert not begun or collector.pause.inside.wait(SECONDS)
    attached = attach(collector, publisher)
    assert attached.notified() == ((0, 1) if begun else (1, 1))
    batch = batch or threads.submit(collector.next)
    assert collector.pause.inside.wait(SECONDS)
    publisher.publish({"weight": torch.tensor([8.0])})
    attached.notified()
    collector.pause.go.set()
    assert batch.result(SECONDS) == ([0.0, 0.0] if begun else [7.0, 7.0])
    assert collector.next() == [8.0, 8.0]
    publisher.publish({"weight": torch.tensor([9.0])})
    assert attached.notified() == (3, 3)
    assert collector.value == 9.0
    remote.forget(collector)


def test_inner_processes_that_nothing_can_be_passed_on_to_are_an_error(publisher: Publisher) -> None:
    """As with a policy_factory before torchrl 0.11. Mutant: call what is not there at the first push."""
    collector = MultiSyncDataCollector()
    collector.weight_updater = None  # type: ignore[attr-defined]
    with pytest.raises(BindingError, match="policy_factory"):
        attach(collector, publisher)
