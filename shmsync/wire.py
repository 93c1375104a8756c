"""All shared bytes, in one place.

CTL, small, made with the publisher, never mapped through the description that carries the locks:

    0          80         4096                              4096 + 256 x lines
    +----------+----------+---------+---------+-- ... --+
    | CTL head | (zero)   | line 0  | line 1  |         |      one roster line per subscriber
    +----------+----------+---------+---------+-- ... --+
    byte-range locks far behind its end, where nothing is stored:
    LOCKS + 0                          the owner: exclusive while the publisher lives
    LOCKS + 1 + slot                   one per slot: shared = leased, exclusive = being written or punched
    LOCKS + 2**20 + line               one per roster line: exclusive while its subscriber lives
    LOCKS + 2**21 + 2**16 ring + slot  shared = mapped in a subscriber, exclusive = being freed (device rings only)

DATA, made with the first weights; subscribers open it read-only:

    0           1024    rows      slot table      leaf table, names  rings_offset    slots_offset (2 MiB aligned)
    +-----------+-------+---------+---------------+------------------+---------------+--------+--------+-- ... --+
    | DATA head | rings | u64 ... | 64 B per slot | 192 B per leaf.. | rings' slots  | slot 0 | slot 1 | sparse  |
    +-----------+-------+---------+---------------+------------------+---------------+--------+--------+-- ... --+

    row   = version << 16 | slot, one aligned u64, stored in one go; 0 = nothing yet
    row 0 is everybody's; row k + 1 is worker k's
    slot table entry: u64 version (0 = incomplete), u64 the version whose bytes are here, on the host (0 = on devices
    only, or incomplete), the rest is reserved
    slot: the leaves, each at a multiple of 64 bytes; with checksums, behind them one u64 per 4 MiB
    rings: 64 B per device ring, 16 of them: its state and its device's UUID
    rings' slots: for each ring 128 B per slot (no memory before its state says that it is served): the version whose
    bytes are there, and how to map it. Slot s of a ring has the row, the lock and the leases of slot s

All numbers are little-endian. What a subscriber reads is copied first and then validated: `parse_*` accept any bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .errors import ChannelCorrupt
from .layout import LEAF_ALIGNMENT, SLOT_ALIGNMENT, Layout, Leaf, align
from .weights import DTYPE_CODES, DTYPES, MAX_RANK

FORMAT_VERSION = 2
CTL_MAGIC = b"SHMSYNCC"
DATA_MAGIC = b"SHMSYNCD"
PAGE = 4096
NONCE_NBYTES = 16

LOCKS = 1 << 40
OWNER_LOCK = LOCKS
ROSTER_LOCKS = LOCKS + (1 << 20)
RING_LOCKS = LOCKS + (1 << 21)

MAX_SLOTS = 1 << 16
MAX_LEAVES = 1 << 22
MAX_NAMES_NBYTES = 1 << 28
MAX_KEY_NBYTES = 4096
MAX_SUBSCRIBERS = 4096
NAME_NBYTES = 64
MAX_RINGS = 16
RINGS_OFFSET = 1024  # in the first page, which always has memory
UUID_NBYTES = 16
IPC_HANDLE_NBYTES = 64
MOST_WISHES = 7


def offset_of(kind: np.dtype, field: str) -> int:
    """Where a field lies in a record, in bytes."""
    assert kind.fields is not None
    return kind.fields[field][1]


CTL_HEAD = np.dtype(
    [
        ("magic", "S8"),
        ("format", "<u4"),
        ("pid", "<u4"),
        ("nonce", "u1", NONCE_NBYTES),
        ("epoch", "<u8"),
        ("subscribers", "<u4"),
        ("slots", "<u4"),
        ("data", "<u8"),  # descriptor number of DATA in the owner + 1; 0 = not made yet
        ("closed", "<u8"),  # 1 after an orderly close
        ("bell", "<u8"),  # raised (its low 32 bits) after rows have moved and at close; a futex
        ("wishes", "<u8"),  # another number (in its low 32 bits) after a line of the roster has other wishes; a futex
    ]
)
ROSTER_LINE = np.dtype(
    {
        "names": [
            *("pid", "worker", "used", "seen", "forwards", "switches", "switched_ns", "wish", "name", "answered"),
            "devices",
        ],
        "formats": [
            *("<u8", "<i8", "<u8", "<u8", "<u8", "<u8", "<u8", "<u8", f"S{NAME_NBYTES}", "<u8"),
            ("u1", (MOST_WISHES, UUID_NBYTES)),
        ],
        "offsets": [0, 8, 16, 24, 32, 40, 48, 56, 64, 128, 136],
        "itemsize": 256,
    }
)
# `wish`: how many of `devices` this subscriber wants rings on, and whether it can do without the bytes on the host.
WITHOUT_HOST = 1 << 8

DATA_HEAD = np.dtype(
    [
        ("magic", "S8"),
        ("format", "<u4"),
        ("leaves", "<u4"),
        ("nonce", "u1", NONCE_NBYTES),
        ("epoch", "<u8"),
        ("nbytes", "<u8"),
        ("rows", "<u4"),
        ("slots", "<u4"),
        ("rows_offset", "<u8"),
        ("table_offset", "<u8"),
        ("leaves_offset", "<u8"),
        ("names_offset", "<u8"),
        ("names_nbytes", "<u8"),
        ("rings_offset", "<u8"),
        ("slots_offset", "<u8"),
        ("slot_nbytes", "<u8"),
        ("slot_stride", "<u8"),
        ("checksum_piece", "<u8"),  # bytes that one checksum is of; 0 = there are none
    ]
)
# A slot with checksums has them after its weights: one u64 per piece, XXH3 with 64 bits and seed 0.
CHECKSUM_PIECE_NBYTES = 4 << 20
SLOT_ENTRY = np.dtype({"names": ["version", "on_host"], "formats": ["<u8", "<u8"], "itemsize": 64})
SLOT_ENTRY_NBYTES = SLOT_ENTRY.itemsize

# The state of a ring: not in use; slots come into it; its device can't be reached by the publisher.
NO_RING, SERVED, REFUSED = 0, 1, 2
RING = np.dtype({"names": ["state", "uuid"], "formats": ["<u8", ("u1", UUID_NBYTES)], "itemsize": 64})
RING_SLOT = np.dtype(
    {
        # `memory`: its number among all that the ring ever had, 0 = none. `retired`: who has it mapped and does not
        # use it shall unmap it.
        "names": ["version", "memory", "retired", "handle"],
        "formats": ["<u8", "<u8", "<u8", ("u1", IPC_HANDLE_NBYTES)],
        "offsets": [0, 8, 16, 64],
        "itemsize": 128,
    }
)

LEAF = np.dtype(
    [
        ("offset", "<u8"),
        ("nbytes", "<u8"),
        ("name_offset", "<u8"),
        ("name_nbytes", "<u4"),  # the names of a leaf, joined by NUL
        ("dtype", "<u2"),
        ("rank", "u1"),
        ("flags", "u1"),
        ("reserved", "<u8", 4),
        ("shape", "<i8", MAX_RANK),
        ("stride", "<i8", MAX_RANK),
    ]
)
OPTIONAL, CAST = 1, 2

CTL_DATA_OFFSET = offset_of(CTL_HEAD, "data")
CTL_CLOSED_OFFSET = offset_of(CTL_HEAD, "closed")
CTL_BELL_OFFSET = offset_of(CTL_HEAD, "bell")
CTL_WISHES_OFFSET = offset_of(CTL_HEAD, "wishes")


@dataclass(frozen=True)
class CtlHead:
    """CTL's head, validated."""

    pid: int
    nonce: bytes
    epoch: int
    subscribers: int
    slots: int

    @property
    def nbytes(self) -> int:
        """Size of the whole segment."""
        return PAGE + align(self.subscribers * ROSTER_LINE.itemsize, PAGE)


