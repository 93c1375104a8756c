"""The guard of tensors that stay the same objects, with torch.compile's quick look and without."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shmsync import guards
from shmsync.guards import Guard


@pytest.fixture(params=["quick", "plain"], autouse=True)
def looks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain":
        monkeypatch.setattr(guards, "TensorGuards", None)
    return str(request.param)


def tensors() -> list[Tensor]:
    return [nn.Parameter(torch.zeros(2, 3)), torch.zeros(3, dtype=torch.complex64), torch.zeros(())]


CHANGES = {
    "dtype": lambda one: one.to(torch.complex128 if one.is_complex() else torch.float64),
    "shape": lambda one: torch.zeros(5, dtype=one.dtype),
    "one dimension more": lambda one: one[None],
}
OF_ONE = {
    "strides": (0, lambda one: one.t().contiguous().t()),
    "strides, by a step": (1, lambda one: torch.zeros(6, dtype=one.dtype)[::2]),
    "conjugated": (1, lambda one: one.conj()),
    "negated": (2, lambda one: torch.zeros(1, dtype=torch.complex64).conj().imag[0]),
}
ALL = [(n, change) for change in CHANGES.values() for n in range(3)] + list(OF_ONE.values())
IDS = [f"{name}-{n}" for name in CHANGES for n in range(3)] + list(OF_ONE)


@pytest.mark.parametrize(("number", "change"), ALL, ids=IDS)
def test_a_change_is_noticed(number: int, change: object) -> None:
    """Mutants: look at dtypes and shapes only; take a quick look that fails for one that holds."""
    given = tensors()
    guard = Guard(given)
    assert guard.holds()
    given[number].data = change(given[number].data)  # type: ignore[operator]
    assert not guard.holds()
    assert not guard.holds()


def test_data_of_the_same_kind_only_moves_the_address() -> None:
    """Mutant: keep the addresses of the first look."""
    given = tensors()
    guard = Guard(given)
    other = torch.ones(2, 3)
    given[0].data = other
    assert guard.holds()
    assert guard.addresses[0] == other.data_ptr()


def test_what_does_not_matter_may_change() -> None:
    """Mutant: take torch.compile's word for it, which cares for requires_grad and for modes too."""
    given = tensors()
    guard = Guard(given)
    given[0].requires_grad_(False)
    assert guard.holds()
    with torch.inference_mode():
        assert guard.holds()
    assert guard.holds()
    given[0].grad = torch.zeros(2, 3)
    assert guard.holds()


def test_the_quick_look_is_used_again_after_such_a_change(looks: str) -> None:
    """Where it is there. Mutant: never renew it."""
    given = tensors()
    guard = Guard(given)
    assert (guard._quick is not None) == (looks == "quick")
    given[0].requires_grad_(False)
    assert guard.holds()
    if guard._quick is not None:
        assert guard._quick.check(*given)


def test_an_interface_that_has_changed_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: let its errors through."""

    class Other:
        def __init__(self, *tensors: Tensor) -> None:
            pass

    monkeypatch.setattr(guards, "TensorGuards", Other)
    assert Guard(tensors()).holds()


def test_nothing_to_guard() -> None:
    assert Guard([]).holds()
