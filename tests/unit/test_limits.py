"""Room is asked for before it is taken: every limit is found, the error names it and both numbers.

Mutant: look at the process's own cgroup only, not at its ancestors.
"""

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shmsync import OutOfSharedMemory, Publisher, Subscriber, limits
from tests.helpers.models import uniform

GIB = 1 << 30
V2, V1 = ("memory__max", "memory__current"), ("memory__limit_in_bytes", "memory__usage_in_bytes")


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    """A tree of three cgroups, the process in the innermost; without limits at first."""
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    folders = [inner, inner.parent, tmp_path]
    monkeypatch.setattr(limits, "_cgroups", lambda: iter(folders))
    return folders


def write(folder: Path, **files: object) -> None:
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize(
    "names", [("memory__max", "memory__current"), ("memory__limit_in_bytes", "memory__usage_in_bytes")]
)
def test_the_limit_of_any_ancestor_counts(cgroups, level, names) -> None:
    for folder in cgroups:
        write(folder, **{names[0]: 4 * GIB, names[1]: 0})
    write(cgroups[level], **{names[0]: GIB, names[1]: GIB - 1000})
    limits.check_growth(1000, "Slot 3")
    with pytest.raises(OutOfSharedMemory, match=rf"Slot 3 needs 1001 bytes.*cgroup {cgroups[level]} leaves 1000"):
        limits.check_growth(1001, "Slot 3")


FOLDERS = {
    "v2": ("0::/user/job\n", ["user/job", "user", ""]),
    "v2, at the root": ("0::/\n", [""]),
    "v1": (
        "7:cpu,cpuacct:/x\n5:memory:/docker/abc\n0::/y\n",
        ["memory/docker/abc", "memory/docker", "memory", "y", ""],
    ),
    "v1, with others": ("3:hugetlb,memory:/a\n", ["memory/a", "memory"]),
    "none of memory": ("3:cpu:/a\n2:name=systemd:/b\n", []),
}


@pytest.mark.parametrize(("text", "expected"), FOLDERS.values(), ids=FOLDERS)
def test_the_folders_of_a_process_are_its_own_and_its_ancestors(monkeypatch, text, expected) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: {"/proc/self/cgroup": text}[str(path)])
    assert [str(folder) for folder in limits._cgroups()] == [str(Path("/sys/fs/cgroup") / name) for name in expected]


def test_no_limit_is_no_limit(cgroups) -> None:
    write(cgroups[0], memory__max="max", memory__current=5 * GIB)
    write(cgroups[1], memory__limit_in_bytes=(1 << 63) - 4096, memory__usage_in_bytes=GIB)
    limits.check_growth(1000, "Slot 0")


def test_page_cache_counts_as_room_but_shared_memory_does_not(cgroups) -> None:
    """The kernel gives up the former before it kills anybody."""
    write(cgroups[0], memory__max=GIB, memory__current=GIB)
    write(cgroups[0], memory__stat="anon 5\nshmem 800\nactive_file 300\ninactive_file 200\ninactive_anon 900")
    limits.check_growth(500, "Slot 0")
    with pytest.raises(OutOfSharedMemory, match="leaves 500"):
        limits.check_growth(501, "Slot 0")


def test_a_cgroup_that_is_over_its_limit_leaves_nothing(cgroups) -> None:
    write(cgroups[0], memory__max=GIB, memory__current=GIB + 5)
    with pytest.raises(OutOfSharedMemory, match="leaves 0"):
        limits.check_growth(1, "Slot 0")


def test_memory_that_the_machine_lacks(monkeypatch) -> None:
    monkeypatch.setattr(limits, "_meminfo", lambda field: {"MemAvailable": 99}[field])
    with pytest.raises(OutOfSharedMemory, match="needs 100 bytes, but MemAvailable leaves 99"):
        limits.check_growth(100, "Slot 0")


def test_the_real_machine_answers() -> None:
    limits.check_growth(4096, "Slot 0")
    with pytest.raises(OutOfSharedMemory):
        limits.check_growth(1 << 59, "Slot 0")


def test_a_slot_for_which_there_is_no_room_changes_nothing(publisher, subscriber, monkeypatch) -> None:
    channel = publisher({"leaf": torch.full((1000,), 1.0)})
    channel.publish()
    follower = subscriber(channel)
    lease = follower.lease()
    channel.publish({"leaf": torch.full((1000,), 2.0)})
    with monkeypatch.context() as patch:
        patch.setattr(limits, "_meminfo", lambda field: 100)
        with pytest.raises(OutOfSharedMemory, match=r"Slot 2 .*needs 4096 bytes"):
            channel.publish({"leaf": torch.full((1000,), 3.0)})
        assert channel.version == follower.seen == 2
        assert uniform(lease.weights) == 1
        with follower.lease() as newest:
            assert uniform(newest.weights) == 2
    assert channel.publish({"leaf": torch.full((1000,), 4.0)}).version > 2
    with follower.lease() as newest:
        assert uniform(newest.weights) == 4


