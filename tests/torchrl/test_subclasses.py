"""The extension points of torchrl's updaters: what a subclass overrides is called, and what it gives is used."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tensordict import TensorDict

from shmsync import PushError, RPCWeightUpdater
from tests.helpers import collectors
from tests.helpers.collectors import ask, collect, fill, net_policy, push, values
from tests.helpers.rpc_worlds import break_switch, mend_switch
from tests.helpers.trainers import Trainer


class Own(RPCWeightUpdater):
    """Overrides everything; what a test wants of it is set on the instance."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[Any] = []
        self.scale = 1.0
        self.skip: set[int] = set()
        self.ema: Any = None

    def _get_server_weights(self) -> Any:
        self.calls.append("get")
        return super()._get_server_weights() if self.ema is None else self.ema

    def _maybe_map_weights(self, server_weights: Any) -> Any:
        self.calls.append("map")
        weights = super()._maybe_map_weights(server_weights)
        if self.scale == 1.0:
            return weights
        return TensorDict.from_module(weights).data * self.scale

    def _sync_weights_with_worker(self, worker_id: Any = None, server_weights: Any = None) -> None:
        self.calls.append(("sync", worker_id))
        super()._sync_weights_with_worker(worker_id, server_weights)

    def _skip_update(self, worker_id: int) -> bool:
        return worker_id in self.skip


class KeywordsOnly(RPCWeightUpdater):
    """Overrides with the signature of torchrl's abstract base class."""

    calls: list[int]

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        self.calls.append(worker_id)
        super()._sync_weights_with_worker(worker_id=worker_id, server_weights=server_weights)


@pytest.fixture(scope="module")
def trainer(start_for_module: Callable[..., Trainer]) -> Trainer:
    return start_for_module(updater=Own)


@pytest.fixture(autouse=True)
def fresh(trainer: Trainer) -> None:
    trainer.do(reset)


def reset(world: SimpleNamespace) -> None:
    updater = world.updater
    updater.scale, updater.skip, updater.ema = 1.0, set(), None
    push(world, 1.0)
    updater.calls.clear()


def test_server_weights_of_a_subclass_are_pushed_where_none_are_given(trainer: Trainer) -> None:
    """An average of the weights, say. Mutant: push `policy_weights` instead of asking."""
    assert trainer.do(push_ema, 5.0) == ([5.0] * 2, ["get", "map", ("sync", 0), ("sync", 1)])


def push_ema(world: SimpleNamespace, value: float) -> Any:
    world.updater.ema = TensorDict.from_module(net_policy(value=value)).data
    world.collector.update_policy_weights_()
    return values(world), world.updater.calls


def test_weights_are_mapped_before_they_are_published(trainer: Trainer) -> None:
    """Mutant: publish what came in."""
    assert trainer.do(push_scaled) == ([6.0] * 2, ["map", ("sync", 0), ("sync", 1)])


def push_scaled(world: SimpleNamespace) -> Any:
    world.updater.scale = 2.0
    push(world, 3.0)
    return values(world), world.updater.calls


def test_an_overridden_sync_is_called_for_each_addressed_worker(trainer: Trainer) -> None:
    """Mutant: notify them all in parallel whatever the class is."""
    assert trainer.do(push_to, [1]) == ([1.0, 4.0], ["map", ("sync", 1)])


def push_to(world: SimpleNamespace, worker_ids: Any) -> Any:
    push(world, 4.0, worker_ids=worker_ids)
    return values(world), world.updater.calls


@pytest.mark.parametrize(
    ("worker_ids", "expected"), [(None, [1.0, 4.0]), ([0, 1], [1.0, 4.0]), ([0], [1.0, 1.0])], ids=str
)
def test_a_worker_that_is_to_be_skipped_is_skipped(trainer: Trainer, worker_ids: Any, expected: list[float]) -> None:
    """Also where everybody is addressed: it keeps its version, also after its next batch. Mutant: ask
    `_skip_update` for named workers only."""
    assert trainer.do(push_but_skip, worker_ids) == expected
    assert trainer.do(collect).actions == sorted(set(expected))


def push_but_skip(world: SimpleNamespace, worker_ids: Any) -> list[float]:
    world.updater.skip = {0}
    push(world, 4.0, worker_ids=worker_ids)
    return values(world)


def test_an_error_in_an_overridden_sync_does_not_keep_the_others_waiting(trainer: Trainer) -> None:
    """Worker 0 is tried first and fails; worker 1 is up to date, and the error names worker 0. Mutant: let the
    first error out."""
    trainer.do(ask, 0, break_switch)
    with pytest.raises(PushError) as caught:
        trainer.do(push, 7.0)
    assert set(caught.value.errors) == {0}
    assert trainer.do(ask, 1, collectors.value_of) == 7.0
    trainer.do(ask, 0, mend_switch)


def test_a_subclass_with_torchrls_keyword_only_signature_works(trainer: Trainer) -> None:
    """Mutant: pass the worker id by position."""
    assert trainer.do(push_with_keywords_only) == ([8.0] * 2, [0, 1])


def push_with_keywords_only(world: SimpleNamespace) -> Any:
    collector = world.collector
    updater = KeywordsOnly(None, type(collector), collector.collector_rrefs, world.policy, 2)
    updater.calls = []
    fill(world.policy, 8.0)
    with updater:
        updater.push_weights()
        return values(world), updater.calls
