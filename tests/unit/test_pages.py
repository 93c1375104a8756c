"""Private pages: every page that this process wrote is found and dropped, and no other.

Mutants: look at the file flag alone; stop before the last, partial page; MADV_DONTNEED for the first page only.
"""

import ctypes
import errno
import os

import numpy as np
import pytest

from shmsync import pages, segment
from shmsync.pages import PrivatePages
from tests.helpers import probes

PAGE = os.sysconf("SC_PAGE_SIZE")
COUNT = 40


@pytest.fixture
def fd(nothing_left):
    fd = segment.create("unit", COUNT * PAGE)
    os.pwrite(fd, b"\1" * COUNT * PAGE, 0)
    yield fd
    os.close(fd)


@pytest.fixture(params=["scan", "read"])
def looker(request, monkeypatch):
    """Both ways to look: the ioctl of Linux 6.7, and reading the page table."""
    looker = PrivatePages()
    if request.param == "read":
        monkeypatch.setattr(PrivatePages, "_scan", no_ioctl)
    elif scan_is_known():
        monkeypatch.setattr(PrivatePages, "_read", no_ioctl)
    yield looker
    looker.close()


def scan_is_known() -> bool:
    """Before Linux 6.7 both parameters test the reading."""
    return tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2]) >= (6, 7)


def no_ioctl(*_args: object) -> None:
    raise OSError(errno.ENOTTY, "Inappropriate ioctl for device")


def content(mapping: segment.Mapping) -> memoryview:
    return memoryview(mapping.buffer).cast("B")


def pages_of(runs: np.ndarray) -> list[int]:
    return sorted({int(offset) // PAGE for offset in runs})


def test_reading_makes_no_page_private(fd, looker) -> None:
    mapping = segment.map_private(fd, 0, COUNT * PAGE)
    assert looker.find(mapping).tolist() == []
    assert bytes(content(mapping)) == b"\1" * COUNT * PAGE
    mapping.populate(segment.MADV_POPULATE_READ)
    assert looker.find(mapping).tolist() == []


@pytest.mark.parametrize("written", [[0], [COUNT - 1], [3, 17], [0, 2, 4, 6, 38]], ids=str)
def test_written_pages_are_found_and_dropped(fd, looker, written) -> None:
    mapping = segment.map_private(fd, 0, COUNT * PAGE)
    bytes(content(mapping))
    for page in written:
        content(mapping)[page * PAGE + 5] = 99
    assert pages_of(looker.find(mapping)) == written
    assert pages_of(looker.drop(mapping)) == written, "drop says what it found"
    assert bytes(content(mapping)) == b"\1" * COUNT * PAGE
    assert looker.find(mapping).tolist() == []


def test_a_run_of_pages_is_found_by_its_first(fd, looker) -> None:
    mapping = segment.map_private(fd, 0, COUNT * PAGE)
    content(mapping)[5 * PAGE : 9 * PAGE] = b"\7" * 4 * PAGE
    assert pages_of(looker.find(mapping))[0] == 5
    looker.drop(mapping)
    assert bytes(content(mapping)) == b"\1" * COUNT * PAGE


def test_the_last_page_counts_also_where_the_mapping_ends_in_it(fd, looker) -> None:
    mapping = segment.map_private(fd, 0, 3 * PAGE + 100)
    content(mapping)[3 * PAGE + 99] = 99
    assert pages_of(looker.find(mapping)) == [3]
    looker.drop(mapping)
    assert content(mapping)[3 * PAGE + 99] == 1


def test_more_runs_than_one_look_reports(nothing_left, looker) -> None:
    """Every other page of some thousand: all of them are dropped."""
    count = 3000
    fd = segment.create("unit", count * PAGE)
    mapping = segment.map_private(fd, 0, count * PAGE)
    for page in range(0, count, 2):
        content(mapping)[page * PAGE] = 99
    assert pages_of(looker.drop(mapping))[:3] == [0, 2, 4]
    assert not any(content(mapping)[:: PAGE // 2])
    os.close(fd)


def test_a_page_written_but_never_in_the_segment_is_found(nothing_left, looker) -> None:
    """A hole: there is no shared page that it could be a copy of."""
    fd = segment.create("unit", 4 * PAGE)
    mapping = segment.map_private(fd, 0, 4 * PAGE)
    content(mapping)[2 * PAGE] = 99
    assert pages_of(looker.find(mapping)) == [2]
    os.close(fd)


def test_a_dropped_page_shows_what_the_segment_has_now(fd, looker) -> None:
    mapping = segment.map_private(fd, 0, COUNT * PAGE)
    content(mapping)[0] = 99
    os.pwrite(fd, b"\2" * PAGE, 0)
    assert content(mapping)[0] == 99
    looker.drop(mapping)
    assert content(mapping)[0] == 2


def test_where_the_kernel_does_not_tell_all_is_dropped(fd, monkeypatch) -> None:
    monkeypatch.setattr(PrivatePages, "_scan", no_ioctl)
    monkeypatch.setattr(PrivatePages, "_read", lambda self, mapping: None)
    looker = PrivatePages()
    mapping = segment.map_private(fd, 0, COUNT * PAGE)
    content(mapping)[7 * PAGE] = 99
    assert looker.drop(mapping) is None
    assert bytes(content(mapping)) == b"\1" * COUNT * PAGE


def test_an_unreadable_page_table_is_no_answer(fd, monkeypatch) -> None:
    """As in a container without /proc/self/pagemap."""
    monkeypatch.setattr(PrivatePages, "_open", no_ioctl)
    assert PrivatePages().find(segment.map_private(fd, 0, PAGE)) is None


def test_a_locked_page_that_cannot_be_dropped_is_an_error(fd, looker) -> None:
    """The mapping would go stale: it must not be used."""
    mapping = segment.map_private(fd, 0, PAGE)
    content(mapping)[0] = 99
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mlock(ctypes.c_void_p(mapping.address), PAGE) == 0
    with pytest.raises(OSError, match="madvise"):
        looker.drop(mapping)
    assert libc.munlock(ctypes.c_void_p(mapping.address), PAGE) == 0
    looker.drop(mapping)
    assert content(mapping)[0] == 1


def test_a_child_reads_its_own_page_table(fd, looker) -> None:
    mapping = segment.map_private(fd, 0, COUNT * PAGE)
    assert looker.find(mapping).tolist() == []
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            content(mapping)[3 * PAGE] = 99
            os.write(writer, str(pages_of(looker.find(mapping))).encode())
        finally:
            os._exit(0)
    os.close(writer)
    assert os.read(reader, 100) == b"[3]"
    os.waitpid(child, 0)
    os.close(reader)
    assert looker.find(mapping).tolist() == []


def test_it_closes_its_descriptor(fd) -> None:
    looker = PrivatePages()
    looker.find(segment.map_private(fd, 0, PAGE))
    opened = looker._fd
    assert os.readlink(f"/proc/self/fd/{opened}").endswith("/pagemap")
    looker.close()
    looker.close()
    assert opened not in probes.descriptors()


def test_the_request_of_the_ioctl_has_the_kernels_size() -> None:
    assert ctypes.sizeof(pages._ScanRequest) == 96
