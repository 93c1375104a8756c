"""Every member of torchrl's RPCWeightUpdater, on one real collector with three workers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from shmsync import LayoutMismatch, ShmSyncError, WorkerIdError
from tests.helpers import collectors
from tests.helpers.collectors import Net, collect, fill, net_policy, push, settled_values, values
from tests.helpers.trainers import Trainer, wait_for


@pytest.fixture(scope="module")
def trainer(start_for_module: Callable[..., Trainer]) -> Trainer:
    return start_for_module(workers=3, frames=30)


@pytest.fixture(autouse=True)
def no_warnings(trainer: Trainer) -> Iterator[None]:
    """Nothing that a test does makes the trainer warn."""
    yield
    assert trainer.do(lately_warned) == []


def lately_warned(world: SimpleNamespace) -> list[str]:
    # torch warns about its own use of gloo when RPC starts.
    found = [text for text in world.warnings if "ProcessGroupGloo" not in text]
    world.warnings.clear()
    return found


def version(world: SimpleNamespace) -> int:
    return world.updater.version


def form(world: SimpleNamespace, name: str, value: float) -> None:
    """Push `value` in one of the forms that a user may choose."""
    policy = net_policy(value=value)
    weights = TensorDict.from_module(policy)
    updater, collector = world.updater, world.collector
    {
        "push_weights(TensorDictModule)": lambda: updater.push_weights(policy),
        "push_weights(nn.Module)": lambda: updater.push_weights(torch.nn.ModuleDict({"module": Net(value)})),
        "push_weights(TensorDict)": lambda: updater.push_weights(weights),
        "push_weights(TensorDict of data)": lambda: updater.push_weights(weights.data),
        "push_weights(state dict)": lambda: updater.push_weights(policy.state_dict()),
        "push_weights(nested dict)": lambda: updater.push_weights(weights.to_dict()),
        "push_weights(weights=)": lambda: updater.push_weights(weights=policy),
        "push_weights(policy_or_weights=)": lambda: updater.push_weights(policy_or_weights=policy),
        "push_weights(wait=False)": lambda: (updater.push_weights(policy, wait=False), answered(world)),
        "update_weights": lambda: updater.update_weights(policy),
        "call(policy_or_weights=)": lambda: updater(policy_or_weights=policy, worker_ids=None),
        "call(wait=True)": lambda: updater(policy_or_weights=weights, worker_ids=(0, 1, 2), wait=True),
        "call(wait=False)": lambda: (updater(policy_or_weights=policy, wait=False), answered(world)),
        "collector(policy)": lambda: collector.update_policy_weights_(policy),
        "collector(TensorDict)": lambda: collector.update_policy_weights_(weights),
        "collector(weights=)": lambda: collector.update_policy_weights_(weights=weights),
        "collector(policy=)": lambda: collector.update_policy_weights_(policy=policy),
        "collector(worker_ids=)": lambda: collector.update_policy_weights_(policy, worker_ids=[2, 0, 1]),
        "the server's, changed in place": lambda: (fill(world.policy, value), updater.push_weights()),
        "the server's, through the collector": lambda: (fill(world.policy, value), collector.update_policy_weights_()),
    }[name]()


FORMS = [
    *("push_weights(TensorDictModule)", "push_weights(nn.Module)", "push_weights(TensorDict)"),
    *("push_weights(TensorDict of data)", "push_weights(state dict)", "push_weights(nested dict)"),
    *("push_weights(weights=)", "push_weights(policy_or_weights=)", "push_weights(wait=False)", "update_weights"),
    *("call(policy_or_weights=)", "call(wait=True)", "call(wait=False)", "collector(policy)", "collector(TensorDict)"),
    *("collector(weights=)", "collector(policy=)", "collector(worker_ids=)"),
    *("the server's, changed in place", "the server's, through the collector"),
]


def answered(world: SimpleNamespace) -> None:
    """Until `last_push` has the answers of all workers."""
    wait_for(lambda: all(r.in_use is not None for r in world.updater.last_push.workers.values()), "answers")


@pytest.mark.parametrize("number", range(len(FORMS)), ids=FORMS)
def test_weights_arrive_in_every_form(trainer: Trainer, number: int) -> None:
    """Mutant: leave `policy_or_weights` out of push_weights, as torchrl does, and the old weights are pushed again."""
    before = trainer.do(version)
    trainer.do(form, FORMS[number], 100.0 + number)
    assert trainer.do(values) == [100.0 + number] * 3
    assert trainer.do(version) == before + 1


def test_a_batch_after_a_push_is_made_with_it_and_stamped_with_its_version(trainer: Trainer) -> None:
    """The stamp is the trainer's version, not a count of updates. Mutant: let _stamp set nothing."""
    report = trainer.do(push, 21.0)
    batch = trainer.do(collect)
    assert batch.actions == [21.0]
    assert batch.versions == [report.version]
    assert len(batch.processes) == 3