@dataclass(frozen=True)
class DataHead:
    """DATA's head and layout, validated."""

    nonce: bytes
    epoch: int
    nbytes: int
    rows: int
    slots: int
    rows_offset: int
    table_offset: int
    rings_offset: int
    slots_offset: int
    slot_stride: int
    checksum: bool
    layout: Layout

    @property
    def slot_mapped_nbytes(self) -> int:
        """The bytes of a slot that get memory: whole pages, less than the distance between two slots."""
        return align(_room(self.layout.slot_nbytes, self.checksum), PAGE)

    def slot_offset(self, slot: int) -> int:
        """Where a slot begins in the segment."""
        return self.slots_offset + slot * self.slot_stride

    def ring_offset(self, ring: int) -> int:
        """Where the slots of a device ring are told in the segment."""
        return self.rings_offset + ring * ring_stride(self.slots)


def pack_ctl(head: CtlHead) -> bytes:
    """The first bytes of CTL."""
    record = np.zeros((), CTL_HEAD)
    record["magic"], record["format"], record["pid"] = CTL_MAGIC, FORMAT_VERSION, head.pid
    record["nonce"] = np.frombuffer(head.nonce, np.uint8)
    record["epoch"], record["subscribers"], record["slots"] = head.epoch, head.subscribers, head.slots
    return record.tobytes()


