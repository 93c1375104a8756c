"""Checksums of a slot's bytes, stored behind them: XXH3 (64 bits, seed 0) over pieces of 4 MiB.

They show damage that no protocol can exclude: a stray write through another mapping, a faulty memory, a bug.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Iterable

from .errors import ShmSyncError
from .segment import Mapping
from .wire import CHECKSUM_PIECE_NBYTES, checksum_pieces

try:
    from . import _C as engine
except ImportError:
    engine = None  # type: ignore[assignment]


class Checksums:
    """One slot's: of the first `nbytes` of its mapping, stored after them."""

    def __init__(self, mapping: Mapping, nbytes: int) -> None:
        self._digest = hasher()
        self._address, self._nbytes = mapping.address, nbytes
        self._words = mapping.words(nbytes, checksum_pieces(nbytes))

    def update(self, spans: Iterable[tuple[int, int]]) -> None:
        """Store those of the pieces that these spans, (begin, end) in bytes, have a part in."""
        touched: set[int] = set()
        for begin, end in spans:
            if end > begin:
                touched.update(range(begin // CHECKSUM_PIECE_NBYTES, (end - 1) // CHECKSUM_PIECE_NBYTES + 1))
        for first, count in _runs(sorted(touched)):
            for number, value in enumerate(self._of(first, count), first):
                self._words[number] = value

    def differing(self) -> list[tuple[int, int]]:
        """The pieces, (begin, end) in bytes, that are not what was stored."""
        found = self._of(0, len(self._words))
        return [self._span(number) for number, value in enumerate(found) if value != self._words[number]]

    def _of(self, first: int, count: int) -> list[int]:
        begin, end = self._span(first)[0], self._span(first + count - 1)[1]
        return self._digest(self._address + begin, end - begin)

    def _span(self, piece: int) -> tuple[int, int]:
        begin = piece * CHECKSUM_PIECE_NBYTES
        return begin, min(begin + CHECKSUM_PIECE_NBYTES, self._nbytes)


def hasher() -> Callable[[int, int], list[int]]:
    """What gives the checksums of so many bytes at an address: the extension, or the xxhash package on one thread.

    Raises ShmSyncError if there is neither.
    """
    built = getattr(engine, "checksums", None)
    if built is not None:
        return built
    try:
        digest = importlib.import_module("xxhash").xxh3_64_intdigest
    except ImportError:
        raise ShmSyncError(
            "Checksums need the compiled extension or the xxhash package: pip install xxhash (the extra `checksum`)"
        ) from None

    def of(address: int, nbytes: int) -> list[int]:
        whole = memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
        return [
            digest(whole[begin : begin + CHECKSUM_PIECE_NBYTES]) for begin in range(0, nbytes, CHECKSUM_PIECE_NBYTES)
        ]

    return of


def _runs(numbers: list[int]) -> Iterable[tuple[int, int]]:
    """Consecutive numbers as (first, count)."""
    first = count = 0
    for number in numbers:
        if count and number == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = number, 1
    if count:
        yield first, count