def test_the_report_of_a_push(trainer: Trainer) -> None:
    """Version, bytes and leaves written, seconds per phase, and each worker's version. Mutant: leave the workers'
    answers out of it."""
    before = trainer.do(version)
    report = trainer.do(push, 22.0)
    assert (report.version, report.nbytes, report.leaves) == (before + 1, 8 * 4, 1)
    assert set(report.seconds) == {"copy", "notify"}
    assert {w: (r.in_use, r.seen, r.error) for w, r in report.workers.items()} == dict.fromkeys(
        range(3), (report.version, report.version, None)
    )


def test_a_push_without_waiting_is_not_confirmed_until_the_workers_have_answered(trainer: Trainer) -> None:
    """`last_push` fills in by itself. Mutant: let it give the report without looking at the unanswered futures."""
    at_once, later = trainer.do(push_and_look_twice)
    assert set(at_once) == {0, 1, 2}
    assert later == {w: (trainer.do(version), None) for w in range(3)}


def push_and_look_twice(world: SimpleNamespace) -> Any:
    fill(world.policy, 23.0)
    world.updater.push_weights(world.policy, wait=False)
    at_once = {w: r.status for w, r in world.updater.last_push.workers.items()}
    answered(world)
    return at_once, {w: (r.in_use, r.error) for w, r in world.updater.last_push.workers.items()}


def test_the_lag_is_what_the_workers_are_behind(trainer: Trainer) -> None:
    """Nobody is behind after an awaited push. Mutant: compare with the newest version instead of the addressed one."""
    trainer.do(push, 24.0)
    trainer.do(push, 25.0, worker_ids=[1])
    lag = trainer.do(lag_of)
    assert (lag.min, lag.mean, lag.max, lag.workers) == (0, 0.0, 0, {0: 0, 1: 0, 2: 0})


def lag_of(world: SimpleNamespace) -> Any:
    return world.updater.lag()


def test_all_worker_ids(trainer: Trainer) -> None:
    """Mutant: count the workers when the updater is made."""
    assert trainer.do(all_worker_ids) == [0, 1, 2]


def all_worker_ids(world: SimpleNamespace) -> list[int]:
    return world.updater.all_worker_ids()


@pytest.mark.parametrize(
    ("worker_ids", "addressed"),
    [
        (None, {0, 1, 2}),
        (0, {0}),
        ([1], {1}),
        ([2, 0], {0, 2}),
        ((1,), {1}),
        ([1, 1], {1}),
        ([], set()),
        (range(3), {0, 1, 2}),
        (torch.device("cpu"), {0, 1, 2}),
        ([torch.device("cpu"), 1], {0, 1, 2}),
    ],
    ids=str,
)
def test_exactly_the_addressed_workers_are_updated(trainer: Trainer, worker_ids: Any, addressed: set[int]) -> None:
    """The others keep value and version; nobody addressed: nothing happens at all. Mutant: store row 0 for a subset."""
    trainer.do(push, 30.0)
    before = trainer.do(version)
    trainer.do(push, 31.0, worker_ids=worker_ids)
    assert trainer.do(settled_values) == [31.0 if worker in addressed else 30.0 for worker in range(3)]
    assert trainer.do(version) == before + bool(addressed)
    after = trainer.do(version)
    assert trainer.do(collectors.versions) == [after if worker in addressed else before for worker in range(3)]


@pytest.mark.parametrize(
    ("worker_ids", "named"),
    [
        (-1, "-1"),
        (3, "3"),
        ("0", "'0'"),
        ([0, 3], "3"),
        ([0, "1"], "'1'"),
        (1.0, "1.0"),
        (True, "True"),
        ([None], "None"),
    ],
    ids=str,
)
def test_a_bad_worker_id_is_named_and_nothing_is_sent(trainer: Trainer, worker_ids: Any, named: str) -> None:
    """With the valid range; -1 does not hit the last worker. Mutant: look at the ids after the publish."""
    refused(trainer, worker_ids, rf"0 to 2.*got {named}")


