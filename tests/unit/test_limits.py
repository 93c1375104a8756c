"""Room is asked for before it is taken: every limit is found, the error names it and both numbers.

Mutant: look at the process's own cgroup only, not at its ancestors.
"""

import resource
from pathlib import Path

import pytest
import torch

from shmsync import OutOfSharedMemory, limits
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
