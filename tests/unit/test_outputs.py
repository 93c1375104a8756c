"""Outputs: clones for what aliases bound memory, and the very same object for everything else.

What a policy returns through a real binding is in tests/cases/test_c16_autograd_stays_out.py.
Mutants: clone always; look at the first element's address only in one of the two ways to recognise an alias.
"""

import collections
from types import MappingProxyType

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict

from shmsync.outputs import Aliases, privatize

BOUND = torch.zeros(64)
BEGIN = BOUND.data_ptr()
BY_RANGE = Aliases(BEGIN, BEGIN + 64 * 4)
BY_STORAGE = Aliases(storages={BOUND.untyped_storage().data_ptr(): 64 * 4})
both = pytest.mark.parametrize("aliases", [BY_RANGE, BY_STORAGE], ids=["range", "storage"])
OTHER = torch.ones(3)
Pair = collections.namedtuple("Pair", ["one", "two"])

FREE = {
    "tensor": OTHER,
    "none": None,
    "number": 3,
    "text": "BOUND",
    "tuple": (OTHER, 1),
    "namedtuple": Pair(OTHER, OTHER),
    "list": [OTHER],
    "dict": {"a": OTHER},
    "tensordict": TensorDict(a=OTHER),
    "locked": TensorDict(a=OTHER, b=TensorDict(c=OTHER)).lock_(),
    "set": {1, 2},
    "object": object(),
    "distribution": torch.distributions.Normal(OTHER, OTHER),
    "array": OTHER.numpy(),
    "deque": collections.deque([OTHER]),
    "empty": (),
}


@both
@pytest.mark.parametrize("output", FREE.values(), ids=FREE)
def test_what_aliases_nothing_comes_back_as_the_same_object(aliases, output) -> None:
    assert privatize(output, aliases) is output


@both
@pytest.mark.parametrize("view", [BOUND, BOUND[5:], BOUND[:1].expand(7), BOUND.view(8, 8).t(), BOUND.view(torch.int32)])
def test_any_view_is_cloned(aliases, view) -> None:
    clone = privatize(view, aliases)
    assert clone is not view
    assert clone not in aliases
    assert torch.equal(clone, view)
    assert privatize(clone, aliases) is clone


@both
def test_only_what_aliases_is_replaced(aliases) -> None:
    output = (OTHER, [BOUND, {"a": OTHER}], Pair(BOUND[1:], "text"))
    found = privatize(output, aliases)
    assert type(found) is tuple
    assert found[0] is OTHER
    assert found[1][0] is not BOUND
    assert found[1][1] is output[1][1]
    assert type(found[2]) is Pair
    assert found[2].one not in aliases
    assert found[2].two == "text"


@both
def test_dicts_and_tensordicts_are_changed_in_place(aliases) -> None:
    inner = TensorDict(b=BOUND[:3], c=OTHER)
    output = {"td": TensorDict(inner=inner), "list": [BOUND]}
    assert privatize(output, aliases) is output
    assert output["td"]["inner", "b"] not in aliases
    assert output["td"]["inner", "c"] is OTHER
    assert output["list"][0] not in aliases


@both
def test_a_locked_tensordict_is_locked_again(aliases) -> None:
    output = TensorDict(a=BOUND[:3], b=TensorDict(c=BOUND[:3])).lock_()
    assert privatize(output, aliases) is output
    assert output.is_locked
    assert output["b"].is_locked
    assert output["a"] not in aliases
    assert output["b", "c"] not in aliases


@both
def test_the_parts_of_a_lazy_stack_are_looked_at(aliases) -> None:
    output = LazyStackedTensorDict(TensorDict(a=BOUND[:3]), TensorDict(a=OTHER))
    privatize(output, aliases)
    assert output.tensordicts[0]["a"] not in aliases
    assert output.tensordicts[1]["a"] is OTHER


@both
def test_what_is_beside_tensors_stays(aliases) -> None:
    output = TensorDict(a=BOUND[:3], text=NonTensorData("kept"))
    privatize(output, aliases)
    assert output["text"] == "kept"


@both
def test_a_read_only_mapping_passes(aliases) -> None:
    output = MappingProxyType({"a": OTHER})
    assert privatize(output, aliases) is output


@both
@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, lambda t: t.to("meta"), torch.Tensor.to_mkldnn])
def test_tensors_without_plain_memory_alias_nothing(aliases, make) -> None:
    tensor = make(torch.ones(3))
    assert privatize(tensor, aliases) is tensor
    assert privatize({"a": tensor}, aliases)["a"] is tensor


@both
def test_a_clone_stays_in_the_graph(aliases) -> None:
    leaf = BOUND.detach().requires_grad_()
    clone = privatize(leaf[:2], aliases)
    clone.sum().backward()
    assert leaf.grad[:3].tolist() == [1.0, 1.0, 0.0]


def test_memory_beside_the_bound_one_is_free() -> None:
    memory = torch.zeros(30)
    middle = Aliases(memory[10:].data_ptr(), memory[20:].data_ptr())
    assert memory[10:11] in middle
    assert memory[19:20] in middle
    assert memory[20:21] not in middle
    assert memory[:10] not in middle
    assert torch.empty(0) not in Aliases()


ALIASING = {
    "array": BOUND[3:9].numpy,
    "reversed array": lambda: BOUND[3:9].numpy()[::-1],
    "array in a dict": lambda: {"a": BOUND[3:9].numpy()},
    "deque": lambda: collections.deque([BOUND[3:9], 1], maxlen=2),
    "distribution": lambda: torch.distributions.Normal(BOUND[3:9], 1.0, validate_args=False),
    "independent distribution": lambda: torch.distributions.Independent(
        torch.distributions.Categorical(logits=BOUND[:8].view(2, 4).expand(3, 2, 4)), 1
    ),
}


def numbers(output: object) -> list[float]:
    """All that can be read in an output."""
    if isinstance(output, torch.distributions.Independent):
        return numbers(output.base_dist)
    if isinstance(output, torch.distributions.Categorical):
        return output.logits.flatten().tolist()
    if isinstance(output, torch.distributions.Normal):
        return output.loc.tolist()
    if isinstance(output, dict):
        return numbers(output["a"])
    return torch.as_tensor(output[0] if isinstance(output, collections.deque) else output.copy()).tolist()


@both
@pytest.mark.parametrize("make", ALIASING.values(), ids=ALIASING)
def test_what_a_policy_may_return_keeps_its_values(aliases, make) -> None:
    """Mutant: look at tensors alone."""
    output = privatize(make(), aliases)
    before = numbers(output)
    try:
        BOUND.fill_(7.0)
        assert numbers(output) == before
    finally:
        BOUND.zero_()