def test_a_file_size_limit_is_named_at_construction(publisher) -> None:
    """The kernel would send SIGXFSZ. Slots are sparse, but the segment's size counts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 25, hard))
    try:
        with pytest.raises(OutOfSharedMemory, match=rf"RLIMIT_FSIZE allows {1 << 25}; .*max_slots="):
            publisher({"leaf": torch.ones(1000)})
        publisher({"leaf": torch.ones(1000)}, max_slots=3).publish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# --- real limits, in other processes


def lead(state: Any, numel: int = 1 << 21) -> None:
    """Be a trainer at version 1, with a lease on it and on the next, so that a push needs a third slot."""
    state.source = {"leaf": torch.full((numel,), 0.0)}
    state.channel = Publisher(state.source, max_subscribers=4)
    state.follower, state.leases = Subscriber(state.channel.handle), []
    for version in (1, 2):
        state.source["leaf"].fill_(version)
        state.channel.publish()
        state.leases.append(state.follower.lease())


def push(state: Any) -> str | None:
    """One more version; the error of it."""
    try:
        state.source["leaf"].fill_(3)
        state.channel.publish()
    except OutOfSharedMemory as error:
        return str(error)
    return None


def look(state: Any) -> tuple[int, int, float]:
    with state.follower.lease() as lease:
        return state.channel.version, lease.version, uniform(lease.weights)


def limit_file_size(state: Any, nbytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))


def size_of_a_channel(state: Any) -> str:
    try:
        lead(state)
    except OutOfSharedMemory as error:
        return str(error)
    return ""


def test_a_file_size_that_is_too_small_for_a_channel(peer) -> None:
    worker = peer()
    worker.call(limit_file_size, 1 << 20)
    text = worker.call(size_of_a_channel)
    assert int(text.split("spans ")[1].split()[0]) > 1 << 23
    assert f"RLIMIT_FSIZE allows {1 << 20}" in text


def test_a_file_size_that_is_too_small_for_another_slot(peer) -> None:
    """The trainer lives, the old version stays, and with the limit gone it goes on. Mutant: try it, and be killed by
    SIGXFSZ where Python does not ignore that."""
    worker = peer()
    worker.call(lead)
    worker.call(limit_file_size, 20 << 20)
    text = worker.call(push)
    assert "Slot 2" in text
    assert "RLIMIT_FSIZE allows 20971520 bytes" in text
    assert worker.call(look) == (2, 2, 2.0)
    worker.call(limit_file_size, resource.RLIM_INFINITY)
    assert worker.call(push) is None
    # The number that failed is not used again.
    assert worker.call(look) == (4, 4, 3.0)


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup of its own below this process's, where that can be made."""
    parent = next(limits._cgroups(), None)
    made = parent / f"shmsync-test-{os.getpid()}" if parent is not None else None
    try:
        made.mkdir()
    except (OSError, AttributeError) as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    if not any((made / name).exists() for name in ("memory.max", "memory.limit_in_bytes")):
        made.rmdir()
        pytest.skip(f"the memory controller is not enabled below {parent}")
    yield made
    made.rmdir()


def test_a_cgroup_that_is_too_small_for_another_slot(peer, cgroup) -> None:
    """Beyond its limit the kernel kills. Mutant: reserve without asking."""
    worker = peer()
    (cgroup / "cgroup.procs").write_text(str(worker.pid))
    worker.call(lead, 1 << 23)  # a fork server's child copies some MB of pages at its every step
    limit = next(path for name in ("memory.max", "memory.limit_in_bytes") if (path := cgroup / name).exists())
    usage = next(path for name in ("memory.current", "memory.usage_in_bytes") if (path := cgroup / name).exists())
    limit.write_text(str(int(usage.read_text()) + (24 << 20)))
    text = worker.call(push)
    assert f"Slot 2 of channel 'publisher-{worker.pid}' needs {32 << 20} bytes, but cgroup {cgroup} leaves " in text
    limit.write_text(str(int(usage.read_text()) + (128 << 20)))
    assert worker.call(look) == (2, 2, 2.0)
    assert worker.call(push) is None
    assert worker.call(look) == (4, 4, 3.0)
    worker.end()


def test_a_limit_below_the_control_segment_is_named(peer) -> None:
    assert "The control segment spans" in peer().call(_publish_under, 4096)


def _publish_under(_: object, nbytes: int) -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))
    with pytest.raises(OutOfSharedMemory) as raised:
        Publisher({"leaf": torch.zeros(8)})
    return str(raised.value)
