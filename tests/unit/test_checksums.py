"""Checksums: of exactly what was published, found wrong wherever a byte changes, and the same by either hasher.

Mutants: the last, short piece is left out; only the caller's leaves are summed up, not those copied over; the sums of
the slot before; verify the newest only.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

import shmsync
from shmsync import ChannelCorrupt, NothingPublished, ShmSyncError, checksums, segment
from shmsync.wire import CHECKSUM_PIECE_NBYTES as PIECE
from tests.helpers.models import fill, uniform


@pytest.fixture(params=["extension", "package"])
def way(request, monkeypatch) -> str:
    """Both hashers; without the extension the first is the second."""
    if request.param == "package":
        monkeypatch.setattr(checksums, "engine", None)
    return request.param


def weights(last: int = 1000) -> dict[str, torch.Tensor]:
    """Two whole pieces and a short one; `b` lies across the border of two."""
    first = PIECE - 4096
    return {
        "a": torch.zeros(first, dtype=torch.uint8),
        "b": torch.zeros(8192, dtype=torch.uint8),
        "c": torch.zeros(PIECE, dtype=torch.uint8),
        "d": torch.zeros(last, dtype=torch.uint8),
    }


def damage(channel: shmsync.Publisher, offset: int) -> None:
    """Change a byte of the newest slot behind everybody's back."""
    store = channel._store
    slot = store.writer.newest & 0xFFFF
    where = store.head.slot_offset(slot) + offset
    byte = os.pread(store.fd, 1, where)
    os.pwrite(store.fd, bytes([byte[0] ^ 1]), where)


def test_what_was_published_is_right(publisher, subscriber, way) -> None:
    source = weights()
    channel = publisher(source, checksum=True)
    follower = subscriber(channel)
    for version in range(1, 6):
        for tensor in source.values():
            tensor.fill_(version)
        channel.publish()
        assert follower.verify() == [version]


@pytest.mark.parametrize("leaf", ["a", "b", "c", "d"])
@pytest.mark.parametrize("where", [0, -1], ids=["first", "last"])
def test_a_changed_byte_is_found_and_its_leaf_named(publisher, subscriber, way, leaf, where) -> None:
    channel = publisher(weights(), checksum=True)
    follower = subscriber(channel)
    channel.publish()
    entry = channel.layout.leaves[channel.layout.index[leaf]]
    damage(channel, entry.offset + where % entry.nbytes)
    with pytest.raises(ChannelCorrupt, match=rf"Version 1 .*`{leaf}`.*publish again"):
        follower.verify()
    for _ in range(3):  # until the damaged slot has been written again
        channel.publish()
        follower.verify()


