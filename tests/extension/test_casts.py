"""`_C.Plan` casts as torch does, to the bit: every 16-bit pattern, and float32 around all that rounding knows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.extension.support import Arena

_C = pytest.importorskip("shmsync._C")

KINDS = {
    "float32_to_bfloat16": (torch.float32, torch.bfloat16),
    "float32_to_float16": (torch.float32, torch.float16),
    "bfloat16_to_float32": (torch.bfloat16, torch.float32),
    "float16_to_float32": (torch.float16, torch.float32),
}


def float32_patterns() -> torch.Tensor:
    """All signs and exponents, with mantissas on, beside and halfway between what the 16-bit types can hold."""
    kept = np.array([0, 1, 2, 3, 0x2A, 0x55, 0x7E, 0x7F])
    places = [np.unique(((k << 16) + np.array([-1, 0, 1, 0x7FFF, 0x8000, 0x8001])) & 0x7FFFFF) for k in kept]
    places += [
        np.unique(((k << 13) + np.array([-1, 0, 1, 0xFFF, 0x1000, 0x1001])) & 0x7FFFFF) for k in range(0, 1024, 31)
    ]
    # The last places that survive in a denormal float16 lie anywhere.
    places += [np.unique(((1 << i) + np.array([-1, 0, 1])) & 0x7FFFFF) for i in range(23)]
    places += [np.random.default_rng(0).integers(0, 1 << 23, 2_000)]
    mantissas = np.unique(np.concatenate(places)).astype(np.uint32)
    patterns = (np.arange(512, dtype=np.uint32)[:, None] << np.uint32(23)) | mantissas
    return torch.from_numpy(patterns.ravel().view(np.float32))


def patterns_of(dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.float32:
        return float32_patterns()
    return torch.from_numpy(np.arange(1 << 16, dtype=np.uint16).view(np.int16)).view(dtype)


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16).numpy()


@pytest.fixture(autouse=True)
def one_torch_thread():
    """torch casts NaN from float16 differently at the end of each thread's share."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def torch_bfloat16_nan() -> None:
    _C.set_bfloat16_nan(int(bits(torch.full((64,), float("nan")).to(torch.bfloat16)).view(np.uint16)[0]))


def cast(source: torch.Tensor, kind: str, misaligned: tuple[int, int] = (0, 0)) -> torch.Tensor:
    """What the extension makes of it, from and to addresses that lie as given."""
    item = KINDS[kind][1].itemsize
    of, to = Arena(source.nbytes, misaligned[0]), Arena(source.numel() * item, misaligned[1])
    of.bytes[:] = source.view(torch.uint8).numpy()
    plan = _C.Plan([to.address], [of.address], [source.nbytes], [kind])
    assert (plan.source_nbytes, plan.destination_nbytes) == (of.bytes.size, to.bytes.size)
    plan.run()
    to.check_guards()
    return torch.from_numpy(to.bytes.copy()).view(KINDS[kind][1])


@pytest.mark.parametrize("kind", KINDS)
def test_every_pattern_is_cast_as_torch_casts_it(kind: str) -> None:
    """Mutants: half away from zero instead of to even; denormals to zero; a NaN's payload dropped or its sign kept."""
    source = patterns_of(KINDS[kind][0])
    source = source[: source.numel() // 64 * 64]
    np.testing.assert_array_equal(bits(cast(source, kind)), bits(source.to(KINDS[kind][1])))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("misaligned", [(0, 2), (4, 0), (1, 4), (4, 60), (3, 1)])
def test_every_pattern_comes_through_heads_and_tails(kind: str, misaligned: tuple[int, int]) -> None:
    """Arrays so short that most of their numbers lie at an end. Mutant: the scalar cast keeps a NaN's payload."""
    whole = patterns_of(KINDS[kind][0])
    whole = whole[:: max(1, whole.numel() // 20_000)].clone()
    expected, numel = bits(whole.to(KINDS[kind][1])), 0
    for numel_here in [*range(1, 40), 127, 1000, 2500, 10_000]:
        part = slice(numel, numel + numel_here)
        np.testing.assert_array_equal(bits(cast(whole[part], kind, misaligned)), expected[part])
        numel += numel_here


def test_the_values_that_instructions_get_wrong() -> None:
    """By value, so that it does not hang on torch. Mutant: vcvtneps2bf16, which takes 1e-40 for 0."""
    source = torch.tensor([1e-40, -1e-40, 3.4e38, 65519.0, 65520.0, 2.0**-25, 2.0**-24 * 1.5, float("inf")] * 8)
    assert bits(cast(source, "float32_to_bfloat16"))[:4].tolist() == [0x0001, -0x7FFF, 0x7F80, 0x4780]
    assert bits(cast(source, "float32_to_float16"))[3:].tolist()[:5] == [0x7BFF, 0x7C00, 0x0000, 0x0002, 0x7C00]


@pytest.mark.parametrize("kind", KINDS)
def test_flushing_denormals_changes_nothing(kind: str) -> None:
    """Mutant: casts with float arithmetic, which obeys the thread's mode."""
    source = patterns_of(KINDS[kind][0])
    expected = bits(cast(source, kind))
    supported = torch.set_flush_denormal(True)
    try:
        flushed = bits(cast(source, kind))
    finally:
        torch.set_flush_denormal(False)
    assert supported or torch.backends.cpu.get_cpu_capability() == "DEFAULT"
    np.testing.assert_array_equal(flushed, expected)


def test_a_nan_becomes_the_bfloat16_that_was_set() -> None:
    """Mutant: one of the paths has its pattern built in."""
    nan = torch.full((37,), float("nan"))
    for pattern in (0x7FC0, 0xFFFF):
        _C.set_bfloat16_nan(pattern)
        assert set(bits(cast(nan, "float32_to_bfloat16")).view(np.uint16).tolist()) == {pattern}


def test_rows_of_all_kinds_go_together() -> None:
    """Large enough for several threads. Mutant: a cut row goes on at the source's offset in the destination."""
    before = _C.threads()
    _C.set_threads(4)
    kinds = [*KINDS, "bytes"] * 2
    sources = [torch.randn(200_003 + i).to(KINDS.get(kind, (torch.float32,))[0]) for i, kind in enumerate(kinds)]
    expected = [s.to(KINDS[k][1]) if k in KINDS else s for s, k in zip(sources, kinds, strict=True)]
    destinations = [torch.zeros_like(e) for e in expected]
    _C.Plan(
        [d.data_ptr() for d in destinations], [s.data_ptr() for s in sources], [s.nbytes for s in sources], kinds
    ).run()
    _C.set_threads(before)
    for destination, e in zip(destinations, expected, strict=True):
        np.testing.assert_array_equal(bits(destination), bits(e))