def parse_ctl(raw: bytes, nbytes: int) -> CtlHead:
    """CTL's head from the first bytes of a segment of `nbytes`. Raises ChannelCorrupt."""
    record = _record(raw, CTL_HEAD, CTL_MAGIC, "CTL")
    head = CtlHead(
        pid=int(record["pid"]),
        nonce=record["nonce"].tobytes(),
        epoch=int(record["epoch"]),
        subscribers=int(record["subscribers"]),
        slots=int(record["slots"]),
    )
    _want(1 <= head.subscribers <= MAX_SUBSCRIBERS, f"subscribers = {head.subscribers}")
    _want(2 <= head.slots <= MAX_SLOTS, f"slots = {head.slots}")
    _want(nbytes == head.nbytes, f"CTL has {nbytes} bytes, expected {head.nbytes}")
    return head


def ring_stride(slots: int) -> int:
    """The bytes that tell of a ring's slots."""
    return align(slots * RING_SLOT.itemsize, PAGE)


def _end_of_rings(rings_offset: int, slots: int) -> int:
    return rings_offset + MAX_RINGS * ring_stride(slots)


def checksum_pieces(nbytes: int) -> int:
    """How many checksums so many bytes have."""
    return -(-nbytes // CHECKSUM_PIECE_NBYTES)


def _room(slot_nbytes: int, checksum: bool) -> int:
    return slot_nbytes + 8 * checksum_pieces(slot_nbytes) * checksum


def pack_data(layout: Layout, ctl: CtlHead, checksum: bool = False) -> tuple[bytes, DataHead]:
    """The bytes of DATA in front of its slots (rows and slot table zeroed), and the head they encode."""
    leaves, names = _pack_layout(layout)
    rows_offset = PAGE
    table_offset = align(rows_offset + 8 * (1 + ctl.subscribers), 64)
    leaves_offset = table_offset + ctl.slots * SLOT_ENTRY_NBYTES
    names_offset = leaves_offset + leaves.nbytes
    rings_offset = align(names_offset + len(names), PAGE)
    slots_offset = align(_end_of_rings(rings_offset, ctl.slots), SLOT_ALIGNMENT)
    stride = align(max(_room(layout.slot_nbytes, checksum), 1), SLOT_ALIGNMENT)
    record = np.zeros((), DATA_HEAD)
    record["magic"], record["format"], record["leaves"] = DATA_MAGIC, FORMAT_VERSION, len(layout)
    record["nonce"], record["epoch"] = np.frombuffer(ctl.nonce, np.uint8), ctl.epoch
    record["nbytes"] = slots_offset + ctl.slots * stride
    record["rows"], record["slots"] = 1 + ctl.subscribers, ctl.slots
    record["rows_offset"], record["table_offset"] = rows_offset, table_offset
    record["leaves_offset"], record["names_offset"], record["names_nbytes"] = leaves_offset, names_offset, len(names)
    record["rings_offset"], record["slots_offset"] = rings_offset, slots_offset
    record["slot_nbytes"], record["slot_stride"] = layout.slot_nbytes, stride
    record["checksum_piece"] = CHECKSUM_PIECE_NBYTES * checksum
    raw = record.tobytes().ljust(leaves_offset, b"\0") + leaves.tobytes() + names
    return raw, parse_data(raw, int(record["nbytes"]))


def head_nbytes(raw: bytes) -> int:
    """How many bytes of DATA `parse_data` needs, from its first page. Raises ChannelCorrupt."""
    record = _record(raw, DATA_HEAD, DATA_MAGIC, "DATA")
    _want(int(record["names_nbytes"]) <= MAX_NAMES_NBYTES, "names_nbytes")
    _want(int(record["leaves"]) <= MAX_LEAVES, "leaves")
    needed = int(record["names_offset"]) + int(record["names_nbytes"])
    _want(
        needed <= PAGE + MAX_SLOTS * SLOT_ENTRY_NBYTES + MAX_LEAVES * LEAF.itemsize + MAX_NAMES_NBYTES + (1 << 20),
        "head",
    )
    return needed


def data_nonce(raw: bytes) -> bytes:
    """Whose DATA it is, from its first page. Raises ChannelCorrupt."""
    return bytes(_record(raw, DATA_HEAD, DATA_MAGIC, "DATA")["nonce"].tobytes())


def parse_data(raw: bytes, nbytes: int) -> DataHead:
    """DATA's head and layout from a private copy of its first bytes. Raises ChannelCorrupt, never anything else."""
    needed = head_nbytes(raw)
    _want(len(raw) >= needed, "head is cut off")
    record = _record(raw, DATA_HEAD, DATA_MAGIC, "DATA")
    number = {name: int(record[name]) for name in record.dtype.names or () if name not in ("magic", "nonce")}
    rows, slots, leaves = number["rows"], number["slots"], number["leaves"]
    _want(2 <= rows <= 1 + MAX_SUBSCRIBERS, f"rows = {rows}")
    _want(2 <= slots <= MAX_SLOTS, f"slots = {slots}")
    _want(number["rows_offset"] == PAGE, "rows_offset")
    _want(number["table_offset"] == align(PAGE + 8 * rows, 64), "table_offset")
    _want(number["leaves_offset"] == number["table_offset"] + slots * SLOT_ENTRY_NBYTES, "leaves_offset")
    _want(number["names_offset"] == number["leaves_offset"] + leaves * LEAF.itemsize, "names_offset")
    _want(number["rings_offset"] == align(needed, PAGE), "rings_offset")
    _want(number["slots_offset"] == align(_end_of_rings(number["rings_offset"], slots), SLOT_ALIGNMENT), "slots_offset")
    stride, slot_nbytes = number["slot_stride"], number["slot_nbytes"]
    _want(number["checksum_piece"] in (0, CHECKSUM_PIECE_NBYTES), "checksum_piece")
    checksum = bool(number["checksum_piece"])
    _want(stride == align(max(_room(slot_nbytes, checksum), 1), SLOT_ALIGNMENT), "slot_stride")
    _want(number["nbytes"] == nbytes == number["slots_offset"] + slots * stride, f"segment has {nbytes} bytes")
    table = np.frombuffer(raw, LEAF, leaves, number["leaves_offset"])
    names = raw[number["names_offset"] : needed]
    layout = _parse_layout(table, names, slot_nbytes)
    return DataHead(
        nonce=record["nonce"].tobytes(),
        epoch=number["epoch"],
        nbytes=nbytes,
        rows=rows,
        slots=slots,
        rows_offset=number["rows_offset"],
        table_offset=number["table_offset"],
        rings_offset=number["rings_offset"],
        slots_offset=number["slots_offset"],
        slot_stride=stride,
        checksum=checksum,
        layout=layout,
    )


def _pack_layout(layout: Layout) -> tuple[np.ndarray, bytes]:
    table = np.zeros(len(layout), LEAF)
    names = bytearray()
    for row, leaf in zip(table, layout, strict=True):
        name = "\0".join(leaf.keys).encode()
        row["offset"], row["nbytes"] = leaf.offset, leaf.nbytes
        row["name_offset"], row["name_nbytes"] = len(names), len(name)
        row["dtype"], row["rank"] = DTYPE_CODES[leaf.dtype], len(leaf.shape)
        row["flags"] = OPTIONAL * leaf.optional | CAST * leaf.cast
        row["shape"][: len(leaf.shape)] = leaf.shape
        row["stride"][: len(leaf.stride)] = leaf.stride
        names += name
    return table, bytes(names)


def _parse_layout(table: np.ndarray, names: bytes, slot_nbytes: int) -> Layout:
    leaves = []
    seen: set[str] = set()
    end = 0
    for row in table:
        leaf = _parse_leaf(row, names)
        _want(leaf.offset == align(end, LEAF_ALIGNMENT), f"offset of `{leaf.key}`")
        end = leaf.offset + leaf.nbytes
        _want(seen.isdisjoint(leaf.keys) and len(set(leaf.keys)) == len(leaf.keys), f"`{leaf.key}` occurs twice")
        seen.update(leaf.keys)
        leaves.append(leaf)
    _want(slot_nbytes == align(end, LEAF_ALIGNMENT), f"slot_nbytes = {slot_nbytes}")
    return Layout(tuple(leaves), slot_nbytes)


def _parse_leaf(row: np.void, names: bytes) -> Leaf:
    begin, length = int(row["name_offset"]), int(row["name_nbytes"])
    _want(begin + length <= len(names), "name is cut off")
    try:
        keys = tuple(names[begin : begin + length].decode().split("\0"))
    except UnicodeDecodeError:
        raise ChannelCorrupt("Expected key paths in UTF-8, got other bytes") from None
    rank, dtype = int(row["rank"]), DTYPES.get(int(row["dtype"]))
    _want(rank <= MAX_RANK and dtype is not None, f"rank or dtype of `{keys[0]}`")
    assert dtype is not None
    shape, stride = tuple(row["shape"][:rank].tolist()), tuple(row["stride"][:rank].tolist())
    _want(_dense(shape, stride), f"shape {shape} or stride {stride} of `{keys[0]}`")
    nbytes = extent = dtype.itemsize
    for size in shape:
        nbytes *= size
        extent *= max(size, 1)  # torch multiplies sizes beside a 0 too
    _want(extent < 1 << 62, f"shape of `{keys[0]}`")
    _want(int(row["nbytes"]) == nbytes < 1 << 62, f"nbytes of `{keys[0]}`")
    flags = int(row["flags"])
    return Leaf(keys, dtype, shape, stride, int(row["offset"]), nbytes, bool(flags & OPTIONAL), bool(flags & CAST))


def _dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the strides reach every element of a block without holes, overlaps or anything outside it."""
    if any(size < 0 for size in shape):
        return False
    if 0 in shape:
        return all(step >= 0 for step in stride)
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size > 1):
        if step != expected:
            return False
        expected *= size
    return all(step >= 0 for step in stride)


def _record(raw: bytes, kind: np.dtype, magic: bytes, what: str) -> np.ndarray:
    _want(len(raw) >= kind.itemsize, f"{what} is shorter than its head")
    record = np.frombuffer(raw, kind, 1)[0]
    _want(bytes(record["magic"]) == magic, f"magic {bytes(record['magic'])!r} is not {what}'s {magic!r}")
    found = int(record["format"])
    if found != FORMAT_VERSION:
        raise ChannelCorrupt(
            f"Expected wire format {FORMAT_VERSION}, got {found}; publisher and subscriber need the same "
            "shmsync version"
        )
    return record


def _want(ok: bool, what: str) -> None:
    if not ok:
        raise ChannelCorrupt(f"The shared bytes are not a valid shmsync segment: {what}")
