"""The wire format: what is packed is parsed again, and no bytes whatever do more than raise ChannelCorrupt.

Mutants: leave out any `_want` (an overlap, a name beyond the names, a product that overflows gets through).
"""

import dataclasses
import random
import struct

import numpy as np
import pytest
import torch

from shmsync import ChannelCorrupt, segment, wire
from shmsync.layout import Layout, build
from shmsync.weights import DTYPES, Named, flatten
from tests.helpers import models  # noqa: F401 - quiets complex32

NONCE = bytes(range(16))
CTL = wire.CtlHead(pid=4711, nonce=NONCE, epoch=1 << 62, subscribers=5, slots=17)


def layout() -> Layout:
    tied = torch.ones(3)
    table = flatten(
        {
            "net": {"weight": torch.ones(4, 3).t(), "bias": tied, "also": tied, "größe": torch.ones(())},
            "none": torch.empty(0, 2, dtype=torch.int64),
            "flags": torch.ones(5, dtype=torch.bool),
        }
    )
    table["noise"] = Named("noise", torch.ones(2, 1, 3), True)
    return build(table, torch.bfloat16)


RAW, HEAD = wire.pack_data(layout(), CTL)


def every_dtype() -> Layout:
    return build(flatten({str(dtype): torch.zeros(3, dtype=dtype) for dtype in DTYPES.values()}))


@pytest.mark.parametrize("packed", [layout(), every_dtype(), Layout((), 0)], ids=["mixed", "every dtype", "empty"])
def test_data_comes_back_as_it_was(packed) -> None:
    raw, head = wire.pack_data(packed, CTL)
    parsed = wire.parse_data(raw, head.nbytes)
    assert parsed == head
    assert parsed.layout == packed
    assert wire.head_nbytes(raw[: wire.PAGE]) == len(raw)
    assert (parsed.nonce, parsed.epoch, parsed.rows, parsed.slots) == (NONCE, CTL.epoch, 6, 17)


def test_ctl_comes_back_as_it_was() -> None:
    assert wire.parse_ctl(wire.pack_ctl(CTL), CTL.nbytes) == CTL


def test_slots_lie_where_the_map_says() -> None:
    assert HEAD.slots_offset % (2 << 20) == 0
    assert HEAD.slot_offset(3) == HEAD.slots_offset + 3 * HEAD.slot_stride
    assert HEAD.slot_stride % (2 << 20) == 0
    assert HEAD.slot_mapped_nbytes % 4096 == 0
    assert HEAD.slot_mapped_nbytes >= HEAD.layout.slot_nbytes
    assert HEAD.nbytes == HEAD.slot_offset(17)
    assert HEAD.rows_offset + 8 * HEAD.rows <= HEAD.table_offset
    assert HEAD.rows_offset % 8 == HEAD.table_offset % 64 == 0


def test_the_locks_of_slots_owner_and_lines_do_not_meet() -> None:
    slots = {wire.OWNER_LOCK + 1 + slot for slot in (0, wire.MAX_SLOTS - 1)}
    lines = {wire.ROSTER_LOCKS + line for line in (0, wire.MAX_SUBSCRIBERS - 1)}
    assert wire.OWNER_LOCK < min(slots) <= max(slots) < min(lines)
    largest = dataclasses.replace(CTL, subscribers=wire.MAX_SUBSCRIBERS)
    assert largest.nbytes < wire.LOCKS, "locks lie behind the end of the segment"


def check(raw: bytes, nbytes: int) -> bool:
    """Parse damaged bytes; whether they passed. Those that do must describe leaves that lie apart in their slot."""
    try:
        head = wire.parse_data(raw, nbytes)
    except ChannelCorrupt:
        return False
    end = 0
    for leaf in head.layout:
        assert leaf.offset % 64 == 0
        assert leaf.offset >= end
        end = leaf.offset + leaf.nbytes
    assert end <= head.layout.slot_nbytes <= head.slot_stride
    assert head.slot_offset(head.slots - 1) + head.slot_stride <= nbytes
    if head.layout.slot_nbytes < 1 << 20:
        block = bytearray(max(head.layout.slot_nbytes, 1))
        for leaf, view in zip(head.layout, segment.views(block, head.layout), strict=True):
            assert view.shape == leaf.shape
            view.zero_()  # a view that leaves the block is a crash here
    return True


