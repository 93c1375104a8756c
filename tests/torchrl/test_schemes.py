"""torchrl's own class names for weight synchronisation, `weight_sync_schemes=`: right from the first batch on."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchrl.collectors
from tensordict import TensorDict
from torch import nn
from torchrl.envs.utils import RandomPolicy
from torchrl.weight_update import WeightStrategy, WeightSyncScheme

import shmsync
from shmsync import ShmSyncError
from tests.helpers.collectors import Corridor, collect, collect_from_each, fill, net_policy
from tests.helpers.schemes import build_multi, build_rpc, push, push_the_trainers
from tests.helpers.trainers import Trainer

Start = Callable[..., Trainer]
zeros = partial(net_policy, value=0.0)
KINDS = ("Collector", "MultiSyncCollector", "MultiAsyncCollector")


def step_without_a_push(world: SimpleNamespace, value: float) -> None:
    fill(world.policy, value)


def last_push(world: SimpleNamespace) -> dict[int, int | None]:
    return {worker: report.in_use for worker, report in world.scheme.last_push.workers.items()}


def end(world: SimpleNamespace) -> None:
    world.collector.shutdown()
    world.scheme.shutdown()
    world.scheme.shutdown()


def collect_until(world: SimpleNamespace, version: int, most: int = 40) -> SimpleNamespace:
    """The first batch that is all of a version: some were begun, or waited in a queue, before it was pushed."""
    for _ in range(most):
        seen = collect(world)
        if seen.versions == [version]:
            return seen
    raise AssertionError(f"no batch of version {version} among {most}, the last was of {seen.versions}")


def newest_of_each(world: SimpleNamespace, workers: int) -> dict[int, float]:
    """The last action of each process, after each has begun at least two more batches."""
    found = collect_from_each(world, workers, 3)
    return {process: batches[-1].actions[-1] for process, batches in found.items()}


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_rpc_collectors_of_every_kind(start: Start, kind: str, sync: bool) -> None:
    """Mutants: attach at the first push only (the first batch is the worker's own); pass nothing to inner processes."""
    trainer = start(build=build_rpc, kind=kind, sync=sync)
    first = trainer.do(collect)
    assert (first.actions, first.versions) == ([7.0], [1])
    assert trainer.do(push, 8.0) == 2
    assert trainer.do(collect_until, 2).actions == [8.0]
    trainer.do(step_without_a_push, 9.0)
    assert trainer.do(collect, 2).actions == [8.0]
    assert trainer.do(push_the_trainers, 9.0) == 3
    assert trainer.do(collect_until, 3).actions == [9.0]
    trainer.do(end)


@pytest.mark.parametrize("with_policy", [True, False])
def test_factory_workers_begin_with_the_trainers_weights(start: Start, with_policy: bool) -> None:
    """Of the trainer's policy, or of the one that the trainer's factory makes. Mutant: publish nothing at connect()."""
    factory = zeros if with_policy else partial(net_policy, value=3.0)
    trainer = start(build=build_rpc, factory=factory, with_policy=with_policy)
    first = trainer.do(collect)
    assert (first.actions, first.versions) == ([7.0 if with_policy else 3.0], [1])


def test_a_subset_of_rpc_workers(start: Start) -> None:
    trainer = start(build=build_rpc)
    trainer.do(push, 8.0, [1])
    assert trainer.do(last_push) == {1: 2}
    assert trainer.do(collect).actions == [7.0, 8.0]


@pytest.mark.parametrize("factory", [None, zeros])
@pytest.mark.parametrize("kind", KINDS[1:])
def test_collectors_with_processes(start: Start, kind: str, factory: Any) -> None:
    trainer = start(build=build_multi, kind=kind, factory=factory)
    first = trainer.do(collect)
    value = 7.0 if factory is None else 0.0
    assert (first.actions, first.versions) == ([value], [1])
    assert trainer.do(push, 8.0) == 2
    assert trainer.do(collect_until, 2).actions == [8.0]
    trainer.do(step_without_a_push, 9.0)
    assert trainer.do(collect, 2).actions == [8.0]
    assert trainer.do(push, 10.0, [1]) == 3
    assert set(trainer.do(newest_of_each, 2).values()) == {8.0, 10.0}
    trainer.do(end)


@pytest.mark.parametrize("factory", [None, zeros])
def test_forked_processes(start: Start, factory: Any) -> None:
    """They are handed the scheme itself, not a copy that was pickled. Mutant: ask the channel for its address there."""
    trainer = start("fork", build=build_multi, kind="MultiSyncCollector", factory=factory)
    assert trainer.do(collect).actions == [7.0 if factory is None else 0.0]
    assert trainer.do(push, 8.0) == 2
    assert trainer.do(collect_until, 2).actions == [8.0]
    trainer.do(end)


def test_forked_inner_processes(start: Start) -> None:
    """Of a collector under RPC: they have the receiver of their parent, as it was there. Mutant: leave it initialised
    as a sender, which torchrl refuses in a receiver."""
    trainer = start("fork", build=build_rpc, kind="MultiSyncCollector")
    first = trainer.do(collect)
    assert (first.actions, first.versions) == ([7.0], [1])
    trainer.do(push, 8.0)
    assert trainer.do(collect_until, 2).actions == [8.0]
    trainer.do(end)


def run_to_the_end(world: SimpleNamespace) -> list[int]:
    frames = [data.numel() for data in world.batches]
    world.collector.shutdown()
    return frames


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_that_is_a_function(start: Start, kind: str) -> None:
    """It has nothing to follow, and updates do nothing. Mutants: publish the function; pass a scheme on to inner
    processes, which torchrl takes for a module's."""
    trainer = start(build=build_rpc, policy=random_policy, kind=kind, total_frames=100)
    trainer.do(push_nothing_at_all)
    assert trainer.do(run_to_the_end) == [20] * 5
    assert "Traceback" not in trainer.output()
    assert "second copy" not in trainer.output()


def random_policy() -> RandomPolicy:
    return RandomPolicy(Corridor().action_spec)


def push_nothing_at_all(world: SimpleNamespace) -> None:
    world.collector.update_policy_weights_()
    world.collector.update_policy_weights_(world.policy)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_for_workers_with_a_factory(start: Start, kind: str) -> None:
    """As torchrl's test has it: a TensorDict of another policy, while the trainer has none."""
    trainer = start(build=build_rpc, kind=kind, factory=zeros, with_policy=False, sync=kind != "MultiAsyncCollector")
    assert trainer.do(collect).actions == [0.0]
    trainer.do(push_a_tensordict, 8.0)
    assert trainer.do(collect_until, 2).actions == [8.0]


def push_a_tensordict(world: SimpleNamespace, value: float) -> None:
    weights = TensorDict.from_module(net_policy(value=value)).data.lock_()
    world.collector.update_policy_weights_(weights)


def test_the_rpc_scheme_has_the_updaters_options(start: Start) -> None:
    """Mutant: drop one of them on the way."""
    trainer = start(build=build_rpc, max_lag=0, timeout=30.0, first_version=11)
    assert trainer.do(collect).versions == [11]
    trainer.do(push, 8.0)
    assert trainer.do(largest_lag) == 0
    assert trainer.do(timeout_of) == 30.0
    assert trainer.do(collect, 2).actions == [8.0]


def test_the_lag_of_processes(start: Start) -> None:
    """One that rests is behind until its next batch. Mutant: count what is addressed to others."""
    trainer = start(build=build_multi, kind="MultiSyncCollector")
    trainer.do(collect)
    assert trainer.do(lags) == {0: 0, 1: 0}
    for value in (8.0, 9.0):
        trainer.do(push, value, worker_ids=[1])
    assert trainer.do(lags) == {0: 0, 1: 2}
    trainer.do(collect)
    assert trainer.do(lags) == {0: 0, 1: 0}
    trainer.do(end)
    assert trainer.end() == 0


def lags(world: SimpleNamespace) -> dict[int, int]:
    return dict(world.scheme.lag().workers)


def largest_lag(world: SimpleNamespace) -> int:
    return world.scheme.lag().max


def timeout_of(world: SimpleNamespace) -> float:
    return world.scheme._updater.timeout


FOR_ALL = [{"first_version": 0}, {"storage": "cloud"}, {"dtype": 3}, {"timeout": 0}, {"timeout": None}]
FOR_RPC = [{"notify": "pigeon"}, {"on_lag": "weep"}, {"max_lag": -1}, {"fallback": "tcp"}]


@pytest.mark.parametrize("options", [*FOR_ALL, *FOR_RPC], ids=lambda options: next(iter(options)))
def test_bad_options_are_named_at_once(options: dict[str, Any]) -> None:
    """Before there are workers. Mutant: leave it to the channel, which is opened later."""
    kinds = [shmsync.RPCWeightUpdater, shmsync.RPCWeightSyncScheme]
    for kind in [*kinds, *([shmsync.SharedMemWeightSyncScheme] if options in FOR_ALL else [])]:
        with pytest.raises(ShmSyncError, match=f"Expected .*{next(iter(options))}"):
            kind(**options)


def test_the_last_version_is_known_after_the_end(start: Start) -> None:
    """A checkpoint may be written then. Nothing can be sent any more. Mutants: forget it; open another channel."""
    trainer = start(build=build_rpc)
    trainer.do(push, 8.0)
    assert trainer.do(after_the_end) == (2, 2, "ChannelClosed", "ChannelClosed", 2)


def after_the_end(world: SimpleNamespace) -> tuple[Any, ...]:
    world.collector.shutdown()
    errors = []
    for call in (lambda: world.scheme.send(world.policy), world.scheme.lag):
        try:
            call()
        except ShmSyncError as error:
            errors.append(type(error).__name__)
    return world.scheme.version, world.scheme.last_push.version, *errors, world.scheme.version


@pytest.mark.filterwarnings("ignore:Using WeightUpdaterBase:DeprecationWarning")  # torchrl about its own argument
def test_collectors_that_a_scheme_is_not_for() -> None:
    """Each is an error when the collector is made. Mutant: push to nobody, and say nothing."""
    options = {"frames_per_batch": 10, "total_frames": 100, "auto_register_policy_transforms": False}
    collector = torchrl.collectors
    random = RandomPolicy(Corridor().action_spec)
    for make, match in (
        (lambda: scheme_in(collector.Collector, Corridor, net_policy()), "MultiSyncCollector, say, got Collector"),
        (lambda: scheme_in(collector.MultiSyncCollector, [Corridor], random), "got RandomPolicy"),
        (
            lambda: collector.Collector(Corridor, net_policy(), weight_updater=shmsync.RPCWeightUpdater, **options),
            "RPC",
        ),
        (
            lambda: scheme_in(collector.MultiSyncCollector, [Corridor], net_policy(), shmsync.RPCWeightSyncScheme()),
            "an RPCCollector, got MultiSyncCollector",
        ),
    ):
        with pytest.raises(ShmSyncError, match=match):
            make()


def scheme_in(kind: Any, env: Any, policy: Any, scheme: Any = None) -> Any:
    scheme = scheme or shmsync.SharedMemWeightSyncScheme()
    more = {} if kind is not torchrl.collectors.Collector else {"auto_register_policy_transforms": False}
    return kind(env, policy, frames_per_batch=10, total_frames=100, weight_sync_schemes={"policy": scheme}, **more)


def test_a_first_forward_without_a_trainer_is_bounded_and_names_the_worker() -> None:
    """Where torchrl's waits for ever."""
    scheme = shmsync.RPCWeightSyncScheme(timeout=0.3)
    copy = pickle.loads(pickle.dumps(scheme))
    collector = torchrl.collectors.Collector(
        Corridor,
        net_policy(),
        frames_per_batch=10,
        total_frames=100,
        weight_recv_schemes={"policy": copy},
        worker_idx=3,
        auto_register_policy_transforms=False,
    )
    try:
        with pytest.raises(shmsync.WaitTimeout, match=r"Worker 3 .*within 0\.3 s"):
            collector.next()
    finally:
        collector.shutdown()
        scheme.shutdown()


def test_they_are_torchrls_schemes() -> None:
    for kind in (shmsync.RPCWeightSyncScheme, shmsync.SharedMemWeightSyncScheme):
        assert issubclass(kind, WeightSyncScheme)
        scheme = kind()
        assert len(pickle.dumps(scheme)) < 1500
        with pytest.raises(ShmSyncError, match="connected"):
            scheme.send(nn.Linear(1, 1))
        with pytest.raises(ShmSyncError, match="no transports"):
            scheme.create_transport()
        scheme.shutdown()


@pytest.mark.skipif(not hasattr(WeightSyncScheme, "from_backend"), reason="this torchrl has no names for schemes")
@pytest.mark.parametrize("name", ["shmsync_rpc", "shmsync_shared"])
def test_torchrl_finds_them_by_name(name: str) -> None:
    scheme = WeightSyncScheme.from_backend(name, timeout=5.0)
    assert type(scheme).__module__ == "shmsync.torchrl.schemes"
    scheme.shutdown()


class Counting(nn.Linear):
    def get_extra_state(self) -> dict[str, torch.Tensor]:
        return {"count": torch.ones(1)}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("nobody sends it")


def test_extra_state_is_named_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """torchrl's schemes send it. Mutants: say nothing; take it for a tensor of the layout."""
    scheme = shmsync.SharedMemWeightSyncScheme()
    model = Counting(1, 1)
    scheme.init_on_sender(model_id="normaliser", model=model)
    scheme.connect()
    assert "The extra state of normaliser (Counting) is not pushed" in caplog.text
    extracted = WeightStrategy(extract_as="tensordict").extract_weights(model)
    assert "__extra_state__" in set(extracted.keys())
    scheme.send(extracted)
    assert scheme.version == 2
    scheme.shutdown()


def between_processes(world: SimpleNamespace, form: str) -> list[tuple[float, float]]:
    """torchrl's own flow: init_on_sender, start, connect, send; what a worker's model shows before and after."""
    model = nn.Linear(4, 2)
    fill(model, 1.5)
    scheme = shmsync.SharedMemWeightSyncScheme()
    scheme.init_on_sender(
        model_id="policy", weights=TensorDict.from_module(model), devices=[torch.device("cpu")], num_workers=1
    )
    pipe, theirs = multiprocessing.Pipe()
    worker = multiprocessing.Process(target=receive, args=(scheme, theirs))
    worker.start()
    scheme.connect()
    shown = [pipe.recv()]
    fill(model, 3.0)
    scheme.send(model if form == "module" else TensorDict.from_module(model))
    pipe.send("sent")
    shown.append(pipe.recv())
    worker.join()
    scheme.shutdown()
    return shown


def receive(scheme: Any, pipe: Any) -> None:
    model = nn.Linear(4, 2)
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=0)
    scheme.connect(worker_idx=0)
    pipe.send((model.weight.min().item(), model.bias.max().item()))
    pipe.recv()
    scheme.receive()
    pipe.send((model.weight.min().item(), model.bias.max().item()))
    scheme.shutdown()


