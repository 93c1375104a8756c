"""Targets: the module's own tensors get a version's values, and nothing else about them changes.

Mutants: put new Parameters into the module; point by name at what was bound, not at what the module has now; skip the
check of dtypes after `.double()`; clone tied parameters one by one at the end.
"""

import copy

import pytest
import torch
from torch import nn

from shmsync import BindingError, BindingLost, LayoutMismatch, targets
from tests.helpers.models import bits, fill, mlp, snapshot, uniform


class World:
    """A publisher and one bound module; `push(k)` publishes fill(k) and lets the module follow."""

    def __init__(self, publisher, subscriber, make=lambda: nn.Linear(3, 3), mode: str = "auto") -> None:
        self.source, self.worker = make(), make()
        self.channel = publisher(self.source)
        self.follower = subscriber(self.channel)
        self.binding = self.follower.bind(self.worker, mode)

    def push(self, k: float) -> None:
        self.channel.publish(fill(self.source, k))
        self.follower.refresh()


@pytest.fixture
def world(publisher, subscriber):
    return lambda *args, **options: World(publisher, subscriber, *args, **options)


def in_slot(tensor: torch.Tensor, world: World) -> bool:
    begin, end = world.binding._aliases.begin, world.binding._aliases.end
    return begin <= tensor.data_ptr() < end


def test_parameters_are_mapped_and_buffers_are_copied(world) -> None:
    it = world(mlp)
    it.push(3)
    assert it.binding.mode == "map"
    assert all(in_slot(p, it) for p in it.worker.parameters())
    assert not any(in_slot(b, it) for b in it.worker.buffers())
    assert uniform(it.worker) == 3


def test_copied_parameters_keep_their_storage(world) -> None:
    it = world(mlp, mode="copy")
    before = {key: (id(p), p.data_ptr()) for key, p in it.worker.named_parameters()}
    it.push(3)
    assert it.binding.mode == "copy"
    assert {key: (id(p), p.data_ptr()) for key, p in it.worker.named_parameters()} == before
    assert uniform(it.worker) == 3


@pytest.mark.parametrize("mode", ["map", "copy"])
def test_objects_flags_hooks_and_gradients_stay(world, mode) -> None:
    it = world(mode=mode)
    fired: list[int] = []
    it.worker.weight.register_hook(lambda gradient: fired.append(1))
    it.worker.bias.requires_grad_(False)
    it.worker.weight.grad = torch.ones(3, 3)
    it.worker.weight.mine = "attribute"
    weight = it.worker.weight
    it.push(2)
    assert it.worker.weight is weight
    assert type(weight) is nn.Parameter
    assert weight.mine == "attribute"
    assert weight.grad.sum() == 9
    assert not it.worker.bias.requires_grad
    with it.binding.hold():
        it.worker(torch.ones(1, 3)).sum().backward()
    assert fired == [1]


def replace_parameter(module: nn.Module) -> None:
    module.weight = nn.Parameter(torch.zeros(3, 3))


def replace_data(module: nn.Module) -> None:
    module.weight.data = torch.zeros(3, 3)


def load_assigned(module: nn.Module) -> None:
    module.load_state_dict({key: torch.zeros_like(t) for key, t in module.state_dict().items()}, assign=True)


def to_dtype_and_back(module: nn.Module) -> None:
    module.double().float()


def to_empty(module: nn.Module) -> None:
    module.to_empty(device="cpu")


def replace_table(module: nn.Module) -> None:
    """As `__setstate__` does; the one that it had still has the parameters that were bound."""
    module.__dict__["_parameters"] = {
        name: nn.Parameter(torch.zeros_like(value)) for name, value in module._parameters.items()
    }


REPLACED = [replace_parameter, replace_data, replace_table, load_assigned, to_dtype_and_back, to_empty]


@pytest.mark.parametrize("mode", ["map", "copy"])
@pytest.mark.parametrize("replace", REPLACED, ids=lambda replace: replace.__name__)
def test_tensors_that_the_module_replaced_are_followed(world, replace, mode) -> None:
    it = world(mode=mode)
    it.push(1)
    replace(it.worker)
    for k in (2, 3, 4):
        it.push(k)
        assert uniform(it.worker) == k
        assert uniform(it.worker(torch.zeros(1, 3))) == k