EDGES = [0, 1, 2, 7, 8, 63, 64, 255, 256, 4095, 4096, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
EDGES += [1 << 32, (1 << 61), (1 << 62) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]


def fields(kind: np.dtype, base: int) -> list[tuple[int, int]]:
    """Offset and size of every number in a record."""
    found = []
    for name in kind.names or ():
        dtype, offset = kind.fields[name][:2]
        step = dtype.base.itemsize if dtype.base.kind != "S" else 1
        found += [(base + offset + n, step) for n in range(0, dtype.itemsize, step)]
    return found


def every_field() -> list[tuple[int, int]]:
    leaves_offset = HEAD.table_offset + HEAD.slots * wire.SLOT_ENTRY_NBYTES
    found = fields(wire.DATA_HEAD, 0)
    for number in range(len(HEAD.layout)):
        found += fields(wire.LEAF, leaves_offset + number * wire.LEAF.itemsize)
    return found


def with_number(raw: bytes, offset: int, size: int, value: int) -> bytes:
    return raw[:offset] + (value % (1 << 8 * size)).to_bytes(size, "little") + raw[offset + size :]


def test_every_field_at_its_edges_is_refused_or_harmless() -> None:
    passed = 0
    for offset, size in every_field():
        old = int.from_bytes(RAW[offset : offset + size], "little")
        for value in {*EDGES, old + 1, old - 1, old + 64, old * 2, old ^ 1}:
            passed += check(with_number(RAW, offset, size, value), HEAD.nbytes)
    assert passed, "nonce, epoch and reserved bytes may be anything"


@pytest.mark.parametrize("seed", range(10))
def test_random_damage_is_refused_or_harmless(seed) -> None:
    """A hundred thousand heads with one to four fields, bytes or ranges overwritten, swapped or cut."""
    chance = random.Random(seed)
    places = every_field()
    for _ in range(10_000):
        raw = RAW
        for _ in range(chance.randint(1, 4)):
            offset, size = chance.choice(places)
            kind = chance.random()
            if kind < 0.4:
                raw = with_number(raw, offset, size, chance.choice(EDGES))
            elif kind < 0.6:
                raw = with_number(raw, offset, size, chance.getrandbits(8 * size))
            elif kind < 0.8:
                other, _ = chance.choice(places)
                raw = raw[:offset] + raw[other : other + size] + raw[offset + size :]
            else:
                begin = chance.randrange(len(raw))
                raw = raw[:begin] + chance.randbytes(min(16, len(raw) - begin)) + raw[begin + 16 :]
        check(raw, HEAD.nbytes)


def field_of(kind: np.dtype, name: str, leaf: int | None = None, item: int = 0) -> tuple[int, int]:
    """Offset and size of a number of the head, or of a leaf."""
    base = 0 if leaf is None else HEAD.table_offset + HEAD.slots * wire.SLOT_ENTRY_NBYTES + leaf * wire.LEAF.itemsize
    dtype, offset = kind.fields[name][:2]
    return base + offset + item * dtype.base.itemsize, dtype.base.itemsize


LYING = {
    "names beyond their end": ("name_nbytes", 1, 500, "cut off"),
    "names far away": ("name_offset", 0, 1 << 40, "cut off"),
    "unknown dtype": ("dtype", 0, 999, "dtype"),
    "no dtype": ("dtype", 0, 0, "dtype"),
    "too many dimensions": ("rank", 0, 9, "rank"),
    "more bytes than elements": ("nbytes", 0, 1000, "nbytes"),
    "fewer bytes than elements": ("nbytes", 0, 2, "nbytes"),
    "unaligned": ("offset", 1, 65, "offset"),
    "over the leaf before": ("offset", 1, 0, "offset"),
    "negative size": ("shape", 0, (1 << 64) - 3, "shape"),
    "stride into other leaves": ("stride", 0, 77, "stride"),
    "negative stride": ("stride", 0, (1 << 64) - 1, "stride"),
}


@pytest.mark.parametrize(("name", "leaf", "value", "text"), LYING.values(), ids=LYING)
def test_a_leaf_that_lies_is_refused_by_what_it_lies_about(name, leaf, value, text) -> None:
    offset, size = field_of(wire.LEAF, name, leaf)
    with pytest.raises(ChannelCorrupt, match=text):
        wire.parse_data(with_number(RAW, offset, size, value), HEAD.nbytes)


@pytest.mark.parametrize("shift", [-(2 << 20), 64, 2 << 20])
def test_slots_that_lie_elsewhere_are_refused_though_the_size_fits(shift) -> None:
    raw = RAW
    for name, old in (("slots_offset", HEAD.slots_offset), ("nbytes", HEAD.nbytes)):
        raw = with_number(raw, *field_of(wire.DATA_HEAD, name), old + shift)
    with pytest.raises(ChannelCorrupt, match="slots_offset"):
        wire.parse_data(raw, HEAD.nbytes + shift)


def test_a_name_that_occurs_twice_is_refused() -> None:
    flags, noise = HEAD.layout.index["flags"], HEAD.layout.index["noise"]
    offset, size = field_of(wire.LEAF, "name_offset", flags)
    taken = int.from_bytes(RAW[offset : offset + size], "little")
    offset, size = field_of(wire.LEAF, "name_offset", noise)
    with pytest.raises(ChannelCorrupt, match="`flags` occurs twice"):
        wire.parse_data(with_number(RAW, offset, size, taken), HEAD.nbytes)


def test_names_that_are_no_text_are_refused() -> None:
    begin = RAW.rindex(b"flags")
    with pytest.raises(ChannelCorrupt, match="UTF-8"):
        wire.parse_data(RAW[:begin] + b"\xff" + RAW[begin + 1 :], HEAD.nbytes)


@pytest.mark.parametrize("name", [n for n in wire.DATA_HEAD.names if n not in ("nonce", "epoch")])
@pytest.mark.parametrize("step", [8, 64, 1 << 21])
def test_every_number_of_the_head_is_checked(name, step) -> None:
    """All of them follow from the number of rows, slots and leaves, so that none can be off by any amount."""
    offset, size = field_of(wire.DATA_HEAD, name)
    old = int.from_bytes(RAW[offset : offset + size], "little")
    with pytest.raises(ChannelCorrupt):
        wire.parse_data(with_number(RAW, offset, size, old + step), HEAD.nbytes)


def test_any_cut_is_refused() -> None:
    needed = wire.head_nbytes(RAW)
    for length in [*range(0, 200), *range(200, needed, 97), needed - 1]:
        with pytest.raises(ChannelCorrupt):
            wire.parse_data(RAW[:length], HEAD.nbytes)


def test_noise_is_refused() -> None:
    chance = random.Random(3)
    for _ in range(300):
        noise = chance.randbytes(chance.choice([0, 8, 200, 8192]))
        for raw in (noise, wire.DATA_MAGIC + noise, RAW[:12] + noise, wire.CTL_MAGIC + noise):
            with pytest.raises(ChannelCorrupt):
                wire.parse_data(raw, HEAD.nbytes)
            with pytest.raises(ChannelCorrupt):
                wire.parse_ctl(raw, CTL.nbytes)


def test_every_field_of_ctl_at_its_edges_is_refused_or_harmless() -> None:
    raw = wire.pack_ctl(CTL)
    for offset, size in fields(wire.CTL_HEAD, 0):
        for value in EDGES:
            try:
                head = wire.parse_ctl(with_number(raw, offset, size, value), CTL.nbytes)
            except ChannelCorrupt:
                continue
            assert wire.PAGE + head.subscribers * wire.ROSTER_LINE.itemsize <= head.nbytes == CTL.nbytes
            assert 2 <= head.slots <= wire.MAX_SLOTS


def test_another_format_names_both_numbers() -> None:
    offset = wire.DATA_HEAD.fields["format"][1]
    with pytest.raises(ChannelCorrupt, match=f"format {wire.FORMAT_VERSION}, got 99.*same shmsync"):
        wire.parse_data(with_number(RAW, offset, 4, 99), HEAD.nbytes)


@pytest.mark.parametrize("size", [0, 1, HEAD.nbytes - 1, HEAD.nbytes + 1, 1 << 63])
def test_a_segment_of_another_size_is_refused(size) -> None:
    with pytest.raises(ChannelCorrupt, match="bytes"):
        wire.parse_data(RAW, size)


def test_an_empty_leaf_may_not_have_sizes_that_overflow() -> None:
    """torch multiplies them, also beside a 0. Mutant: look at the bytes alone."""
    layout = build(flatten({"empty": torch.zeros(0, 3, 3)}))
    raw, head = wire.pack_data(layout, CTL)
    shape = head.table_offset + head.slots * wire.SLOT_ENTRY_NBYTES + wire.offset_of(wire.LEAF, "shape")
    damaged = raw[:shape] + struct.pack("<3q", 1 << 40, 1 << 40, 0) + raw[shape + 24 :]
    with pytest.raises(ChannelCorrupt, match="shape of `empty`"):
        wire.parse_data(damaged, head.nbytes)
