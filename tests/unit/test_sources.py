"""A source that is pushed again and again: whatever changed in it since the last push is noticed, as at its first.

Each test runs with the extension's and torch.compile's quick looks, where they are there, and with Python's own.

Mutants: compare the number of entries only; look at the outermost table only; keep the source itself; take a
TensorDict's or a module's tables for those that it always had.
"""

import gc
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict, TensorDictParams, tensorclass
from torch import nn

from shmsync import LayoutMismatch, Publisher, Subscriber, TiedLeavesDiffer, UnsupportedLeaf, guards, tables
from tests.helpers.models import snapshot

TIMES = 4


@pytest.fixture(autouse=True, params=["quick", "plain"])
def looks(request, monkeypatch) -> None:
    if request.param == "plain":
        monkeypatch.setattr(guards, "TensorGuards", None)
        monkeypatch.setattr(tables, "engine", None)


@tensorclass
class Block:
    weight: torch.Tensor


class WithParams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.params = TensorDictParams(TensorDict(a=torch.zeros(2), sub=TensorDict(b=torch.zeros(2))))


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2)))


def scripted(source: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that TorchScript will go
        return torch.jit.script(source)


KINDS: dict[str, Callable] = {
    "module": module,
    "compiled": lambda: torch.compile(module(), backend="eager"),
    "scripted": lambda: scripted(module()),
    "tensordict": lambda: TensorDict(a=torch.zeros(2), sub=TensorDict(b=torch.zeros(2))),
    "tensordict of a module": lambda: TensorDict.from_module(module()),
    "params": lambda: TensorDictParams(TensorDict(a=torch.zeros(2), sub=TensorDict(b=torch.zeros(2)))),
    "module with params": WithParams,
    "tensordict of a tensorclass": lambda: TensorDict(a=torch.zeros(2), sub=Block(torch.zeros(2))),
    "dict of modules": lambda: {"one": module(), "two": nn.Linear(1, 1)},
    "state dict": lambda: module().state_dict(),
}


def arrives(channel, subscriber, source) -> None:
    with subscriber(channel).lease() as lease:
        expected = dict(sorted(snapshot(source).items()))
        assert {key.replace("_orig_mod.", ""): value for key, value in expected.items()} == dict(
            sorted(snapshot(lease.weights).items())
        )


def tensors(source) -> list[torch.Tensor]:
    if isinstance(source, nn.Module) and not isinstance(source, TensorDictParams):
        return [*source.parameters(), *source.buffers()]
    return [t for value in source.values() for t in ([value] if isinstance(value, torch.Tensor) else tensors(value))]


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_values_written_in_place_arrive_at_every_push(publisher, subscriber, make) -> None:
    source = make()
    channel = publisher(source)
    for k in range(TIMES):
        with torch.no_grad():
            for tensor in tensors(source):
                tensor.fill_(k)
        channel.publish(source if k % 2 else None)
        arrives(channel, subscriber, source)


def new_data(source) -> None:
    for tensor in tensors(source):
        tensor.data = torch.full_like(tensor, 7)


def new_strides(source: nn.Module) -> None:
    source[0].weight.data = torch.arange(4.0).reshape(2, 2).t()


def new_parameter(source: nn.Module) -> None:
    source[0].weight = nn.Parameter(torch.randn(2, 2))


def new_buffer(source: nn.Module) -> None:
    source[1][0].running_mean = torch.randn(2)


def new_submodule(source: nn.Module) -> None:
    source[1][0] = nn.BatchNorm1d(2).requires_grad_(False)
    source[1][0].running_mean.fill_(5)


def new_submodule_of_submodule(source: nn.Module) -> None:
    source[1] = nn.Sequential(nn.BatchNorm1d(2))
    source[1][0].running_var.fill_(3)


def assigned_state(source: nn.Module) -> None:
    source.load_state_dict({key: torch.ones_like(t) for key, t in source.state_dict().items()}, assign=True)


def given_another_state(source: nn.Module) -> None:
    source.__setstate__({**module().__dict__})


def given_another_table(source: nn.Module) -> None:
    source[0]._parameters = {name: nn.Parameter(torch.full_like(p, 7)) for name, p in source[0]._parameters.items()}


CHANGES = [
    *(new_data, new_strides, new_parameter, new_buffer, new_submodule, new_submodule_of_submodule, assigned_state),
    *(given_another_state, given_another_table),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_tensors_that_a_module_replaced_arrive(publisher, subscriber, change) -> None:
    source = module()
    channel = publisher(source)
    for _ in range(TIMES):
        channel.publish()
    change(source)
    channel.publish()
    arrives(channel, subscriber, source)


def entry(source) -> None:
    source["a"] = torch.full((2,), 7.0)


def nested_entry(source) -> None:
    source["sub", "b"] = torch.full((2,), 7.0)


def whole_branch(source) -> None:
    source["sub"] = TensorDict(b=torch.full((2,), 7.0))


@pytest.mark.parametrize("change", [entry, nested_entry, whole_branch], ids=lambda change: change.__name__)
@pytest.mark.parametrize("kind", ["tensordict", "params"])
def test_entries_that_a_tensordict_replaced_arrive(publisher, subscriber, kind, change) -> None:
    source = KINDS[kind]()
    channel = publisher(source)
    for _ in range(TIMES):
        channel.publish()
    change(source)
    channel.publish()
    arrives(channel, subscriber, source)


@pytest.mark.parametrize("part", ["whole", "sub"])
def test_the_state_that_a_tensordict_was_given_arrives(publisher, subscriber, part) -> None:
    """It is another table, while the one that it had before stays as it was."""
    source = KINDS["tensordict"]()
    channel = publisher(source)
    for _ in range(TIMES):
        channel.publish()
    other = TensorDict(a=torch.full((2,), 7.0), sub=TensorDict(b=torch.full((2,), 8.0)))
    given = (source, other) if part == "whole" else (source["sub"], other["sub"])
    given[0].__setstate__(given[1].__getstate__())
    channel.publish()
    arrives(channel, subscriber, source)


def test_a_field_that_a_tensorclass_replaced_arrives(publisher, subscriber) -> None:
    source = KINDS["tensordict of a tensorclass"]()
    channel = publisher(source)
    for _ in range(TIMES):
        channel.publish()
    source["sub"].weight = torch.full((2,), 7.0)
    channel.publish()
    arrives(channel, subscriber, source)


@pytest.mark.parametrize("change", [entry, nested_entry], ids=lambda change: change.__name__)
def test_entries_that_a_modules_params_replaced_arrive(publisher, subscriber, change) -> None:
    source = WithParams()
    channel = publisher(source)
    for _ in range(TIMES):
        channel.publish()
    change(source.params)
    channel.publish()
    with subscriber(channel).lease() as lease:
        assert snapshot(lease.weights["params"]) == snapshot(source.params)


@pytest.mark.parametrize("lazy", ["conjugate", "negative"])
def test_data_that_became_lazy_arrives_by_value(publisher, subscriber, lazy) -> None:
    """Of the same dtype, shape and strides, its memory holds other bits than its values."""
    values = torch.randn(2, 2, dtype=torch.complex64)
    source = nn.Module()
    source.register_buffer("leaf", values if lazy == "conjugate" else values.imag)
    channel = publisher(source)
    for _ in range(TIMES):
        channel.publish()
    source.leaf.data = values.conj() if lazy == "conjugate" else values.conj().imag
    assert source.leaf.is_conj() or source.leaf.is_neg()
    channel.publish()
    arrives(channel, subscriber, source)


def doubled(source: nn.Module) -> None:
    source.double()


def grown(source: nn.Module) -> None:
    source[0].weight.data = torch.zeros(3, 2)


def emptied(source: nn.Module) -> None:
    source[0].bias = None


def extended(source: nn.Module) -> None:
    source[0].register_buffer("more", torch.zeros(1))


def extended_by_a_module(source: nn.Module) -> None:
    source.append(nn.Linear(1, 1))


def moved_to_the_next_module(source: nn.Module) -> None:
    """All tables taken together still have the same entries in the same order."""
    source[1].bias = source[0]._parameters.pop("bias")


def moved_to_meta(source: nn.Module) -> None:
    source.to("meta")


FAULTS = [doubled, grown, emptied, extended, extended_by_a_module, moved_to_the_next_module, moved_to_meta]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_what_no_longer_fits_is_refused_at_every_push(publisher, fault) -> None:
    source = module()
    channel = publisher(source)
    for _ in range(TIMES):
        channel.publish()
    fault(source)
    for _ in range(2):
        with pytest.raises((LayoutMismatch, UnsupportedLeaf)):
            channel.publish()
    assert channel.version == TIMES


@pytest.mark.parametrize("apart", ["parameter", "data"])
def test_ties_that_part_are_noticed(publisher, apart) -> None:
    source = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    source[1].weight = source[0].weight
    channel = publisher(source)
    for _ in range(TIMES):
        channel.publish()
    if apart == "data":
        source[1].weight = nn.Parameter(source[0].weight.data)
        for _ in range(TIMES):
            channel.publish()
        source[1].weight.data = torch.full((2, 2), 9.0)
    else:
        source[1].weight = nn.Parameter(torch.full((2, 2), 9.0))
    with pytest.raises(TiedLeavesDiffer):
        channel.publish()


def test_a_partial_source_is_not_taken_for_a_full_one(publisher) -> None:
    weights = TensorDict(a=torch.zeros(2))
    channel = publisher({"a": torch.zeros(2), "b": torch.zeros(2)})
    channel.publish()
    for _ in range(TIMES):
        channel.publish(weights, partial=True)
    with pytest.raises(LayoutMismatch, match="`b`"):
        channel.publish(weights)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_source_is_not_kept_alive(publisher, times) -> None:
    """Neither its tensors nor their graph, however often it was pushed."""
    p = torch.ones(3, requires_grad=True)
    channel = publisher({"p": p})
    inner = p * p
    alive = weakref.ref(inner)
    source = TensorDict(p=inner.sin())
    del inner
    for _ in range(times):
        channel.publish(source)
    assert alive() is not None
    del source
    gc.collect()
    assert alive() is None


def test_alternating_sources_are_told_apart(publisher, subscriber) -> None:
    sources = [TensorDict(p=torch.full((2,), float(k))) for k in range(2)]
    channel = publisher(sources[0])
    for k in (0, 0, 1, 1, 0, 1, 0, 0):
        channel.publish(sources[k])
        arrives(channel, subscriber, sources[k])


def publish_unusual(state, name: str) -> list[float]:
    """Publish a tensor whose address says nothing, and read it back."""
    unusual = {
        "zero": lambda: torch._efficientzerotensor(3),
        "copy on write": lambda: torch.zeros(3)._lazy_clone(),
    }[name]
    source = nn.Module()
    source.register_buffer("leaf", torch.ones(3))
    with Publisher(source) as channel, Subscriber(channel.handle) as follower:
        for _ in range(TIMES):
            channel.publish()
        channel.publish({"leaf": unusual()})
        with follower.lease() as lease:
            seen = lease.weights["leaf"].tolist()
        for _ in range(TIMES):
            channel.publish()
        source.leaf.data = unusual()
        channel.publish()
        with follower.lease() as lease:
            return seen + lease.weights["leaf"].tolist()


@pytest.mark.parametrize("name", ["zero", "copy on write"])
def test_tensors_without_memory_of_their_own_arrive(peer, name) -> None:
    """As forward-mode differentiation and copy-on-write make them. In another process: a wrong address is a crash."""
    assert peer().call(publish_unusual, name) == [0.0] * 6


def test_entries_below_the_first_level_that_params_replaced_arrive(publisher, subscriber) -> None:
    """TensorDictParams are modules too. Mutant: remember them as modules."""
    source = TensorDictParams(TensorDict(sub=TensorDict(deep=TensorDict(b=torch.zeros(2)))), lock=False)
    channel = publisher(source)
    for number in range(2 * TIMES):
        source["sub"]["deep"]["b"] = nn.Parameter(torch.full((2,), float(number)))
        channel.publish()
        with subscriber(channel).lease() as lease:
            assert lease.weights["sub", "deep", "b"].tolist() == [number, number]
