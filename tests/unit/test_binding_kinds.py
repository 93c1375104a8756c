"""Kinds of modules: compiled, scripted, hooked, without a forward, several under one version, run by several threads.

Mutants: gate `forward` only (hooks then run on the old version); bind the models of a dict one after the other; count
forwards by module instead of by binding.
"""

import contextlib
import threading
import time
import warnings

import pytest
import torch
from tensordict import TensorDict, TensorDictParams
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from shmsync import BindingError, LayoutMismatch
from tests.helpers.models import fill, snapshot, uniform

modes = pytest.mark.parametrize("mode", ["map", "copy"])


def follows(publisher, subscriber, source, worker, *, mode="auto", run=None) -> None:
    """Push three versions; the worker's forward must give what the source's gives, and have its tensors."""
    run = run or (lambda module: module(torch.ones(1, 2)))
    channel = publisher(source)
    binding = subscriber(channel).bind(worker, mode)
    for k in (1, 2, 3):
        with torch.no_grad():
            for tensor in source.parameters():
                tensor.copy_(torch.randn_like(tensor))
        channel.publish()
        torch.testing.assert_close(run(worker), run(source))
        assert binding.version == k
        assert list(snapshot(worker).values()) == list(snapshot(source).values())
    binding.unbind()
    torch.testing.assert_close(run(worker), run(source))


@pytest.fixture(autouse=True)
def forget_compiled():
    yield
    torch.compiler.reset()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))


@modes
def test_a_compiled_module(publisher, subscriber, mode) -> None:
    worker = torch.compile(network(), backend="eager")
    worker(torch.ones(1, 2))
    follows(publisher, subscriber, network(), worker, mode=mode)


@modes
def test_a_module_that_compiled_itself(publisher, subscriber, mode) -> None:
    worker = network()
    worker.compile(backend="eager")
    worker(torch.ones(1, 2))
    follows(publisher, subscriber, network(), worker, mode=mode)


@modes
def test_a_module_with_a_compiled_part(publisher, subscriber, mode) -> None:
    worker = network()
    worker[0] = torch.compile(worker[0], backend="eager")
    follows(publisher, subscriber, network(), worker, mode=mode)


@modes
def test_a_bound_module_that_is_compiled_later(publisher, subscriber, mode) -> None:
    source, worker = network(), network()
    channel = publisher(source)
    subscriber(channel).bind(worker, mode)
    compiled = torch.compile(worker, backend="eager")
    for k in (1, 2, 3):
        channel.publish(fill(source, k))
        torch.testing.assert_close(compiled(torch.ones(1, 2)), source(torch.ones(1, 2)))


@modes
def test_a_scripted_part(publisher, subscriber, mode) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that TorchScript will go
        source, worker = network(), network()
        worker[0] = torch.jit.script(worker[0])
    follows(publisher, subscriber, source, worker, mode=mode)


@modes
def test_a_scripted_module(publisher, subscriber, mode) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        worker = torch.jit.script(network())
    follows(publisher, subscriber, network(), worker, mode=mode)


