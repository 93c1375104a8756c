"""C09: a leaf that cannot live in shared memory is refused by name and reason, wherever it comes in.

Mutant: leave any of the checks in `weights.unsupported` out.
"""

import warnings

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from shmsync import LayoutMismatch, UnsupportedLeaf
from tests.helpers.models import uniform


def lazy() -> nn.Module:
    return nn.LazyLinear(3)


def lazy_buffer() -> nn.Module:
    return nn.LazyBatchNorm1d()


def on_meta() -> nn.Module:
    return nn.Linear(2, 3, device="meta")


def sparse_coo() -> torch.Tensor:
    return torch.eye(3).to_sparse()


def sparse_csr() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that CSR is in beta
        return torch.eye(3).to_sparse_csr()


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that quantized tensors will go
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)


def fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3)


def nine_dimensions() -> torch.Tensor:
    return torch.ones((1,) * 9)


def mkldnn() -> torch.Tensor:
    return torch.ones(3).to_mkldnn()


KINDS = [
    (lazy, "weight", "lazy"),
    (lazy_buffer, "running_mean", "lazy"),
    (on_meta, "weight", "meta"),
    (sparse_coo, None, "sparse"),
    (sparse_csr, None, "sparse"),
    (quantized, None, "quantized"),
    (nested, None, "nested"),
    (fake, None, "FakeTensor"),
    (nine_dimensions, None, "9 dimensions"),
    (mkldnn, None, "opaque|sparse|mkldnn"),
]
every_kind = pytest.mark.parametrize(("make", "inner", "reason"), KINDS, ids=[make.__name__ for make, *_ in KINDS])


def named(make, inner) -> tuple[dict, str]:
    """Weights with the leaf in the depth of a dict, and its key path."""
    leaf = make()
    return {"good": torch.ones(3), "deep": {"bad": leaf}}, f"deep.bad.{inner}" if inner else "deep.bad"


@every_kind
def test_at_construction(publisher, make, inner, reason) -> None:
    weights, key = named(make, inner)
    with pytest.raises(UnsupportedLeaf, match=rf"`{key}`: .*({reason})") as raised:
        publisher(weights)
    assert key in raised.value.reasons
    assert "good" not in raised.value.reasons


@every_kind
def test_through_a_later_push(publisher, subscriber, make, inner, reason) -> None:
    bad, key = named(make, inner)
    channel = publisher({"good": torch.zeros(3), key: torch.zeros(3)})
    channel.publish()
    for partial in (False, True):
        with pytest.raises(UnsupportedLeaf, match=rf"`{key}`: .*({reason})"):
            channel.publish(bad, partial=partial)
    assert channel.version == 1
    with subscriber(channel).lease() as lease:
        assert uniform(lease.weights) == 0
    assert channel.publish({"good": torch.ones(3), key: torch.ones(3)}).version == 2


@every_kind
def test_with_the_first_push_of_a_channel_that_was_made_without_weights(publisher, make, inner, reason) -> None:
    weights, key = named(make, inner)
    channel = publisher()
    with pytest.raises(UnsupportedLeaf, match=rf"`{key}`: .*({reason})"):
        channel.publish(weights)
    assert (channel.version, channel.layout) == (0, None)
    assert channel.publish({"good": torch.ones(1)}).version == 1


@pytest.mark.parametrize("make", [sparse_coo, quantized], ids=["sparse", "quantized"])
def test_as_a_module_and_as_a_tensordict(publisher, make) -> None:
    module = nn.Module()
    module.register_buffer("bad", make())
    with pytest.raises(UnsupportedLeaf, match="`bad`"):
        publisher(module)
    with pytest.raises(UnsupportedLeaf, match="`outer.bad`"):
        publisher(TensorDict({"outer": {"bad": make()}}))


def test_all_of_them_at_once(publisher) -> None:
    weights = {make.__name__: make() for make, *_ in KINDS if not isinstance(make(), nn.Module)}
    with pytest.raises(UnsupportedLeaf) as raised:
        publisher(weights)
    assert set(raised.value.reasons) == set(weights)


@pytest.mark.parametrize("make", [lazy, on_meta])
def test_a_worker_without_memory_of_its_own_is_refused(publisher, subscriber, make) -> None:
    channel = publisher(nn.Linear(2, 3))
    channel.publish()
    with pytest.raises(LayoutMismatch, match="weight"):
        subscriber(channel).bind(make())


@pytest.mark.parametrize("whole", [True, False], ids=["module", "part of a dict"])
def test_a_quantized_layer_is_refused_though_it_has_no_leaves(publisher, whole) -> None:
    """Its weights are packed. Mutant: share what there is to see, which is nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that quantization will move
        module = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(2, 2)), {nn.Linear})
    with pytest.raises(UnsupportedLeaf, match="`0._packed_params`" if whole else "`actor.0._packed_params`"):
        publisher(module if whole else {"actor": module})
