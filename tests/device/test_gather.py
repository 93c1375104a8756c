"""The gather kernel, its code run by the fake: bytes equal torch's whatever the kinds and addresses are, and what it
cannot do, or where it is not to be had, goes by torch.

A NaN is another one than on the host: see csrc/device/gather.h.
"""

from __future__ import annotations

import ctypes
import logging
import random
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shmsync
from shmsync import device, gathering
from tests.device.support import Reader, fill, policy
from tests.extension.support import python
from tests.fakes import build
from tests.fakes.fake import FATBIN, environment
from tests.fakes.process import CUDA, run
from tests.fakes.torch_side import FakeTorch

CASTS = {
    "float32_to_bfloat16": (torch.float32, torch.bfloat16),
    "float32_to_float16": (torch.float32, torch.float16),
    "bfloat16_to_float32": (torch.bfloat16, torch.float32),
    "float16_to_float32": (torch.float16, torch.float32),
}
ROW_NBYTES = 32
PIECE = 16384


class Placed:
    """Rows on the fake's device: sources with room around them, and one destination for all with guards between."""

    GUARD = 0xA5

    def __init__(self, rows: Sequence[tuple[str, Tensor]], shifts: Sequence[tuple[int, int]]) -> None:
        """shifts: by how many bytes source and destination lie behind a multiple of 64."""
        self.rows, self.sources, self.offsets, at, end = rows, array("Q"), [], 0, 0
        starts = []
        for (kind, tensor), (source, destination) in zip(rows, shifts, strict=True):
            starts.append(at + source)
            at = (at + source + tensor.nbytes + 127) // 64 * 64
            self.offsets.append(end + destination)
            end = (end + destination + self.nbytes_after(kind, tensor) + 127) // 64 * 64
        self.memory = device.Memory(0, max(at, 1))
        self.slot = device.Memory(0, max(end, 1) + 64)
        self.end = end
        ctypes.memset(self.slot.address, self.GUARD, end + 64)
        for (_, tensor), start in zip(rows, starts, strict=True):
            ctypes.memmove(self.memory.address + start, tensor.data_ptr(), tensor.nbytes)
            self.sources.append(self.memory.address + start)
        sizes = [tensor.nbytes for _, tensor in rows]
        self.plan = device.runtime.Gather(self.offsets, sizes, [kind for kind, _ in rows])
        self.table = device.Memory(0, ROW_NBYTES * len(rows) or 1)

    @staticmethod
    def nbytes_after(kind: str, tensor: Tensor) -> int:
        return tensor.numel() * CASTS[kind][1].itemsize if kind in CASTS else tensor.nbytes

    def queue(self, stream: device.Stream) -> None:
        self.plan.upload(0, self.table.address, self.sources, stream.handle)
        kernel = device.runtime.gather_kernel(0, FATBIN)
        self.plan.launch(0, kernel, self.table.address, self.slot.address, stream.handle)

    def check(self) -> None:
        """Every row is what torch makes of it, and nothing else has changed."""
        expected = bytearray([self.GUARD]) * (self.end + 64)
        for (kind, tensor), offset in zip(self.rows, self.offsets, strict=True):
            made = tensor.to(CASTS[kind][1]) if kind in CASTS else tensor
            expected[offset : offset + made.nbytes] = made.view(torch.uint8).numpy().tobytes() if made.numel() else b""
        assert ctypes.string_at(self.slot.address, self.end + 64) == bytes(expected)


def gathered(side: FakeTorch, rows: Sequence[tuple[str, Tensor]], shifts: Sequence[tuple[int, int]] = ()) -> Placed:
    stream = device.Stream(0)
    placed = Placed(rows, shifts or [(0, 0)] * len(rows))
    placed.queue(stream)
    side.fake.drain()
    placed.check()
    return placed


def numbers(kind: str, count: int, seed: int = 0) -> Tensor:
    """Of the kind's source: any bit patterns but NaN's."""
    generator = torch.Generator().manual_seed(seed)
    dtype = CASTS[kind][0] if kind in CASTS else torch.uint8
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)
    return torch.where(raw.isnan(), torch.ones_like(raw), raw) if kind in CASTS else raw