@pytest.mark.parametrize("form", ["module", "tensordict"])
@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_processes_of_ones_own(start: Start, method: str, form: str) -> None:
    """As torchrl's tests of its schemes have it. Mutants: take a TensorDict for weights by worker; bind at the first
    send only."""
    trainer = start(method, build=build_nothing)
    assert trainer.do(between_processes, form) == [(1.5, 1.5), (3.0, 3.0)]


def build_nothing(world: SimpleNamespace) -> None:
    """The test brings its own processes."""


def test_plain_processes_models_and_maps() -> None:
    """Without a collector: weights for each worker, and a model in this process as its receiver."""
    scheme = shmsync.SharedMemWeightSyncScheme()
    weights = {worker: {"weight": torch.full((1, 1), float(worker)), "bias": torch.zeros(1)} for worker in range(2)}
    scheme.init_on_sender(params_map=weights)
    models = [nn.Linear(1, 1) for _ in range(2)]
    receivers = [pickle.loads(pickle.dumps(scheme)) for _ in models]
    scheme.connect()
    for worker, (model, receiver) in enumerate(zip(models, receivers, strict=True)):
        receiver.init_on_receiver(model_id="policy", model=model, worker_idx=worker)
        receiver.connect(worker_idx=worker)
        assert model.weight.item() == worker
    scheme.send({worker: {**its, "weight": its["weight"] + 5} for worker, its in weights.items()})
    for receiver in receivers:
        receiver.receive()
    assert [model.weight.item() for model in models] == [5.0, 6.0]
    for one in (*receivers, scheme):
        one.shutdown()


def test_unknown_worker_ids_of_processes_are_named(start: Start) -> None:
    """And nothing is published. Mutant: hand them on to the publisher, which doesn't know how many there are."""
    trainer = start(build=build_multi, kind="MultiSyncCollector")
    for ids in ([7], [0, 9], -1):
        assert trainer.do(_refused, ids) == "WorkerIdError"
    trainer.do(end)
    assert trainer.end() == 0


def _refused(world: Any, worker_ids: Any) -> str:
    before = world.scheme.version
    try:
        world.collector.update_policy_weights_(world.policy, worker_ids=worker_ids)
    except Exception as error:
        assert world.scheme.version == before
        return type(error).__name__
    return "nothing"
