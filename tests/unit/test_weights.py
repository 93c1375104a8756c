"""Whatever a user calls weights becomes the same flat table.

Mutants: keep the keys of a compiled module; pass over buffers; join keys with "/"; remove duplicates of tied modules.
"""

import collections

import pytest
import torch
from tensordict import TensorDict, TensorDictParams, tensorclass
from torch import nn

from shmsync import LayoutError, Publisher
from shmsync.weights import flatten, identity, places, same_bits


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.again = self.layer
        self.register_parameter("absent", None)
        self.register_buffer("kept", torch.zeros(1))
        self.register_buffer("noise", torch.zeros(1), persistent=False)
        self.register_buffer("nothing", None)


KEYS = ["kept", "noise", "layer.weight", "layer.bias", "again.weight", "again.bias"]


def test_a_module_gives_parameters_and_buffers_under_each_of_their_names() -> None:
    policy = Policy()
    table = flatten(policy)
    assert list(table) == KEYS
    assert table["layer.weight"].tensor is table["again.weight"].tensor is policy.layer.weight
    assert [key for key, named in table.items() if named.optional] == ["noise"]
    assert [key for key, named in table.items() if named.key != key] == []


def nested(policy: Policy) -> dict:
    leaf = {"weight": policy.layer.weight, "bias": policy.layer.bias}
    return {"kept": policy.kept, "noise": policy.noise, "layer": leaf, "again": dict(leaf)}


def flat(policy: Policy) -> dict:
    return {key: named.tensor for key, named in flatten(policy).items()}


@tensorclass
class Block:
    weight: torch.Tensor
    bias: torch.Tensor


SPELLINGS = {
    "nested dict": nested,
    "flat dict": flat,
    "ordered dict": lambda policy: collections.OrderedDict(flat(policy)),
    "nested tensordict": lambda policy: TensorDict(nested(policy)),
    "flat tensordict": lambda policy: TensorDict(flat(policy)),
    "dict of modules": lambda policy: {**nested(policy), "layer": policy.layer, "again": policy.layer},
    "dict of tensordicts": lambda policy: {**nested(policy), "layer": TensorDict.from_module(policy.layer)},
    "tuples as keys": lambda policy: {tuple(key.split(".")): value for key, value in flat(policy).items()},
    "compiled": lambda policy: torch.compile(policy, backend="eager"),
    "tensorclass": lambda policy: {**nested(policy), "layer": Block(policy.layer.weight, policy.layer.bias)},
    "params": lambda policy: TensorDictParams(TensorDict(nested(policy)), no_convert=True),
}


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_every_spelling_is_the_same_table(spelling) -> None:
    policy = Policy()
    found = {key: named.tensor for key, named in flatten(spelling(policy)).items()}
    assert sorted(found) == sorted(KEYS)
    for key, named in flatten(policy).items():
        assert found[key].data_ptr() == named.tensor.data_ptr()


def test_a_compiled_submodule_has_the_names_of_the_module_in_it() -> None:
    outer = nn.Sequential(nn.Linear(2, 2), torch.compile(nn.Linear(2, 2), backend="eager"))
    assert list(flatten(outer)) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert list(flatten(outer.state_dict())) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_extra_state_is_no_weight() -> None:
    state = {"_extra_state": {"steps": 3}, "sub._extra_state": object(), "weight": torch.ones(1)}
    assert list(flatten(state)) == ["weight"]


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, "`a.b` twice"),
        ({"a": {3: torch.ones(1)}}, "3 - at `a`"),
        ({"a": {"b": 1.5}}, "float - at `a.b`"),
        ({"a": [torch.ones(1)]}, "list - at `a`"),
        ({"a": None}, "NoneType - at `a`"),
        ([nn.Linear(1, 1)], "got builtins.list"),
        ("weights", "got builtins.str"),
        (torch.ones(1), "Tensor"),
        (iter([]), "iterator"),
    ],
)
def test_what_is_no_weights_is_named_with_its_place(weights, text) -> None:
    with pytest.raises(LayoutError) as raised:
        Publisher(weights)
    assert text in str(raised.value)


def test_places_are_the_modules_own_tables() -> None:
    policy = Policy()
    for place in places(policy):
        place.table[place.name] = place.table[place.name]
        assert place.owner.get_parameter if not place.is_buffer else place.owner.get_buffer
        assert place.table is (place.owner._buffers if place.is_buffer else place.owner._parameters)


def test_tied_is_the_same_elements_of_the_same_memory() -> None:
    base = torch.arange(6.0)
    assert identity(base) == identity(base.detach()) == identity(base.view(6))
    others = [base[:3], base[3:], base.view(2, 3), base.view(torch.int32), base.clone(), base[::2]]
    assert len({identity(base), *map(identity, others)}) == 1 + len(others)
    complex_one = torch.ones(2, dtype=torch.complex64)
    assert identity(complex_one) != identity(complex_one.conj())


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), False),
        (torch.ones(2), torch.ones(1, 2), False),
        (torch.empty(0), torch.empty(0), True),
        (torch.eye(3), torch.eye(3).t(), True),
        (torch.ones(4, 3)[0:1, 0], torch.ones(1), True),
        (torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j]), True),
        (torch.tensor(True), torch.tensor(True), True),
    ],
)
def test_same_bits_is_neither_isclose_nor_equal(a, b, same) -> None:
    assert same_bits(a, b) is same
