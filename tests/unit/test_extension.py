"""`shmsync._C`: copies exactly what it was told to, and refuses what cannot be right before it writes.

Mutant: leave out the check of the lengths.
"""

import importlib.util

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("shmsync._C") is None, reason="the optional extension is not built"
)


@pytest.fixture
def copy_pieces():
    from shmsync._C import copy_pieces

    return copy_pieces


def test_copies_each_piece_and_nothing_else(copy_pieces) -> None:
    source = np.arange(1, 65, dtype=np.uint8)
    destination = np.zeros(64, dtype=np.uint8)
    to, of = destination.ctypes.data, source.ctypes.data
    copy_pieces([to, to + 32, 0], [of + 8, of, 0], [16, 1, 0])
    expected = np.zeros(64, dtype=np.uint8)
    expected[:16], expected[32] = source[8:24], source[0]
    np.testing.assert_array_equal(destination, expected)


def test_refuses_lengths_that_differ(copy_pieces) -> None:
    source, destination = np.ones(8, dtype=np.uint8), np.zeros(8, dtype=np.uint8)
    with pytest.raises(ValueError, match="equal length, got 1 destinations, 1 sources and 2 sizes"):
        copy_pieces([destination.ctypes.data], [source.ctypes.data], [8, 8])
    assert not destination.any()


def test_refuses_a_null_address_before_it_writes(copy_pieces) -> None:
    source, destination = np.ones(8, dtype=np.uint8), np.zeros(8, dtype=np.uint8)
    with pytest.raises(ValueError, match="got 0 - at piece 1"):
        copy_pieces([destination.ctypes.data, 0], [source.ctypes.data] * 2, [8, 8])
    assert not destination.any()


@pytest.mark.parametrize("wrong", [-1, 1.5, None])
def test_refuses_what_is_no_address(copy_pieces, wrong) -> None:
    with pytest.raises(TypeError):
        copy_pieces([wrong], [0], [0])
