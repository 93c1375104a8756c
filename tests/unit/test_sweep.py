"""The sweep: what is found clean after it was left need not be scanned; what may have been written to is.

Mutants: no comparison of the storages' users; of the leases; of the counts; take a slot as clean again and again.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shmsync import Subscriber, mapped, slots, sweep, written
from tests.helpers.models import fill, uniform
from tests.helpers.trainers import wait_for

WIDTH = 768  # 2.25 MiB of float32


def policy() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


class Line:
    """A publisher, a subscriber and a bound policy in one process."""

    def __init__(self, publisher: Any, subscriber: Any, make: Callable[[], nn.Module] = policy) -> None:
        self.source = make()
        self.channel = publisher(self.source)
        self.follower = subscriber(self.channel)
        self.module = make()
        self.version = 0
        self.binding = self.follower.bind(self.module)
        self.next()

    def next(self) -> int:
        """Publish and switch; the slot that the module uses now."""
        self.version += 1
        self.channel.publish(fill(self.source, self.version))
        assert self.follower.refresh() == self.version
        return self.slot

    @property
    def slot(self) -> int:
        return slots.slot_of(self.binding._bound.word)

    def mapped(self, slot: int) -> Any:
        return self.follower._data.mapped[slot]

    def until_at(self, slot: int) -> None:
        """Publish until the module is back on a slot."""
        for _ in range(5):
            if self.next() == slot:
                return
        raise AssertionError(f"slot {slot} was not used again")

    def leave(self) -> int:
        """Switch away; the slot that was left, before anybody has swept it."""
        left = self.slot
        assert self.next() != left
        return left


@pytest.fixture
def line(publisher, subscriber, monkeypatch) -> Line:
    """Nothing is swept but by the tests themselves."""
    monkeypatch.setattr(sweep, "later", lambda method, slot: None)
    return Line(publisher, subscriber)


def test_a_switch_has_the_slot_swept_that_it_leaves(publisher, subscriber) -> None:
    line = Line(publisher, subscriber)
    left = line.leave()
    wait_for(lambda: line.mapped(left).clean, "a clean slot")


def test_who_is_awaited_answers_before_he_has_a_slot_swept(line, monkeypatch) -> None:
    """Mutant: ask for it at the end of the switch."""
    asked: list[tuple[int, Any]] = []
    monkeypatch.setattr(sweep, "later", lambda method, slot: asked.append((slot, line.channel.answer(0, os.getpid()))))
    follower = Subscriber(line.channel.handle, worker_id=0)
    binding = follower.bind(policy())
    left = slots.slot_of(binding._bound.word)
    line.channel.publish(fill(line.source, 2))
    assert binding.follow() == 2
    assert not asked
    follower.answer(2)
    assert asked == [(left, (2, 2))]
    follower.close()


def test_a_forward_has_the_slot_swept_that_its_switch_has_left(line, monkeypatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(sweep, "later", lambda method, slot: asked.append(slot))
    left = line.slot
    line.channel.publish(fill(line.source, 2))
    for _ in range(3):
        line.module(torch.zeros(1, WIDTH))
    assert line.slot != left
    assert asked == [left]


def test_a_clean_slot_is_not_scanned_at_its_next_lease_but_at_the_one_after_it(line, monkeypatch) -> None:
    left = line.leave()
    line.follower.sweep(left)
    assert line.mapped(left).clean
    scanned: list[Any] = []
    monkeypatch.setattr(line.follower._written.pages, "drop", scanned.append)
    line.until_at(left)
    assert line.mapped(left).mapping not in scanned
    line.leave()
    line.until_at(left)
    assert line.mapped(left).mapping in scanned


ALIASES: dict[str, Callable[[nn.Module], Any]] = {
    "data": lambda module: module.weight.data,
    "slice": lambda module: module.weight.detach()[3:5],
    "array": lambda module: module.weight.detach().numpy(),
    "memoryview": lambda module: memoryview(module.weight.detach().numpy()),
    "graph": lambda module: module(torch.ones(1, WIDTH, requires_grad=True)),
    "storage": lambda module: module.weight.untyped_storage(),
    "storage of data": lambda module: module.weight.data.untyped_storage(),
    "dlpack": lambda module: np.from_dlpack(module.weight.detach()),
}


@pytest.mark.parametrize("alias", ALIASES)
def test_a_slot_that_something_still_reaches_is_not_clean(line, alias) -> None:
    kept = ALIASES[alias](line.module)
    left = line.leave()
    line.follower.sweep(left)
    assert not line.mapped(left).clean
    del kept
    line.follower.sweep(left)
    assert line.mapped(left).clean


@pytest.mark.parametrize("alias", ["data", "slice"])
def test_a_late_write_through_an_alias_is_gone_at_the_next_version(line, alias) -> None:
    kept = ALIASES[alias](line.module)
    left = line.leave()
    line.follower.sweep(left)
    kept.fill_(999.0)
    with pytest.warns(RuntimeWarning, match="wrote to shared weights"):
        line.until_at(left)
    assert uniform(line.module) == line.version


def test_what_was_written_while_bound_is_found_by_the_sweep_and_dropped_later(line) -> None:
    with torch.no_grad():
        line.module.weight[5, 5] = 999.0
    left = line.leave()
    line.follower.sweep(left)
    assert not line.mapped(left).clean
    with pytest.warns(RuntimeWarning, match="wrote to shared weights"):
        line.until_at(left)
    assert uniform(line.module) == line.version


class Few(nn.Module):
    """Leaves that lie in one page."""

    def __init__(self, leaves: int) -> None:
        super().__init__()
        for number in range(leaves):
            self.register_parameter(f"a{number}", nn.Parameter(torch.zeros(1)))

    @property
    def last(self) -> torch.Tensor:
        return list(self.parameters())[-1]


@pytest.mark.parametrize(
    ("leaves", "named"), [(1, "`a0`"), (3, "`a0`, `a1`, `a2`"), (5, "`a0`, `a1`, `a2` and 2 more")]
)
def test_the_warning_names_the_leaves_of_the_page(publisher, subscriber, leaves, named) -> None:
    """It is not known which of them it was. Mutant: name the first alone."""
    line = Line(publisher, subscriber, lambda: Few(leaves))
    with torch.no_grad():
        line.module.last.fill_(7.0)
    left = line.leave()
    with pytest.warns(RuntimeWarning, match=f"near {named}[.] Nobody"):
        line.until_at(left)


def test_a_slot_that_is_used_and_written_during_the_sweep_is_not_clean(line, monkeypatch) -> None:
    left = line.leave()
    find = written._swept_pages.find

    def find_and_be_overtaken(mapping: Any) -> Any:
        found = find(mapping)
        line.until_at(left)
        with torch.no_grad():
            line.module.weight.fill_(999.0)
        line.leave()
        return found

    monkeypatch.setattr(written._swept_pages, "find", find_and_be_overtaken)
    line.follower.sweep(left)
    assert not line.mapped(left).clean
    with pytest.warns(RuntimeWarning, match="wrote to shared weights"):
        line.until_at(left)
    assert uniform(line.module) == line.version


def test_a_slot_in_use_is_not_swept(line) -> None:
    """By the binding, or by a lease of the user's whose tensors may be written to."""
    line.follower.sweep(line.slot)
    assert not line.mapped(line.slot).clean
    lease = line.follower.lease()
    left = line.leave()
    line.follower.sweep(left)
    assert not line.mapped(left).clean
    lease.close()
    line.follower.sweep(left)
    assert line.mapped(left).clean