def edges(kind: str) -> Tensor:
    """Every float16 and bfloat16 but NaN; the float32 around each of them and around halfway between two of them."""
    source, destination = CASTS[kind]
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    if source is not torch.float32:
        halves = every.view(source)
        return halves[~halves.isnan()].clone()
    exact = every.view(destination).to(torch.float32)
    bits = exact[~exact.isnan()].view(torch.int32)
    half = 1 << (15 if destination is torch.bfloat16 else 12)
    near = torch.cat([bits + step for step in (-half - 1, -half, -half + 1, -1, 0, 1, half - 1, half, half + 1)])
    found = near.view(torch.float32)
    return found[~found.isnan()].clone()


KINDS = ("bytes", *CASTS)


@pytest.mark.parametrize("kind", CASTS)
def test_casts_are_torchs_to_the_bit(side: FakeTorch, kind: str) -> None:
    gathered(side, [(kind, edges(kind)), (kind, numbers(kind, 50_000))])


@pytest.mark.parametrize("kind", KINDS)
def test_every_size_about_the_ends_of_packs_and_pieces(side: FakeTorch, kind: str) -> None:
    items = PIECE if kind == "bytes" else PIECE // 4
    sizes = [*range(40), *(items + step for step in (-17, -1, 0, 1, 17)), 3 * items, 3 * items + 5]
    gathered(side, [(kind, numbers(kind, size, size)) for size in sizes])


@pytest.mark.parametrize("kind", KINDS)
def test_addresses_need_no_alignment(side: FakeTorch, kind: str) -> None:
    shifts = [(source, destination) for source in range(17) for destination in (0, 1, 2, 4, 8, 6, 16)]
    gathered(side, [(kind, numbers(kind, 333, number)) for number in range(len(shifts))], shifts)


def test_one_huge_leaf_and_two_thousand_small_ones(side: FakeTorch) -> None:
    """Mixed, with empty ones among them; the huge one is not first and not last."""
    chance = random.Random(0)
    rows = [(kind := chance.choice(KINDS), numbers(kind, chance.randrange(60), seed)) for seed in range(2000)]
    rows.insert(700, ("float32_to_bfloat16", numbers("float32_to_bfloat16", 1_000_003)))
    gathered(side, rows, [(chance.choice((0, 0, 4, 1)), chance.choice((0, 0, 4, 1))) for _ in rows])


def test_nothing_at_all(side: FakeTorch) -> None:
    gathered(side, [("bytes", numbers("bytes", 0))] * 3)
    plan = device.runtime.Gather([], [], [])
    assert plan.table_nbytes == 0


@pytest.mark.parametrize(
    ("kind", "expected"), [("float32_to_bfloat16", 0x7FFF), ("float32_to_float16", 0x7FFF)], ids=["bfloat16", "float16"]
)
def test_nans_that_are_narrowed_are_as_the_devices_make_them(side: FakeTorch, kind: str, expected: int) -> None:
    bits = torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1, -(2**23) + 1], dtype=torch.int32)
    placed = Placed([(kind, bits.view(torch.float32))], [(0, 0)])
    placed.queue(device.Stream(0))
    side.fake.drain()
    assert array("H", ctypes.string_at(placed.slot.address, 10)).tolist() == [expected] * 5


def test_launches_in_any_order_and_a_table_that_changes_between_them(side: FakeTorch) -> None:
    """Mutant: the table written while an earlier launch is queued, which the fake calls a violation."""
    for seed in range(20):
        side.fake.seed(seed)
        streams = [device.Stream(0) for _ in range(3)]
        all_placed = [Placed([(k, numbers(k, 5000, seed)) for k in KINDS], [(0, 0)] * len(KINDS)) for _ in streams]
        for stream, placed in zip(streams, all_placed, strict=True):
            placed.queue(stream)
        moved = all_placed[0]
        assert not moved.plan.upload(0, moved.table.address, moved.sources, streams[0].handle)
        other = device.Memory(0, moved.memory.nbytes)
        ctypes.memmove(other.address, moved.memory.address, other.nbytes)
        before = [address - moved.memory.address for address in moved.sources]
        assert moved.plan.upload(0, moved.table.address, [other.address + at for at in before], streams[0].handle)
        kernel = device.runtime.gather_kernel(0, FATBIN)
        moved.plan.launch(0, kernel, moved.table.address, moved.slot.address, streams[0].handle)
        side.fake.drain()
        for placed in all_placed:
            placed.check()