def test_a_device_that_no_worker_is_on_is_named_and_nothing_is_sent(trainer: Trainer) -> None:
    """With the devices that they are on. Mutant: address nobody, silently."""
    refused(trainer, torch.device("meta"), r"meta.*\['cpu', 'cpu', 'cpu'\]")


def refused(trainer: Trainer, worker_ids: Any, text: str) -> None:
    trainer.do(push, 32.0)
    before = trainer.do(version)
    with pytest.raises(WorkerIdError, match=text):
        trainer.do(push, 33.0, worker_ids=worker_ids)
    assert trainer.do(version) == before
    assert trainer.do(settled_values) == [32.0] * 3


def test_random_subsets_are_exact(trainer: Trainer) -> None:
    """A hundred of them, each worker looked at after each. Mutant: store row 0 for a subset."""
    assert trainer.do(push_to_random_subsets, 100) == []


def push_to_random_subsets(world: SimpleNamespace, rounds: int) -> list[Any]:
    draw, wrong = random.Random(0), []
    push(world, 0.0)
    expected = [0.0] * 3
    for value in range(1, rounds + 1):
        subset = draw.sample(range(3), draw.randint(0, 3))
        push(world, float(value), worker_ids=subset)
        expected = [float(value) if worker in subset else old for worker, old in enumerate(expected)]
        if (found := settled_values(world)) != expected:
            wrong.append((value, subset, expected, found))
    return wrong


def test_post_hooks_run_in_order_after_every_push(trainer: Trainer) -> None:
    """When they run, the workers have the weights. Mutant: run them before the notification, or not at all."""
    assert trainer.do(push_with_hooks) == ["first", 40.0, "second", "first", 41.0, "second"]


def push_with_hooks(world: SimpleNamespace) -> list[Any]:
    ran: list[Any] = []
    world.updater.register_post_hook(lambda: ran.extend(["first", values(world)[2]]))
    world.updater.register_post_hook(lambda: ran.append("second"))
    assert len(world.updater.post_hooks) == 2
    push(world, 40.0)
    fill(world.policy, 41.0)
    world.collector.update_policy_weights_(world.policy)
    world.updater.post_hooks.clear()
    return ran


def test_another_collector_is_refused(trainer: Trainer) -> None:
    """The registered one may come again. Mutant: store the reference without a look."""
    assert trainer.do(register_again) == ("RPCCollector", True)
    with pytest.raises(ShmSyncError, match="RPCCollector"):
        trainer.do(register_another)
    assert trainer.do(register_again) == ("RPCCollector", True)


def register_again(world: SimpleNamespace) -> tuple[str, bool]:
    world.updater.register_collector(world.collector)
    known = world.updater.collector
    return type(known).__name__, known is world.collector


def register_another(world: SimpleNamespace) -> None:
    world.updater.register_collector(SimpleNamespace(policy=world.policy))


def test_increment_version_may_be_called_as_on_the_base_class(trainer: Trainer) -> None:
    """torchrl's iterates None there. The workers' stamps stay the trainer's version. Mutant: count versions in the
    workers."""
    trainer.do(increment_version)
    report = trainer.do(push, 42.0)
    assert trainer.do(collect).versions == [report.version]


def increment_version(world: SimpleNamespace) -> None:
    world.updater.increment_version()


def test_weights_that_do_not_fit_are_refused_before_anything_is_written(trainer: Trainer) -> None:
    """With both shapes in the text. Mutant: write first and compare then."""
    trainer.do(push, 43.0)
    before = trainer.do(version)
    with pytest.raises(LayoutMismatch, match=r"\(9,\)"):
        trainer.do(push_a_bigger_one)
    assert trainer.do(version) == before
    assert trainer.do(values) == [43.0] * 3


def push_a_bigger_one(world: SimpleNamespace) -> None:
    world.updater.push_weights(net_policy(size=9))


def test_the_trainers_parameters_stay_its_own(trainer: Trainer) -> None:
    """Never moved, shared or replaced; a step is invisible until it is pushed. Mutant: publish by `share_memory_()`."""
    unpushed, shared, moved = trainer.do(step_and_look)
    assert unpushed == [44.0] * 3
    assert not shared
    assert not moved


def step_and_look(world: SimpleNamespace) -> tuple[list[float], bool, bool]:
    (parameter,) = world.policy.parameters()
    address = parameter.data_ptr()
    push(world, 44.0)
    fill(world.policy, 45.0)
    unpushed = values(world)
    return unpushed, parameter.is_shared(), parameter.data_ptr() != address
