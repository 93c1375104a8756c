"""Segments: sealed, private to the user, found again by number without ever blocking, unmapped with their last view.

Mutants: seal before the size is set; open a remote number without looking what it is; unmap with the Mapping object.
"""

import fcntl
import gc
import os
import signal
import socket
import stat
import sys
from pathlib import Path

import pytest
import torch

from shmsync import ChannelCorrupt, ChannelUnreachable, PublisherGone, segment
from shmsync.layout import build
from shmsync.weights import flatten
from tests.helpers import probes

NBYTES = 4 * 4096


@pytest.fixture
def fd(nothing_left):
    fd = segment.create("unit", NBYTES)
    yield fd
    os.close(fd)


def test_a_segment_is_sealed_private_and_named(fd) -> None:
    info = os.fstat(fd)
    assert stat.S_IMODE(info.st_mode) == 0o600
    assert info.st_size == NBYTES
    assert info.st_blocks == 0, "sparse"
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & segment.SEALS == segment.SEALS
    assert not os.get_inheritable(fd)
    assert os.readlink(f"/proc/self/fd/{fd}") == "/memfd:shmsync-unit (deleted)"


def test_nobody_can_resize_a_segment_or_add_a_seal(fd) -> None:
    """A subscriber's read would be a SIGBUS, a publisher's punch an error."""
    other = segment.reopen(fd, os.O_RDWR)
    for size in (0, NBYTES - 1, NBYTES + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(other, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(other, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(other)


def test_a_failed_creation_leaves_no_descriptor() -> None:
    before = probes.descriptors()
    with pytest.raises((OSError, OverflowError)):
        segment.create("unit", -1)
    assert probes.descriptors().keys() == before.keys()


def test_another_description_reads_the_same_bytes(fd) -> None:
    os.pwrite(fd, b"weights", 100)
    other = segment.open_remote(os.getpid(), fd, os.O_RDONLY)
    assert os.pread(other, 7, 100) == b"weights"
    assert not os.get_inheritable(other)
    os.close(other)


def refused(number: int, error: type[Exception], text: str) -> None:
    before = probes.descriptors()
    with pytest.raises(error, match=text):
        segment.open_remote(os.getpid(), number, os.O_RDWR)
    assert probes.descriptors() == before


def test_a_number_that_is_a_fifo_now_does_not_block() -> None:
    reader, writer = os.pipe()
    signal.alarm(20)  # opening a FIFO for reading waits for a writer
    refused(reader, PublisherGone, "pipe")
    refused(writer, PublisherGone, "pipe")
    signal.alarm(0)
    os.close(reader)
    os.close(writer)


def test_a_number_that_is_something_else_now_is_refused(tmp_path) -> None:
    with socket.socket() as one, open(tmp_path / "file", "w") as other, open("/dev/null") as device:
        for number in (one.fileno(), other.fileno(), device.fileno()):
            refused(number, PublisherGone, f"pid {os.getpid()} closed the channel")


def test_a_closed_number_and_a_dead_process_are_a_publisher_that_has_gone() -> None:
    fd = segment.create("unit", NBYTES)
    os.close(fd)
    refused(fd, PublisherGone, f"pid {os.getpid()}")
    child = os.posix_spawn(sys.executable, [sys.executable, "-c", ""], {})
    os.waitpid(child, 0)
    with pytest.raises(PublisherGone, match=f"pid {child}"):
        segment.open_remote(child, 3, os.O_RDONLY)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW])
def test_a_memfd_that_can_still_shrink_is_refused(seals) -> None:
    fd = os.memfd_create("shmsync-forged", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    refused(fd, ChannelCorrupt, "seal")
    os.close(fd)


def test_somebody_elses_memfd_is_no_segment() -> None:
    fd = os.memfd_create("another", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    refused(fd, PublisherGone, "memfd:another")
    os.close(fd)


def test_a_segment_of_another_user_is_refused(fd, monkeypatch) -> None:
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    refused(fd, ChannelCorrupt, f"uid {uid}")


@pytest.mark.parametrize("call", ["readlink", "open"])
def test_a_process_that_may_not_be_looked_at_is_unreachable(fd, monkeypatch, call) -> None:
    def denied(*_args: object, **_kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, call, denied)
    with pytest.raises(ChannelUnreachable, match=rf"{os.getpid()}.*same user and the same pid namespace"):
        segment.open_remote(os.getpid(), fd, os.O_RDONLY)


def test_what_is_reserved_has_memory_and_what_is_punched_has_none(fd) -> None:
    segment.reserve(fd, 4096, 2 * 4096)
    assert os.fstat(fd).st_blocks * 512 == 2 * 4096
    mapping = segment.map_shared(fd, 4096, 2 * 4096)
    memoryview(mapping.buffer).cast("B")[:] = b"\1" * (2 * 4096)
    segment.punch(fd, 4096, 4096)
    assert os.fstat(fd).st_blocks * 512 == 4096
    assert bytes(mapping.buffer) == b"\0" * 4096 + b"\1" * 4096
    assert os.fstat(fd).st_size == NBYTES


def flags_of(address: int) -> list[str]:
    lines = Path("/proc/self/smaps").read_text().splitlines()
    begin = next(n for n, line in enumerate(lines) if line.startswith(f"{address:x}-"))
    return next(line for line in lines[begin:] if line.startswith("VmFlags:")).split()[1:]


def test_a_publishers_mapping_is_neither_inherited_nor_dumped(fd) -> None:
    mapping = segment.map_shared(fd, 0, NBYTES)
    assert {"sh", "wr", "dc", "dd"} <= set(flags_of(mapping.address))


def test_a_subscribers_mappings_cannot_harm_the_segment(fd) -> None:
    os.pwrite(fd, b"\1" * NBYTES, 0)
    readonly, private = segment.map_readonly(fd, 0, NBYTES), segment.map_private(fd, 0, NBYTES)
    assert "wr" not in flags_of(readonly.address)
    assert "mw" in flags_of(private.address), "may be written"
    assert "sh" not in flags_of(private.address), "but not shared"
    memoryview(private.buffer).cast("B")[:] = b"\2" * NBYTES
    assert os.pread(fd, NBYTES, 0) == b"\1" * NBYTES


def test_words_are_where_they_are_asked_for(fd) -> None:
    mapping = segment.map_shared(fd, 0, NBYTES)
    mapping.words(64, 2)[1] = 1 << 63
    assert os.pread(fd, 8, 72) == (1 << 63).to_bytes(8, "little")
    os.pwrite(fd, (77).to_bytes(8, "little"), 64)
    assert mapping.words(64, 1)[0] == 77


def test_memory_is_unmapped_with_the_last_view_of_it(fd) -> None:
    layout = build(flatten({"a": torch.ones(3), "b": torch.ones(2, 2)}))
    mapping = segment.map_private(fd, 0, 4096)
    a, b = segment.views(mapping.buffer, layout)
    row, word = b[0], mapping.words(0, 1)
    holders = [mapping, a, b, row, word]
    del mapping, a, b, row, word
    while holders:
        assert len(probes.segment_maps()) == 1, "unmapped too early"
        holders.pop()
    assert probes.segment_maps() == []


def test_no_garbage_collection_is_needed_to_unmap(fd) -> None:
    gc.disable()
    try:
        tensors = segment.views(segment.map_private(fd, 0, 4096).buffer, build(flatten({"a": torch.ones(3)})))
        assert len(probes.segment_maps()) == 1
        del tensors
        assert probes.segment_maps() == []
    finally:
        gc.enable()


def test_views_can_be_built_in_inference_mode_and_trained_on_later(fd) -> None:
    layout = build(flatten({"a": torch.ones(3)}))
    with torch.inference_mode():
        (view,) = segment.views(segment.map_private(fd, 0, 4096).buffer, layout)
    assert not view.is_inference()
    assert not view.requires_grad


def test_a_mapping_that_fails_says_why(fd) -> None:
    with pytest.raises(OSError, match="Mapping 1152921504606846976 bytes of shared memory failed"):
        segment.map_private(fd, 0, 1 << 60)