def test_a_parameter_that_was_replaced_is_let_go_with_its_values(world) -> None:
    """Somebody may still hold it: it must not show later versions, or memory that is gone."""
    it = world()
    it.push(1)
    old = it.worker.weight
    replace_parameter(it.worker)
    it.push(2)
    assert uniform(old) == 1
    assert not in_slot(old, it)
    it.push(3)
    assert uniform(old) == 1


def doubled(module: nn.Module) -> None:
    module.double()


def reshaped(module: nn.Module) -> None:
    module.weight = nn.Parameter(torch.zeros(2, 3))


def removed(module: nn.Module) -> None:
    del module.bias
    module.register_parameter("bias", None)


def to_meta(module: nn.Module) -> None:
    module.to("meta")


def extended(module: nn.Module) -> None:
    module.register_parameter("extra", nn.Parameter(torch.zeros(1)))
    module.weight = nn.Parameter(torch.zeros(3, 3))


@pytest.mark.parametrize("spoil", [doubled, reshaped, removed, to_meta, extended], ids=lambda spoil: spoil.__name__)
def test_tensors_that_no_longer_fit_are_an_error_at_the_next_version(world, spoil) -> None:
    """Saying that the bound parameters are no longer the module's; every time, not just once."""
    it = world()
    it.push(1)
    spoil(it.worker)
    it.channel.publish()
    for _ in range(2):
        with pytest.raises(BindingLost, match="no longer the module's"):
            it.worker(torch.ones(1, 3))
    with pytest.raises(BindingLost):
        it.follower.refresh()
    assert it.follower.version == 1
    it.follower.close()


@pytest.mark.parametrize("mode", ["map", "copy"])
@pytest.mark.parametrize("depth", ["layer", "block"])
def test_a_submodule_that_was_replaced_is_followed(world, mode, depth) -> None:
    """Mutant: watch the tables of parameters alone, which are the old submodule's."""
    it = world(lambda: nn.Sequential(nn.Sequential(nn.Linear(3, 3)), nn.Linear(3, 3)), mode=mode)
    it.push(1)
    if depth == "layer":
        it.worker[0][0] = nn.Linear(3, 3)
    else:
        it.worker[0] = nn.Sequential(nn.Linear(3, 3))
    for k in (2, 3):
        it.push(k)
        assert uniform(it.worker) == k
    it.worker[1] = nn.Linear(3, 2)
    it.channel.publish()
    with pytest.raises(BindingLost, match="no longer the module's"):
        it.worker(torch.ones(1, 3))


@pytest.mark.parametrize("mode", ["map", "copy"])
def test_another_shape_at_the_same_address_is_noticed(world, mode) -> None:
    """Mapped parameters get the channel's shape back, as they get its values; copies can't be made."""
    it = world(lambda: nn.Linear(4, 4), mode=mode)
    it.push(1)
    it.worker.weight.data = it.worker.weight.data.view(2, 8)
    if mode == "map":
        it.push(2)
        assert (uniform(it.worker), it.worker.weight.shape) == (2, (4, 4))
        return
    it.channel.publish()
    with pytest.raises(BindingLost, match=r"expected shape \(4, 4\), got \(2, 8\) - at `weight`"):
        it.worker(torch.ones(1, 4))