class Functionless(nn.Module):
    """Used through its methods only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def act(self) -> torch.Tensor:
        return self.weight * 1


@pytest.mark.parametrize(
    "make",
    [
        Functionless,
        lambda: nn.ParameterDict({"weight": torch.zeros(2)}),
        lambda: nn.ModuleList([nn.Linear(1, 2)]),
        lambda: TensorDictParams(TensorDict(weight=torch.zeros(2)), no_convert=False),
    ],
    ids=["methods", "ParameterDict", "ModuleList", "TensorDictParams"],
)
def test_a_module_without_a_forward_follows_refresh_and_hold(publisher, subscriber, make) -> None:
    source, worker = make(), make()
    channel = publisher(source)
    follower = subscriber(channel)
    binding = follower.bind(worker)
    channel.publish(fill(source, 1))
    assert follower.refresh() == 1
    assert uniform(list(worker.parameters())) == 1
    channel.publish(fill(source, 2))
    with binding.hold() as version:
        assert version == 2
        assert uniform(list(worker.parameters())) == 2


def test_tensordict_modules(publisher, subscriber) -> None:
    def make() -> nn.Module:
        first = TensorDictModule(nn.Linear(2, 3), in_keys=["observation"], out_keys=["hidden"])
        return TensorDictSequential(first, TensorDictModule(nn.Linear(3, 1), in_keys=["hidden"], out_keys=["action"]))

    run = lambda module: module(TensorDict(observation=torch.ones(1, 2)))["action"]  # noqa: E731
    follows(publisher, subscriber, make(), make(), run=run)


def test_parametrized_modules(publisher, subscriber) -> None:
    def make() -> nn.Module:
        return nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))

    follows(publisher, subscriber, make(), make())


@modes
def test_hooks_run_on_the_version_of_their_forward(publisher, subscriber, mode) -> None:
    """As in the old weight_norm, whose hook computes the weight that the forward uses."""

    def make() -> nn.Module:
        module = nn.Linear(2, 2)
        module.register_forward_pre_hook(lambda module, args: saw.append(uniform(module)))
        module.register_forward_hook(lambda module, args, output: saw.append(uniform(module)))
        return module

    saw: list[float] = []
    source, worker = nn.Linear(2, 2), make()
    channel = publisher(source)
    binding = subscriber(channel).bind(worker, mode)
    for k in (1, 2, 3):
        saw.clear()
        channel.publish(fill(source, k))
        worker(torch.ones(1, 2))
        assert saw == [k, k]
        assert binding.version == k


def test_the_old_weight_norm(publisher, subscriber) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        source, worker = nn.utils.weight_norm(nn.Linear(2, 2)), nn.utils.weight_norm(nn.Linear(2, 2))
    channel = publisher(dict(source.named_parameters()))
    subscriber(channel).bind(worker)
    for _ in range(3):
        with torch.no_grad():
            for p in source.parameters():
                p.copy_(torch.randn_like(p))
        channel.publish()
        torch.testing.assert_close(worker(torch.ones(1, 2)), source(torch.ones(1, 2)))


def test_several_models_change_together(publisher, subscriber) -> None:
    """At the entry of whichever runs first, and under one version."""
    source = {"actor": nn.Linear(2, 2), "critic": nn.Linear(2, 2)}
    worker = {"actor": nn.Linear(2, 2), "critic": nn.Linear(2, 2)}
    channel = publisher(source)
    binding = subscriber(channel).bind(worker)
    for k, first in ((1, "actor"), (2, "critic"), (3, "actor")):
        for module in source.values():
            fill(module, k)
        channel.publish()
        worker[first](torch.ones(1, 2))
        assert {name: uniform(module) for name, module in worker.items()} == {"actor": k, "critic": k}
        assert binding.version == k


def test_one_of_several_models_can_be_bound_alone(publisher, subscriber) -> None:
    source = {"actor": nn.Linear(2, 2), "critic": nn.Linear(3, 3)}
    worker = nn.Linear(2, 2)
    channel = publisher(source)
    follower = subscriber(channel)
    follower.bind({"actor": worker})
    channel.publish()
    follower.refresh()
    assert snapshot(worker) == snapshot(source["actor"])
    with pytest.raises(LayoutMismatch, match=r"`actor.weight`"):
        follower.bind(nn.Linear(2, 2))
    with pytest.raises(LayoutMismatch, match=r"unexpected keys: `other.weight`"):
        follower.bind({"other": nn.Linear(2, 2)})


def test_a_forward_that_calls_another_model_stays_on_its_version(publisher, subscriber) -> None:
    class Actor(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            publish()
            return worker["critic"](super().forward(x))

    def publish() -> None:
        for module in source.values():
            fill(module, channel.version + 1)
        channel.publish()

    source = {"actor": nn.Linear(2, 2), "critic": nn.Linear(2, 2)}
    worker = {"actor": Actor(2, 2), "critic": nn.Linear(2, 2)}
    channel = publisher(source)
    subscriber(channel).bind(worker)
    publish()
    for k in (1.0, 2.0, 3.0):
        assert uniform(worker["actor"](torch.zeros(1, 2))) == 2 * k * k + k


@pytest.mark.parametrize("first", ["whole", "part"])
def test_a_part_of_a_bound_module_cannot_switch_in_its_forward(publisher, subscriber, first) -> None:
    """Bound once with the whole and once by itself: that is refused, or one forward is of one version all the same."""

    class Pushing(nn.Sequential):
        def forward(self, x: torch.Tensor) -> set[float]:
            seen = {uniform(self[0])}
            channel.publish(fill(source, channel.version + 1))
            self[1](x)
            return seen | {uniform(self[1]), uniform(self[0])}

    source, worker = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), Pushing(nn.Linear(2, 2), nn.Linear(2, 2))
    channel = publisher(source)
    channel.publish(fill(source, 1))
    whole, part = subscriber(channel), subscriber(channel)
    bindings = [lambda: whole.bind(worker), lambda: part.bind({"1": worker[1]})]
    for bind in bindings if first == "whole" else bindings[::-1]:
        with contextlib.suppress(BindingError):
            bind()
    for _ in range(3):
        assert len(worker(torch.ones(1, 2))) == 1


def test_threads_share_a_binding_without_tearing(publisher, subscriber) -> None:
    """Four threads run one module while versions come; every forward is of one version."""

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Parameter(torch.zeros(5000)), nn.Parameter(torch.zeros(5000))

        def forward(self) -> tuple[float, float, int]:
            first = uniform(self.one)
            time.sleep(0.001)
            return first, uniform(self.two), binding.version

    source, worker = Watched(), Watched()
    channel = publisher(source)
    binding = subscriber(channel).bind(worker)
    stop, seen = threading.Event(), []

    def work() -> None:
        while not stop.is_set():
            seen.append(worker())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for k in range(1, 60):
        channel.publish(fill(source, k))
        time.sleep(0.005)
    stop.set()
    for thread in threads:
        thread.join(30)
    assert [one for one in seen if not one[0] == one[1] == one[2]] == []
    assert len({version for _, _, version in seen}) > 5
    assert binding.refresh() == 59
