"""The protocol of shmsync/slots.py, in all interleavings of small casts: see explorer.py.

Mutants: those of publisher_mutants.py and subscriber_mutants.py, each of which has to be found here.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shmsync import slots

from .explorer import Explorer
from .freeze import freeze
from .mutants import Mutant
from .publisher_mutants import PUBLISHER_MUTANTS
from .scopes import SCOPES, Scope
from .subscriber_mutants import SUBSCRIBER_MUTANTS

MUTANTS = PUBLISHER_MUTANTS + SUBSCRIBER_MUTANTS
SCOPE = {scope.name: scope for scope in SCOPES}


@pytest.mark.parametrize("scope", SCOPES, ids=lambda scope: scope.name)
def test_the_shipping_protocol_holds_in_every_state(scope: Scope) -> None:
    report = Explorer(scope.build(slots)).run()
    print(report)
    assert not report.violation, str(report)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mistake_is_found(mutant: Mutant) -> None:
    report = Explorer(SCOPE[mutant.scope].build(mutant.module(), mutant.operations)).run()
    print(report)
    assert report.violation


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if not m.strict_only], ids=lambda mutant: mutant.name)
def test_a_mistake_is_found_by_what_it_does_to_others(mutant: Mutant) -> None:
    """Wrong bytes, an older version, a push that shows in part, or somebody who waits for ever."""
    report = Explorer(SCOPE[mutant.scope].build(mutant.module(), mutant.operations, strict=False)).run()
    print(report)
    assert report.violation


def _counts(items: Iterator[int]) -> Iterator[int]:
    for _ in items:
        yield 0


def _returns(value: int) -> Iterator[int]:
    try:
        return value + 1
    finally:
        yield 0


def test_a_picture_shows_where_in_a_loop_a_generator_is() -> None:
    """Mutant: leave out what `gc.get_referents` adds to the locals. Two states taken for one hide what follows."""
    first, second = _counts(iter([7, 7, 7])), _counts(iter([7, 7, 7]))
    assert freeze(first, {}) == freeze(second, {})
    next(first)
    next(second)
    assert freeze(first, {}) == freeze(second, {})
    next(second)
    assert freeze(first, {}) != freeze(second, {})


def test_a_picture_shows_a_value_on_its_way_out() -> None:
    first, second = _returns(1), _returns(2)
    next(first)
    next(second)
    assert freeze(first, {}) != freeze(second, {})


def test_a_picture_of_something_unknown_is_refused() -> None:
    with pytest.raises(TypeError, match="picture"):
        freeze(object(), {})