# ── Through a channel ─────────────────────────────────────────────────────────────────────────────────────────────────


def many(dtype: torch.dtype = torch.float32) -> nn.Module:
    module = nn.Sequential(*(nn.Linear(3 + i % 5, 2 + i % 7) for i in range(40)), nn.LayerNorm(3000), nn.BatchNorm1d(9))
    return module.to(dtype)


@pytest.fixture
def by_torch(side: FakeTorch, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors each call of torch's copy gets."""
    calls: list[int] = []
    copy = FakeTorch.copy

    def counted(self: FakeTorch, index: int, stream: int, into: Sequence[Tensor], out_of: Sequence[Tensor]) -> None:
        calls.append(len(into))
        copy(self, index, stream, into, out_of)

    monkeypatch.setattr(FakeTorch, "copy", counted)
    return calls


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_a_push_is_one_launch(side: FakeTorch, publisher, by_torch: list[int], dtype: torch.dtype | None) -> None:
    trainer = side.to_device(many(), 0)
    channel = publisher(trainer, dtype=dtype)
    channel.publish()
    subscriber = shmsync.Subscriber(channel.handle)
    worker = side.to_device(many(dtype or torch.float32), 0)
    subscriber.bind(worker)
    for push in range(2, 8):
        for tensor in trainer.parameters():
            tensor.data.normal_()
        channel.publish()
        by_torch.clear()
        assert channel.stats()["kernel_launches"] == push
        subscriber.refresh()
        side.fake.drain()
        for ours, theirs in zip(trainer.parameters(), worker.parameters(), strict=True):
            assert torch.equal(ours.to(theirs.dtype), theirs)
    subscriber.close()


def test_tensors_that_have_moved_since_the_last_push(side: FakeTorch, publisher) -> None:
    """The source is known, so nothing is planned anew. Mutant: addresses are brought to the device once a plan."""
    trainer = side.to_device(many(), 0)
    channel = publisher(trainer)
    subscriber, worker = None, side.to_device(many(), 0)
    for push in range(6):
        for number, tensor in enumerate(trainer.parameters()):
            if (number + push) % 3 == 0:
                tensor.data = side.zeros(tensor.data, 0)
            tensor.data.normal_()
        channel.publish()
        if subscriber is None:
            subscriber = shmsync.Subscriber(channel.handle)
            subscriber.bind(worker)
        subscriber.refresh()
        side.fake.drain()
        assert all(map(torch.equal, trainer.parameters(), worker.parameters()))
    assert channel.stats()["kernel_launches"] == 6
    assert subscriber is not None
    subscriber.close()


def test_what_the_kernel_cannot_do_is_torchs(side: FakeTorch, publisher, monkeypatch) -> None:
    """Other casts, other strides and negated views, in one push with the rest."""
    done: list[tuple[Tensor, Tensor]] = []

    def copy(self: FakeTorch, index: int, stream: int, into: Sequence[Tensor], out_of: Sequence[Tensor]) -> None:
        done.extend(zip(into, out_of, strict=True))
        side.fake.drain()
        for destination, source in done:
            destination.copy_(source)

    plain = side.zeros(torch.zeros(40), 0)
    plain.copy_(torch.arange(40))
    wide = side.zeros(torch.zeros(6, dtype=torch.float64), 0)
    wide.copy_(torch.arange(6))
    strided = side.zeros(torch.zeros(8, 3), 0)
    strided.copy_(torch.arange(24).reshape(8, 3))
    negated = torch._neg_view(plain)[:7]
    given = {"plain": plain, "wide": wide, "strided": strided.t()[:, ::2], "negated": negated}
    channel = publisher(given, dtype=torch.float32)
    monkeypatch.setattr(FakeTorch, "copy", copy)
    channel.publish(given)
    with shmsync.Subscriber(channel.handle) as subscriber, subscriber.lease() as lease:
        for name, tensor in given.items():
            assert torch.equal(lease.weights[name], tensor.to(torch.float32)), name
    assert channel.stats()["kernel_launches"] == 1
    assert {source.data_ptr() for _, source in done} == {t.data_ptr() for t in (wide, given["strided"], negated)}


# ── Where it is not to be had ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def unknown_kernels(side: FakeTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has looked for the kernel yet."""
    monkeypatch.setattr(gathering, "_kernels", {})


def pushes(side: FakeTorch, publisher) -> int:
    """Some, whose forwards see what they should; how many launches they took."""
    trainer = policy(side, 0)
    channel = publisher(trainer)
    fill(side, trainer, 1)
    channel.publish()
    reader = Reader(side, channel.handle, 0)
    for version in range(2, 6):
        fill(side, trainer, version)
        channel.publish()
        assert reader.forward() == version
    side.fake.drain()
    assert not reader.wrong()
    reader.close()
    return channel.stats()["kernel_launches"]


@pytest.mark.usefixtures("unknown_kernels")
def test_without_a_kernel_nothing_is_said(side: FakeTorch, publisher, monkeypatch, caplog) -> None:
    monkeypatch.setattr(gathering, "image", lambda: None)
    assert pushes(side, publisher) == 0
    assert not caplog.records


@pytest.mark.usefixtures("unknown_kernels")
@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("cuModuleLoadData", "cuModuleLoadData of 16 bytes on device 0 failed: cudaErrorInvalidKernelImage"),
        ("cuModuleGetFunction", "cuModuleGetFunction of shmsync_gather_1 on device 0 failed: cudaErrorInvalid"),
        ("cuLaunchKernel", "cuLaunchKernel of 4 blocks on device 0 failed: cudaErrorInvalidKernelImage"),
    ],
)
def test_a_kernel_that_fails_is_said_once(side: FakeTorch, publisher, caplog, function, said) -> None:
    side.fake.fail_always(function, 200)
    with caplog.at_level(logging.INFO, "shmsync"):
        assert pushes(side, publisher) == 0
    [record] = caplog.records
    assert record.getMessage().startswith(f"The gather kernel can't be used on cuda:0: {said}")


