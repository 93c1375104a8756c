"""`_C.Plan` copies exactly the rows it was given, however they lie, and refuses before it writes."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from tests.extension.support import LOAD, Arena, check_output, random_bytes

_C = pytest.importorskip("shmsync._C")

# Around everything that a kernel or a cut counts in: numbers, lines, lanes, pages, shares.
SIZES = [0, 1, 2, 63, 64, 65, 255, 256, 257, 4095, 4096, 4097, 16383, 16384, 16385, 50_001, (1 << 20) + 3]


def arenas(sizes: list[int], misaligned: int, seed: int = 0) -> tuple[list[Arena], list[Arena]]:
    destinations = [Arena(size, (7 * i + misaligned) % 64) for i, size in enumerate(sizes)]
    sources = [Arena(size, (11 * i + misaligned) % 64) for i, size in enumerate(sizes)]
    for i, source in enumerate(sources):
        source.bytes[:] = random_bytes(source.bytes.size, seed + i)
    return destinations, sources


def plan_for(destinations: list[Arena], sources: list[Arena] | None) -> _C.Plan:
    addresses = None if sources is None else [a.address for a in sources]
    return _C.Plan([a.address for a in destinations], addresses, [a.bytes.size for a in destinations])


def check_equal(destinations: list[Arena], sources: list[Arena]) -> None:
    for destination, source in zip(destinations, sources, strict=True):
        np.testing.assert_array_equal(destination.bytes, source.bytes)
        destination.check_guards()


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> int:
    before = _C.threads()
    _C.set_threads(request.param)
    yield request.param
    _C.set_threads(before)


@pytest.mark.parametrize("misaligned", [0, 1, 8, 63])
@pytest.mark.usefixtures("threads")
def test_copies_each_row_and_nothing_else(misaligned: int) -> None:
    """Mutants: the head to the next line left out; the tail left out; a line too many; the last share left out."""
    destinations, sources = arenas(SIZES, misaligned)
    plan = plan_for(destinations, sources)
    assert len(plan) == len(SIZES)
    assert plan.source_nbytes == plan.destination_nbytes == sum(SIZES)
    plan.run()
    check_equal(destinations, sources)


@pytest.mark.usefixtures("threads")
def test_copies_thousands_of_rows_that_fill_many_shares() -> None:
    """Mutant: rows cut by their number instead of their bytes, with the remainder of the division forgotten."""
    sizes = np.random.default_rng(1).integers(0, 9_000, 3_000).tolist()
    destinations, sources = Arena(sum(sizes)), Arena(sum(sizes), 3)
    sources.bytes[:] = random_bytes(sum(sizes))
    offsets = np.cumsum([0, *sizes[:-1]]).tolist()
    rows = [destinations.address + o for o in offsets], [sources.address + o for o in offsets], sizes
    _C.Plan(*rows).run()
    check_equal([destinations], [sources])


@pytest.mark.parametrize("make", [list, tuple, lambda a: array("Q", a), lambda a: np.array(a, dtype=np.uint64)])
def test_a_run_may_bring_other_sources(make) -> None:
    """Mutant: the sources of the construction are used although others are given."""
    destinations, first = arenas([100, 0, 5000], 1)
    second = arenas([100, 0, 5000], 5, seed=50)[1]
    for plan in (plan_for(destinations, first), plan_for(destinations, None)):
        plan.run(make([a.address for a in second]))
        check_equal(destinations, second)
    plan_for(destinations, first).run()
    check_equal(destinations, first)


def test_an_empty_plan_runs() -> None:
    _C.Plan([], [], []).run()
    _C.Plan([], None, [], []).run([])
    _C.Plan([0, 0], None, [0, 0]).run([0, 0])


# ── What is refused ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def pair() -> tuple[Arena, Arena]:
    destination, source = Arena(64), Arena(64)
    source.bytes[:] = 1
    return destination, source


def test_refuses_lengths_that_differ(pair) -> None:
    """Mutant: leave out a check of a length."""
    to, of = pair[0].address, pair[1].address
    with pytest.raises(ValueError, match="Expected 1 sizes, one for each row, got 2"):
        _C.Plan([to], [of], [8, 8])
    with pytest.raises(ValueError, match="Expected 2 sources, one for each row, got 1"):
        _C.Plan([to, to + 8], [of], [8, 8])
    with pytest.raises(ValueError, match="Expected 1 kinds, one for each row, got 0"):
        _C.Plan([to], [of], [8], [])
    for sources in ([of, of], np.array([of, of], dtype=np.uint64), []):
        with pytest.raises(ValueError, match="Expected 1 sources, one for each row, got [02]"):
            _C.Plan([to], None, [8]).run(sources)
    pair[0].check_guards()
    assert (pair[0].bytes == 0xA5).all()


def test_refuses_a_null_address_before_it_writes(pair) -> None:
    """Mutant: check each source when its row is copied."""
    to, of = pair[0].address, pair[1].address
    with pytest.raises(ValueError, match="Expected the address of a destination, got 0 - at row 1"):
        _C.Plan([to, 0], [of, of], [8, 8])
    with pytest.raises(ValueError, match="Expected the address of a source, got 0 - at row 1"):
        _C.Plan([to, to + 8], [of, 0], [8, 8])
    with pytest.raises(ValueError, match="Expected the address of a source, got 0 - at row 1"):
        _C.Plan([to, to + 8], None, [8, 8]).run([of, 0])
    assert (pair[0].bytes == 0xA5).all()


def test_refuses_to_run_without_sources(pair) -> None:
    with pytest.raises(ValueError, match="Expected sources, got none"):
        _C.Plan([pair[0].address], None, [8]).run()


def test_refuses_destinations_that_overlap(pair) -> None:
    """Mutant: compare neighbours in the order given instead of the order of the addresses."""
    to, of = pair[0].address, pair[1].address
    with pytest.raises(ValueError, match="don't overlap, got one that overlaps that of row 1 - at row 0"):
        _C.Plan([to + 7, to, to + 32], [of] * 3, [8, 8, 8])
    with pytest.raises(ValueError, match="overlap"):  # as long as what is written
        _C.Plan([to, to + 8], [of] * 2, [8, 8], ["float16_to_float32"] * 2)
    _C.Plan([to + 8, to, to + 8], [of] * 3, [8, 8, 0]).run()


def test_refuses_an_unknown_kind(pair) -> None:
    with pytest.raises(ValueError, match="Expected a kind out of bytes, .*, got 'float64_to_float32' - at row 0"):
        _C.Plan([pair[0].address], [pair[1].address], [8], ["float64_to_float32"])


@pytest.mark.parametrize(("kind", "nbytes"), [("float32_to_bfloat16", 6), ("float16_to_float32", 3)])
def test_refuses_part_of_a_number(pair, kind: str, nbytes: int) -> None:
    with pytest.raises(ValueError, match=f"Expected a multiple of [24] bytes for {kind}, got {nbytes} - at row 0"):
        _C.Plan([pair[0].address], [pair[1].address], [nbytes], [kind])


def test_refuses_a_range_beyond_the_address_space(pair) -> None:
    to, of, end = pair[0].address, pair[1].address, (1 << 64) - 8
    with pytest.raises(ValueError, match="Expected a source within the address space, got 64 bytes .* - at row 0"):
        _C.Plan([to], [end], [64])
    with pytest.raises(ValueError, match="Expected a destination within the address space, got 64 bytes .* - at row 0"):
        _C.Plan([end], [of], [64])
    with pytest.raises(ValueError, match="at row 0"):
        _C.Plan([to], [of], [(1 << 64) - 16], ["float16_to_float32"])


@pytest.mark.parametrize("wrong", [-1, 1.5, None, 1 << 64])
def test_refuses_what_is_no_address(wrong) -> None:
    with pytest.raises(TypeError):
        _C.Plan([wrong], [1], [0])
    with pytest.raises(TypeError):
        _C.Plan([1], None, [0]).run([wrong])


@pytest.mark.parametrize(
    "wrong",
    [np.ones(1, dtype=np.int32), np.ones(2, dtype=np.uint64)[::2], np.ones((1, 1), dtype=np.uint64), b"12345678"],
)
def test_refuses_a_buffer_of_something_else(wrong) -> None:
    """Mutant: only the number of bytes of an item is looked at; the stride is not."""
    plan = _C.Plan([1], None, [0])
    if isinstance(wrong, np.ndarray) and wrong.strides == (16,):
        plan.run(wrong)  # one item has no stride
        wrong = np.ones(4, dtype=np.uint64)[::2]
    with pytest.raises(ValueError, match="Expected a contiguous buffer of uint64 in one dimension"):
        plan.run(wrong)


def test_reads_nothing_beyond_a_source() -> None:
    """Sources and destinations that end where the memory does. Mutants: a whole line is loaded or stored for a tail."""
    code = """
import ctypes, mmap
libc = ctypes.CDLL(None, use_errno=True)
page = mmap.PAGESIZE
def wall(pages):
    memory = mmap.mmap(-1, (pages + 2) * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for outside in (start, start + (pages + 1) * page):
        assert libc.mprotect(ctypes.c_void_p(outside), page, 0) == 0
    return memory, start + page, start + (pages + 1) * page
keep, first, end = wall(3)
keep_too, to_first, to_end = wall(6)
kinds = {"bytes": (1, 1), "float32_to_bfloat16": (4, 2), "float32_to_float16": (4, 2)}
kinds |= {"bfloat16_to_float32": (2, 4), "float16_to_float32": (2, 4)}
for kind, (of, to) in kinds.items():
    for count in [*range(1, 200), 1000, 2047]:
        c.Plan([to_end - count * to], [end - count * of], [count * of], [kind]).run()
        c.Plan([to_first], [first], [count * of], [kind]).run()
"""
    check_output(LOAD + code)
