"""`_C.checksums`: XXH3 of fixed pieces, whatever the number of threads."""

from __future__ import annotations

import numpy as np
import pytest

from tests.extension.support import Arena

_C = pytest.importorskip("shmsync._C")

PIECE = 4 << 20


def counting(nbytes: int, misaligned: int = 0) -> Arena:
    arena = Arena(nbytes, misaligned)
    arena.bytes[:] = np.arange(nbytes, dtype=np.uint32).view(np.uint8)[:nbytes]
    return arena


# nbytes → what the PyPI package xxhash 4.1.0 (xxh3_64_intdigest) gives for each piece of counting(nbytes).
KNOWN = {
    0: [],
    1: [0xC44BDFF4074EECDB],
    17: [0xC4F15113A666D3A5],
    200: [0xB9E30784D3B3BB60],
    300: [0x90989DC82B7A47B1],
    1000: [0xF0F5E11B9DD7AB11],
    PIECE: [0xD98A04A884DEC370],
    PIECE + 1: [0xD98A04A884DEC370, 0xC44BDFF4074EECDB],
    2 * PIECE + 12345: [0xD98A04A884DEC370, 0x8823533A75CB432, 0xADC0164CD80FB6B3],
}


def test_the_piece_is_4_mib() -> None:
    assert _C.CHECKSUM_PIECE == PIECE


@pytest.mark.parametrize("misaligned", [0, 1])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("nbytes", KNOWN)
def test_gives_the_known_values(nbytes: int, threads: int, misaligned: int) -> None:
    """Mutants: the rest is left out; a piece is counted from the address of the one before."""
    arena, before = counting(nbytes, misaligned), _C.threads()
    _C.set_threads(threads)
    found = _C.checksums(arena.address, nbytes)
    _C.set_threads(before)
    assert found == KNOWN[nbytes]


def test_one_bit_changes_the_checksum_of_its_piece_only() -> None:
    arena = counting(3 * PIECE)
    before = _C.checksums(arena.address, arena.bytes.size)
    arena.bytes[2 * PIECE - 1] ^= 0x80
    after = _C.checksums(arena.address, arena.bytes.size)
    assert [a == b for a, b in zip(after, before, strict=True)] == [True, False, True]


def test_refuses_a_null_address() -> None:
    assert _C.checksums(0, 0) == []
    with pytest.raises(ValueError, match="Expected an address, got 0"):
        _C.checksums(0, 1)