def test_a_doubled_module_is_followed_where_copies_are_cast(world) -> None:
    it = world(mode="copy")
    it.push(1)
    it.worker.double()
    it.push(2)
    assert it.worker.weight.dtype == torch.float64
    assert uniform(it.worker) == 2


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_switch_that_fails_half_way_moves_no_parameter(world, monkeypatch, error) -> None:
    """The new slot's lease has ended then: a parameter that points there would be written under its reader."""
    it = world(mlp)
    it.push(1)

    def fails(*_args: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(targets, "copy_all", fails)
        it.channel.publish(fill(it.source, 2))
        with pytest.raises(error):
            it.worker(torch.ones(1, 3))
        for k in (3, 4, 5, 6):
            it.channel.publish(fill(it.source, k))
        assert uniform(list(it.worker.parameters())) == 1
        assert (it.binding.version, it.follower.stats()["slots_leased"]) == (1, 1)
    it.worker(torch.ones(1, 3))
    assert uniform(it.worker) == 6


@pytest.mark.parametrize("mode", ["auto", "copy"])
def test_a_module_made_in_inference_mode(publisher, subscriber, mode) -> None:
    with torch.inference_mode():
        worker = mlp()
    source = mlp()
    channel = publisher(source)
    follower = subscriber(channel)
    follower.bind(worker, mode)
    for k in (1, 2, 3):
        channel.publish(fill(source, k))
        with torch.inference_mode():
            worker(torch.ones(1, 3))
        assert uniform(worker) == k
    follower.close()
    assert uniform(worker) == 3


def test_map_that_is_not_possible_is_an_error_naming_the_keys(publisher, subscriber) -> None:
    channel = publisher(nn.Linear(2, 2), dtype=torch.bfloat16)
    worker = nn.Linear(2, 2)
    follower = subscriber(channel)
    with pytest.raises(BindingError, match=r"(?s)`weight`.*float32.*bfloat16.*`bias`"):
        follower.bind(worker, "map")
    assert "forward" not in vars(worker)
    assert follower.bind(worker, "auto").mode == "copy", "dtype= has asked for the cast"
    channel.publish(fill(nn.Linear(2, 2), 1 / 3))
    follower.refresh()
    assert worker.weight.dtype == torch.float32
    assert worker.weight[0, 0].item() == torch.tensor(1 / 3).bfloat16().float().item()


def test_a_module_partly_of_another_dtype_is_partly_mapped(publisher, subscriber) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2, dtype=torch.bfloat16), nn.Linear(2, 2))

    source, worker = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), make()
    channel = publisher(source, dtype=torch.bfloat16)
    follower = subscriber(channel)
    binding = follower.bind(worker)
    channel.publish()
    follower.refresh()
    assert binding.mode == "map"
    for key, p in source.named_parameters():
        got = worker.get_parameter(key)
        assert bits(got) == bits(p.bfloat16().to(got.dtype))


@pytest.mark.parametrize("mode", ["map", "copy"])
def test_tied_parameters_are_pointed_once_and_stay_tied(world, mode) -> None:
    it = world(mlp, mode=mode)
    for k in (1, 2):
        it.push(k)
        assert it.worker[2].weight is it.worker[3].weight
    it.follower.close()
    assert it.worker[2].weight is it.worker[3].weight
    assert uniform(it.worker) == 2


def test_ties_made_after_binding_are_followed(world) -> None:
    it = world(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    it.push(1)
    it.worker[1].weight = it.worker[0].weight
    it.channel.publish(fill(it.source, 2))
    with pytest.raises(BindingLost, match=r"`0.weight`.*`1.weight`"):
        it.worker(torch.ones(1, 2))
    it.follower.close()


@pytest.mark.parametrize("mode", ["map", "copy"])
def test_a_deepcopy_is_on_its_own(world, mode) -> None:
    it = world(mode=mode)
    it.push(1)
    own = copy.deepcopy(it.worker)
    it.push(2)
    assert (uniform(own), uniform(it.worker)) == (1, 2)
    with torch.no_grad():
        own.weight.zero_()
    assert uniform(it.worker) == 2


def test_values_that_did_not_change_hands_are_left_alone(publisher, subscriber) -> None:
    """A mismatch found at the first version leaves the module on its own weights."""
    channel = publisher()
    worker = fill(nn.Linear(3, 3), 5)
    subscriber(channel).bind(worker)
    channel.publish(nn.Linear(2, 2))
    before = snapshot(worker)
    with pytest.raises(LayoutMismatch, match="weight"):
        worker(torch.ones(1, 3))
    assert snapshot(worker) == before


@pytest.mark.parametrize("what", ["layer", "parameter"])
def test_what_was_added_to_a_module_is_said(publisher, subscriber, what) -> None:
    """The channel has no values for it. Mutant: look only whether what was bound is still there."""
    source, worker = (nn.Sequential(nn.Linear(2, 2)) for _ in range(2))
    channel = publisher(source)
    channel.publish(fill(source, 1))
    subscriber(channel).bind(worker)
    if what == "layer":
        worker.append(nn.Linear(2, 2))
    else:
        worker[0].extra = nn.Parameter(torch.zeros(3))
    channel.publish(fill(source, 2))
    with pytest.raises(BindingLost, match="1.weight" if what == "layer" else "0.extra"):
        worker(torch.ones(1, 2))


def test_a_layer_without_weights_may_be_added(publisher, subscriber) -> None:
    source, worker = (nn.Sequential(nn.Linear(2, 2)) for _ in range(2))
    channel = publisher(source)
    channel.publish(fill(source, 1))
    subscriber(channel).bind(worker)
    worker.append(nn.Tanh())
    channel.publish(fill(source, 2))
    worker(torch.ones(1, 2))
    assert uniform(worker) == 2
