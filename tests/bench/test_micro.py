"""The small costs can be measured: they reach into the library, whose inside changes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.micro import COUNTS, MicroPublisher


@pytest.fixture
def micro() -> Iterator[MicroPublisher]:
    made = MicroPublisher()
    try:
        made.start()
        yield made
    finally:
        made.close()


def test_all_of_them_are_measured(micro: MicroPublisher) -> None:
    """Mutant: watch a method of another name; then re-pointing can't be told."""
    switches = micro.switches()
    expected = {f"{what} {where}" for what in ("switch", "re-point") for where in ("kb200", "kb200, warm", "leaves200")}
    assert switches.keys() == {*expected, "re-point kb200, in a loop"}
    found = switches | micro.overheads() | micro.attaches()
    assert {f"forward overhead, {count} parameters" for count in COUNTS} < found.keys()
    assert all(seconds > 0 for name, seconds in found.items() if "overhead" not in name)