def test_both_hashers_agree(publisher, subscriber, monkeypatch) -> None:
    """One side may have the extension and the other not."""
    source = {"w": torch.arange(3 * PIECE // 4 + 7, dtype=torch.float32)}
    channel = publisher(source, checksum=True)
    channel.publish()
    follower = subscriber(channel)
    assert follower.verify() == [1]
    monkeypatch.setattr(checksums, "engine", None)
    assert follower.verify() == [1]
    channel.publish()
    monkeypatch.undo()
    assert follower.verify() == [2]


def test_partial_pushes_keep_the_sums_right(publisher, subscriber) -> None:
    """Whatever slot is taken, and whatever was copied over into it."""
    source = weights()
    channel = publisher(source, checksum=True)
    follower = subscriber(channel)
    channel.publish()
    kept = [follower.lease()]
    for k, leaf in enumerate("abcdabcd", 1):
        channel.publish({leaf: source[leaf].fill_(k)}, partial=True)
        if k % 3 == 0:
            kept.append(follower.lease())  # so that slots of different age are taken
        follower.verify()
    assert follower.verify() == sorted({lease.version for lease in kept} | {channel.version})
    for lease in kept:
        lease.close()


@pytest.fixture
def bound(publisher, subscriber) -> tuple[nn.Module, Any, Any, nn.Module]:
    """The trainer's module, its channel at version 1, a subscriber, and a module that is bound to it."""
    source, module = nn.Linear(64, 64), nn.Linear(64, 64)
    channel = publisher(fill(source, 1), checksum=True)
    channel.publish()
    follower = subscriber(channel)
    follower.bind(module)
    return source, channel, follower, module


def test_the_bound_version_is_verified_beside_the_newest(bound) -> None:
    source, channel, follower, module = bound
    damage(channel, 5)
    channel.publish(fill(source, 2))
    with pytest.raises(ChannelCorrupt, match="Version 1"):
        follower.verify()
    follower.refresh()
    assert follower.verify() == [2]
    assert uniform(module) == 2


def test_a_worker_that_wrote_itself_is_told_so(bound, subscriber) -> None:
    _, channel, follower, module = bound
    with torch.no_grad():
        module.bias[3] = 7
    with pytest.raises(ChannelCorrupt, match="`bias`.*this process wrote there"):
        follower.verify()
    assert subscriber(channel).verify() == [1], "nobody else sees that"


def test_a_cast_channel_sums_what_it_stores(publisher, subscriber) -> None:
    channel = publisher(nn.Linear(300, 300), checksum=True, dtype=torch.bfloat16)
    channel.publish()
    assert subscriber(channel).verify() == [1]


@pytest.mark.parametrize(
    "source", [{}, {"e": torch.zeros(0)}, {"s": torch.tensor(3.0)}], ids=["nothing", "empty", "0-dim"]
)
def test_small_layouts(publisher, subscriber, source) -> None:
    channel = publisher(source, checksum=True)
    channel.publish()
    assert subscriber(channel).verify() == [1]


def test_verify_leaves_no_lease_behind(publisher, subscriber) -> None:
    """Also when it raises: the slots go on being reused."""
    channel = publisher(weights(), checksum=True)
    follower = subscriber(channel)
    for k in range(12):
        channel.publish()
        if k % 2:
            damage(channel, 0)
            with pytest.raises(ChannelCorrupt):
                follower.verify()
        else:
            follower.verify()
        assert follower.stats()["slots_leased"] == 0
    assert channel.stats()["slots"] == 2


def test_without_checksums_or_weights_it_says_so(publisher, subscriber) -> None:
    plain = publisher({"w": torch.zeros(3)})
    plain.publish()
    with pytest.raises(ShmSyncError, match="checksum=True"):
        subscriber(plain).verify()
    with pytest.raises(NothingPublished):
        subscriber(publisher(checksum=True)).verify()
    with pytest.raises(NothingPublished):
        subscriber(publisher({"w": torch.zeros(3)}, checksum=True)).verify()


def test_without_a_hasher_the_publisher_says_what_to_install(monkeypatch) -> None:
    """Before anything is made."""
    monkeypatch.setattr(checksums, "engine", None)
    monkeypatch.setitem(__import__("sys").modules, "xxhash", None)
    with pytest.raises(ShmSyncError, match="pip install xxhash"):
        shmsync.Publisher({"w": torch.zeros(3)}, checksum=True)


def test_sums_are_made_for_the_touched_pieces_only(nothing_left, monkeypatch) -> None:
    """A push of an adapter must not read the whole model. Mutant: sum up everything."""
    fd = segment.create("unit", 4 * PIECE + 4096)
    mapping = segment.map_shared(fd, 0, 4 * PIECE + 4096)
    os.close(fd)
    sums = checksums.Checksums(mapping, 4 * PIECE - 64)
    read: list[tuple[int, int]] = []
    real: Any = sums._digest

    def digest(address: int, nbytes: int) -> list[int]:
        read.append((address - mapping.address, nbytes))
        return real(address, nbytes)

    sums._digest = digest
    sums.update([(0, 10), (PIECE - 1, PIECE + 1), (3 * PIECE, 3 * PIECE), (4 * PIECE - 65, 4 * PIECE - 64)])
    assert read == [(0, 2 * PIECE), (3 * PIECE, PIECE - 64)]
    assert sums.differing() == [(2 * PIECE, 3 * PIECE)], "never summed up"
    sums.update([(2 * PIECE, 3 * PIECE)])
    assert sums.differing() == []
