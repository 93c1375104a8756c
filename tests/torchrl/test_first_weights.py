"""Which weights the first batches are made with, and collectors inside collectors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from shmsync import NothingPublished
from tests.helpers.collectors import collect, collect_from_each, net_policy, push
from tests.helpers.trainers import Trainer

Start = Callable[..., Trainer]
# What a worker's factory makes; the trainer holds 7, and what reaches a worker can only come from there.
zeros = partial(net_policy, value=0.0)


def version(world: SimpleNamespace) -> int:
    return world.updater.version


def push_nothing(world: SimpleNamespace) -> None:
    world.updater.push_weights()


def collectors_own_call(world: SimpleNamespace) -> None:
    world.collector.update_policy_weights_()


def push_other(world: SimpleNamespace, value: float) -> None:
    """Weights that the trainer's policy does not have: the worker's policy object was never asked for them."""
    world.updater.push_weights(net_policy(value=value))


@pytest.mark.parametrize("sync", [True, False])
def test_with_a_policy_the_first_batch_uses_what_the_trainer_holds(start: Start, sync: bool) -> None:
    """Never pushed by the user, but it is version 1 and stamped so: the workers are bound before their first forward.
    Mutant: inject no receivers."""
    first = start(sync=sync).do(collect)
    assert (first.actions, first.versions) == ([7.0], [1])


def test_with_a_factory_the_first_push_fixes_the_weights(start: Start) -> None:
    """Before it, a push of nothing is an error that says so, and the collector's own call does nothing; after it,
    the first batch uses it, whatever the factory made. Mutant: forget the first pushed weights."""
    trainer = start(factory=zeros)
    with pytest.raises(NothingPublished, match="policy_factory"):
        trainer.do(push_nothing)
    trainer.do(collectors_own_call)
    assert trainer.do(version) == 0
    trainer.do(push)
    batch = trainer.do(collect)
    assert (batch.actions, batch.versions) == ([7.0], [1])
    trainer.do(push_other, 9.0)
    assert trainer.do(collect).actions == [9.0]
    trainer.do(push_nothing)  # now the server has weights: those that were pushed first
    assert trainer.do(collect).actions == [7.0]


def test_with_a_factory_and_without_a_push_the_workers_use_their_own(start: Start) -> None:
    """Also where the collector itself updates before each batch. Mutant: let its call raise when there are no
    weights."""
    trainer = start(factory=zeros, update_after_each_batch=True)
    assert trainer.do(collect).actions == [0.0]
    assert trainer.do(version) == 0
    trainer.do(push, 8.0)
    assert trainer.do(collect).actions == [8.0]


@pytest.mark.parametrize("own_batches", [0, 1])
def test_with_a_factory_an_async_collector_has_the_first_push_from_the_second_batch_on(
    start: Start, own_batches: int
) -> None:
    """One batch has been begun before it, the first one while the collector was built. One worker, so that the order of
    batches is known. Mutant: let a binding that was made before there were weights never switch."""
    trainer = start(factory=zeros, sync=False, workers=1)
    for _ in range(own_batches):
        assert trainer.do(collect).actions == [0.0]
    trainer.do(push)
    trainer.do(collect)
    assert trainer.do(collect).actions == [7.0]


# Batches that an inner process may have begun before a push; one more if the RPCCollector has asked for it already.
BEGUN = {"MultiSyncCollector": 0, "MultiAsyncCollector": 1}


@pytest.mark.parametrize("kind", BEGUN)
@pytest.mark.parametrize("factory", [None, zeros], ids=["policy", "factory"])
@pytest.mark.parametrize("sync", [True, False])
def test_a_push_reaches_every_inner_process(start: Start, kind: str, factory: Any, sync: bool) -> None:
    """A worker whose collector has two processes of its own: every action of the batches that they begin after a
    push is made with it, in both. Mutant: bind the outer process only."""
    trainer = start(kind=kind, factory=factory, sync=sync, workers=1, num_workers_per_collector=2)
    trainer.do(push, 1.0)
    if sync:  # nothing has been begun
        batch = trainer.do(collect)
        assert (batch.actions, batch.versions) == ([1.0], [1 if factory else 2])
    report = trainer.do(push, 2.0)
    assert [(worker.seen, worker.error) for worker in report.workers.values()] == [(report.version, None)]
    begun = BEGUN[kind] + (not sync)
    found = trainer.do(collect_from_each, 2, begun + 3)
    batches = [batch for one in found.values() for batch in one[begun:]]
    assert [(batch.actions, batch.versions) for batch in batches] == [([2.0], [report.version])] * len(batches)


@pytest.mark.parametrize("kind", BEGUN)
def test_with_a_policy_the_first_batch_of_inner_processes_is_version_1(start: Start, kind: str) -> None:
    """They are bound before their first forward. Mutant: let the outer process pass versions on."""
    first = start(kind=kind, workers=1, num_workers_per_collector=2).do(collect)
    assert (first.actions, first.versions) == ([7.0], [1])