def test_storages_that_were_moved_away_are_not_counted_on(line) -> None:
    """What had an array over the mapping still has it. Mutant: count the users of the new storages."""
    line.module.weight.detach().numpy()
    line.module.share_memory()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        left = line.leave()
        line.until_at(left)
        line.leave()
    line.follower.sweep(left)
    assert not line.mapped(left).clean


def test_without_torchs_count_no_slot_is_clean(publisher, subscriber, monkeypatch) -> None:
    monkeypatch.setattr(mapped, "_storage_users", None)
    line = Line(publisher, subscriber)
    left = line.leave()
    line.follower.sweep(left)
    assert not line.mapped(left).clean


def test_small_slots_are_left_to_the_next_lease(publisher, subscriber, monkeypatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(sweep, "later", lambda method, slot: asked.append(slot))
    Line(publisher, subscriber, lambda: nn.Linear(8, 8)).leave()
    assert asked == []
    line = Line(publisher, subscriber)
    left = line.leave()
    assert asked == [left]


class Sweepable:
    """Notes what it was called with."""

    def __init__(self) -> None:
        self.called: list[int] = []

    def sweep(self, slot: int) -> None:
        self.called.append(slot)


def test_later_calls_in_order_and_keeps_nothing_alive() -> None:
    kept, dropped = Sweepable(), Sweepable()
    for slot in range(3):
        sweep.later(kept.sweep, slot)
        sweep.later(dropped.sweep, slot)
    called = dropped.called
    del dropped
    wait_for(lambda: kept.called == [0, 1, 2], "the calls")
    assert called == []


def sweep_in_child(state: Any) -> tuple[list[int], list[int]]:
    """What was swept in a process, and then in a child of it."""
    here, there = Sweepable(), Sweepable()
    sweep.later(here.sweep, 1)
    wait_for(lambda: here.called == [1], "the parent's")
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            sweep.later(there.sweep, 2)
            wait_for(lambda: there.called == [2], "the child's")
            os.write(writing, bytes(there.called))
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        told = list(pipe.read())
    os.waitpid(child, 0)
    return here.called, told


def test_a_forked_child_sweeps_with_a_thread_of_its_own(peer) -> None:
    """Mutant: go on with the parent's queue, which no thread serves."""
    assert peer().call(sweep_in_child) == ([1], [2])
