"""`weight_updater=RPCWeightUpdater` on the installed torchrl release, with real collectors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from shmsync import NothingPublished, WorkerIdError
from tests.compat.support import Stamping, judge, short_stream, stamps, warned_of_deprecation
from tests.helpers.collectors import collect, collect_from_each, fill, net_policy, push, settled_values
from tests.helpers.releases import offered
from tests.helpers.streams import big_policy
from tests.helpers.trainers import Trainer

Start = Callable[..., Trainer]
# What a worker's factory makes; the trainer holds 7, and what reaches a worker can only come from there.
zeros = partial(net_policy, value=0.0)
INNER = ("MultiSyncCollector", "MultiAsyncCollector")
# Before torchrl 0.11 nothing can be given to inner processes when they are made: their collector passes versions on,
# and only those that rest between two batches get each of them whole.
WHOLE = INNER if "schemes" in offered() else INNER[:1]


@pytest.fixture(scope="module")
def trainer(start_for_module: Start) -> Trainer:
    return start_for_module(policy=big_policy, frames=40, updater=Stamping)


def test_the_first_batch_has_the_trainers_weights(trainer: Trainer) -> None:
    """Mutant, where there are stamps: publish nothing when the collector registers its updater."""
    first = trainer.do(collect)
    assert (first.actions, first.versions) == ([1.0], stamps(1))


def test_a_batch_after_a_push_is_made_with_it(trainer: Trainer) -> None:
    """In all workers, and each has confirmed the version. Mutant: let a collector of this release be no collector."""
    report = trainer.do(push, 21.0)
    assert {w: (r.in_use, r.seen, r.error) for w, r in report.workers.items()} == dict.fromkeys(
        range(2), (report.version, report.version, None)
    )
    batch = trainer.do(collect)
    assert (batch.actions, batch.versions) == ([21.0], stamps(report.version))
    assert len(batch.processes) == 2


def form(world: SimpleNamespace, number: int, value: float) -> None:
    """Push `value` in one of the forms that a user may choose."""
    policy = big_policy(value=value)
    updater, collector = world.updater, world.collector
    (
        lambda: updater.push_weights(policy),
        lambda: updater.push_weights(TensorDict.from_module(policy)),
        lambda: updater.push_weights(policy.state_dict()),
        lambda: updater(policy_or_weights=policy, worker_ids=(0, 1), wait=False),
        lambda: collector.update_policy_weights_(policy),
        lambda: collector.update_policy_weights_(TensorDict.from_module(policy).data, worker_ids=[1, 0]),
        lambda: (fill(world.policy, value), collector.update_policy_weights_()),
    )[number]()


@pytest.mark.parametrize("number", range(7))
def test_weights_arrive_in_every_form(trainer: Trainer, number: int) -> None:
    """Mutant: send None as `policy_or_weights`."""
    trainer.do(form, number, 30.0 + number)
    assert trainer.do(collect).actions == [30.0 + number]


@pytest.mark.parametrize(
    ("worker_ids", "addressed"), [([1], {1}), (0, {0}), (torch.device("cpu"), {0, 1}), ([], set())]
)
def test_exactly_the_addressed_workers_are_updated(trainer: Trainer, worker_ids: Any, addressed: set[int]) -> None:
    """Mutant: store row 0 for a subset."""
    trainer.do(push, 40.0)
    trainer.do(push, 41.0, worker_ids=worker_ids)
    assert trainer.do(settled_values) == [41.0 if worker in addressed else 40.0 for worker in range(2)]


def test_a_bad_worker_id_is_refused(trainer: Trainer) -> None:
    with pytest.raises(WorkerIdError, match="got 2"):
        trainer.do(push, 42.0, worker_ids=[2])


def test_no_forward_mixes_versions(trainer: Trainer) -> None:
    """Under pushes without pause; versions never go back, and each step says its own. Mutants: bind without
    a gate; look for what a collector carries by its later name alone."""
    found = trainer.do(restart_and_stream)
    judge(found)
    assert ("collector", "policy_version") in found.stamps


def restart_and_stream(world: SimpleNamespace) -> Any:
    """The weights of version v are all v from here on, in every batch."""
    push(world, world.updater.version + 1.0)
    collect(world)
    return short_stream(world)


def test_nothing_of_it_was_deprecated(trainer: Trainer) -> None:
    """In the trainer, since torchrl was imported, up to here. Mutant: inherit from torchrl's class."""
    assert trainer.do(warned_of_deprecation) == []


def push_nothing(world: SimpleNamespace) -> None:
    world.updater.push_weights()


def test_with_a_factory_the_first_push_fixes_the_weights(start: Start) -> None:
    """Mutant: forget the first pushed weights."""
    trainer = start(factory=zeros)
    with pytest.raises(NothingPublished, match="policy_factory"):
        trainer.do(push_nothing)
    trainer.do(push)
    batch = trainer.do(collect)
    assert (batch.actions, batch.versions) == ([7.0], stamps(1))
    trainer.do(push, 9.0)
    assert trainer.do(collect).actions == [9.0]


def test_an_async_collector(start: Start) -> None:
    """Its batches are made ahead: one may have been begun before a push, by each of two workers. Mutant: switch only
    where the collector rests."""
    trainer = start(policy=big_policy, sync=False, frames=40, updater=Stamping)
    first = trainer.do(collect)
    assert (first.actions, first.versions) == ([1.0], stamps(1))
    judge(trainer.do(short_stream))


@pytest.mark.parametrize("kind", INNER)
def test_collectors_inside_collectors(start: Start, kind: str) -> None:
    """Every batch that an inner process begins after a push is made with it; no forward mixes versions. Mutants: bind
    the outer process only; before torchrl 0.11, pass a version on while a batch is being made."""
    options = {"kind": kind, "workers": 1, "num_workers_per_collector": 2, "sync": False, "frames": 40}
    trainer = start(policy=big_policy, updater=Stamping if "schemes" in offered() else None, **options)
    report = trainer.do(push, 2.0)
    assert [(worker.seen, worker.error) for worker in report.workers.values()] == [(2, None)]
    begun = 2 + INNER.index(kind)
    found = trainer.do(collect_from_each, 2, begun + 2)
    batches = [batch for one in found.values() for batch in one[begun:]]
    assert [(batch.actions, batch.versions) for batch in batches] == [([2.0], stamps(2))] * len(batches)
    if kind in WHOLE:
        judge(trainer.do(short_stream))


def random_policy() -> Any:
    """Without weights."""
    from torchrl.envs.utils import RandomPolicy

    from tests.helpers.collectors import Corridor

    return RandomPolicy(Corridor().action_spec)


def test_a_policy_without_weights(start: Start) -> None:
    """Mutant: expect an nn.Module as every collector's policy."""
    trainer = start(policy=random_policy, workers=1)
    assert trainer.do(collect).frames == 20
    trainer.do(push_nothing)
    assert trainer.do(collect).frames == 20