def test_a_launch_that_fails_later_is_made_up_for_in_the_same_push(side: FakeTorch, publisher) -> None:
    for nth in (2, 3):
        side.fake.fail("cuLaunchKernel", nth, 999)
        assert pushes(side, publisher) == nth - 1
        side.fake.fail_never()


@pytest.mark.usefixtures("unknown_kernels")
@pytest.mark.parametrize("image", [b"", b"half a", FATBIN[:-1], b"\x50\xed\x55\xba" + b"\xff" * 40])
def test_a_broken_file_is_not_given_to_the_driver(side: FakeTorch, publisher, monkeypatch, caplog, image) -> None:
    monkeypatch.setattr(gathering, "image", lambda: image)
    assert pushes(side, publisher) == 0
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == [
        f"Expected a fatbin, got {len(image)} other bytes. torch copies instead"
    ]


def test_a_runtime_without_a_driver() -> None:
    run(
        f"""
        error = raised(cuda.gather_kernel, 0, {FATBIN!r})
        assert str(error) == "Expected the CUDA driver, got none: it has no cuModuleLoadData", error
        assert (error.name, error.code) == ("unavailable", -1)
        assert cuda.malloc(0, 8)  # all else works
        """,
        path=build.library("FAKE_WITHOUT_DRIVER"),
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (([0], [8, 8], ["bytes"]), "Expected 1 sizes"),
        (([0], [8], ["bytes"] * 2), "Expected one kind for each row, got 2"),
        (([0], [8], ["bits"]), "Expected a kind out of bytes, .* got 'bits' - at row 0"),
        (([0, 8], [8, 6], ["bytes", "float32_to_float16"]), "multiple of 4 bytes .*, got 6 - at row 1"),
    ],
)
def test_a_plan_refuses(side: FakeTorch, arguments: tuple[object, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        device.runtime.Gather(*arguments)


def test_sources_and_tables_that_are_refused(side: FakeTorch) -> None:
    placed, stream = Placed([("bytes", numbers("bytes", 8))] * 2, [(0, 0)] * 2), device.Stream(0)
    with pytest.raises(ValueError, match="Expected the address of a source, got 0 - at row 1"):
        placed.plan.upload(0, placed.table.address, [8, 0], stream.handle)
    with pytest.raises(ValueError, match="Expected 2 sources"):
        placed.plan.upload(0, placed.table.address, [8], stream.handle)
    with pytest.raises(ValueError, match="Expected a table that was uploaded"):
        placed.plan.launch(0, 8, placed.table.address, 8, stream.handle)
    side.fake.fail("cudaMemcpyAsync", 1, 999)
    with pytest.raises(device.runtime.CudaError):
        placed.plan.upload(0, placed.table.address, placed.sources, stream.handle)
    placed.queue(stream)  # it is not thought to be there
    side.fake.drain()
    placed.check()


# ── Mutants ───────────────────────────────────────────────────────────────────────────────────────────────────────────

ROWS = f"""
chance = random.Random(1)
stream, kernel = cuda.stream_create(0), cuda.gather_kernel(0, {FATBIN!r})
sizes = [chance.choice((1, 15, 16, 100, 16384, 40001)) * 4 + (i % 3 == 0) for i in range(60)]
kinds = ["bytes" if size % 4 else chance.choice(("bytes", "float32_to_bfloat16")) for size in sizes]
source = cuda.malloc(0, sum(sizes) + 64 * len(sizes))
slot = cuda.malloc(0, sum(sizes) + 64 * len(sizes))
table = cuda.malloc(0, 32 * len(sizes))
offsets = [sum((size + 63) // 64 * 64 for size in sizes[:i]) for i in range(len(sizes))]
floats = array("f", [i % 97 + 1 for i in range(sum(sizes) // 4 + 16 * len(sizes))]).tobytes()
ctypes.memmove(source, floats, len(floats))
plan = cuda.Gather(offsets, sizes, kinds)
plan.upload(0, table, [source + offset for offset in offsets], stream)
plan.launch(0, kernel, table, slot, stream)
fake.drain()
wrong = 0
for offset, size, kind in zip(offsets, sizes, kinds):
    before, after = text_of(source + offset, size), text_of(slot + offset, size)
    halves = b"".join(before[i + 2 : i + 4] for i in range(0, size, 4))  # small whole numbers lose nothing
    wrong += after != before if kind == "bytes" else after[: size // 2] != halves
print(wrong, fake.violations())
"""
MUTANTS = {
    "the bytes of a tail are not copied": (
        "from + done, nbytes - done, thread);",
        "from + done, done ? 0 : nbytes, thread);",
    ),
    "the numbers of a tail are not cast": (
        "from + done * sizeof(From), items - done, thread);",
        "from + done * sizeof(From), done ? 0 : items, thread);",
    ),
    "a row's first piece is taken for one of the row before": (
        "rows[middle].first <= piece",
        "rows[middle].first < piece",
    ),
    "pieces of a row are counted from one": ("{piece - row.first}", "{piece - row.first + 1}"),
    "every thread does as if it were alone": ("unsigned begin = thread;", "unsigned begin = thread + 1;"),
}


def test_rows_without_a_mutant() -> None:
    assert run(ROWS) == "0 []"


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_of_the_kernel_is_found(tmp_path: Path, mutant: str) -> None:
    old, new = MUTANTS[mutant]
    text = (build.CSRC / "device" / "gather.h").read_text()
    assert text.count(old) == 1
    (tmp_path / "device").mkdir()
    (tmp_path / "device" / "gather.h").write_text(text.replace(old, new))
    path = build.library(headers=tmp_path)
    try:
        ran = python(CUDA + ROWS, **environment(path=path))
    finally:
        path.unlink()
    assert (ran.returncode, ran.stdout) != (0, "0 []\n")
