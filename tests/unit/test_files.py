"""Segments in files: for their user alone, complete when they appear, gone at the end; nothing else is opened.

Mutants: open before looking what it is; follow a symbolic link; link before the owner's lock is held; unlink by name
alone; take a directory in which others can rename.
"""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import pytest
import torch
from torch import nn

from shmsync import (
    ChannelCorrupt,
    ChannelError,
    ChannelUnreachable,
    Handle,
    OutOfSharedMemory,
    Publisher,
    PublisherGone,
    ShmSyncError,
    Subscriber,
    files,
    leftovers,
    places,
)
from tests.helpers import probes, workers
from tests.helpers.models import fill, uniform

LEAF = {"leaf": torch.arange(1000.0)}


def policy() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2))


@pytest.fixture
def channel(folder, publisher) -> Publisher:
    made = publisher(LEAF, storage="file")
    made.publish()
    return made


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_channel_is_two_files_for_its_user_alone(channel, folder) -> None:
    assert names(folder) == [f"shmsync-{channel.handle.nonce}{ending}" for ending in (".ctl", ".data")]
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.stat().st_nlink == 1
    channel.close()
    assert names(folder) == []


@pytest.mark.parametrize("umask", [0, 0o777])
def test_no_umask_opens_it_or_shuts_it(folder, publisher, umask) -> None:
    before = os.umask(umask)
    try:
        publisher(LEAF, storage="file")
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_weights_arrive_as_from_memory(folder, publisher, peer) -> None:
    source = policy()
    channel, worker = publisher(source, storage="file"), peer()
    channel.publish(fill(source, 1))
    worker.call(workers.attach, str(channel.handle), policy)
    for version in range(2, 9):
        channel.publish(fill(source, version))
        assert worker.call(look) == (version, float(version))
    channel.close()
    assert worker.call(look) == (8, 8.0), "its weights stay"


def look(state) -> tuple[int, float]:
    state.subscriber.refresh()
    return state.binding.version, uniform(state.module)


def test_a_handle_finds_it_from_another_pid_namespace(channel) -> None:
    """Where neither pid nor descriptor mean anything; the host must be the same one."""
    handle = channel.handle
    elsewhere = Handle(1, 7, handle.nonce, handle.epoch, handle.host, handle.boot_id, "4026000000", handle.path)
    with Subscriber(str(elsewhere)) as follower, follower.lease() as lease:
        assert torch.equal(lease.weights["leaf"], LEAF["leaf"])
    far = Handle(1, 7, handle.nonce, handle.epoch, "far", "another-boot", handle.pid_namespace, handle.path)
    with pytest.raises(ChannelUnreachable, match="another host"):
        Subscriber(far)


@pytest.mark.parametrize("name", ["with:colon", "with space", "ünï", "%41"])
def test_any_directory_survives_the_handles_text(folder, publisher, monkeypatch, name) -> None:
    (folder / name).mkdir(mode=0o700)
    monkeypatch.setenv("SHMSYNC_DIR", str(folder / name))
    channel = publisher(LEAF, storage="file")
    channel.publish()
    text = str(channel.handle)
    assert Handle.parse(text) == channel.handle
    assert text.isascii()
    with Subscriber(text) as follower:
        assert follower.seen == 1


def test_the_default_directory_is_that_of_posix_shared_memory(monkeypatch) -> None:
    monkeypatch.delenv("SHMSYNC_DIR")
    assert files.folder() == Path("/dev/shm")


@pytest.fixture(autouse=True)
def set_variable(folder) -> None:
    """Every test here has a directory of its own."""


# --- what must not be opened


def replaced(channel: Publisher, folder: Path, ending: str) -> Path:
    """The path of a channel's file, which has another name now."""
    path = folder / f"shmsync-{channel.handle.nonce}{ending}"
    path.rename(folder / f"aside{ending}")
    return path


@pytest.mark.parametrize("ending", [".ctl", ".data"])
def test_a_symbolic_link_is_refused(channel, folder, ending) -> None:
    path = replaced(channel, folder, ending)
    path.symlink_to(folder / f"aside{ending}")
    refused(channel, ChannelCorrupt, "regular file", ending)


@pytest.mark.parametrize("ending", [".ctl", ".data"])
def test_a_fifo_is_refused_without_waiting_for_its_writer(channel, folder, ending) -> None:
    os.mkfifo(replaced(channel, folder, ending), 0o600)
    signal.alarm(20)
    refused(channel, ChannelCorrupt, "regular file", ending)
    signal.alarm(0)


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o606, 0o700, 0o400])
def test_a_file_that_others_may_use_is_refused(channel, folder, mode) -> None:
    (folder / f"shmsync-{channel.handle.nonce}.ctl").chmod(mode)
    refused(channel, ChannelCorrupt, f"{mode:04o}", ".ctl")


def test_another_users_file_is_refused(channel, monkeypatch) -> None:
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    refused(channel, ChannelCorrupt, f"uid {uid}", ".ctl")


@pytest.mark.parametrize(("kind", "text"), [("link", "symbolic links"), ("open to all", "0666"), ("fifo", "regular")])
def test_what_comes_after_the_look_is_not_opened(channel, folder, monkeypatch, kind, text) -> None:
    """Between lstat and open."""
    path = replaced(channel, folder, ".ctl")
    (folder / "aside.ctl").rename(path)
    looked = os.lstat

    def and_then_replaced(which: str, **options: int) -> os.stat_result:
        info = looked(which, **options)
        if which == str(path):
            path.rename(folder / "aside.ctl")
            if kind == "link":
                path.symlink_to(folder / "aside.ctl")
            elif kind == "fifo":
                os.mkfifo(path, 0o600)
            else:
                path.touch()
                path.chmod(0o666)
        return info

    monkeypatch.setattr(os, "lstat", and_then_replaced)
    with pytest.raises(ChannelCorrupt, match=text):
        files.open_file(str(path), os.O_RDONLY)


def refused(channel: Publisher, error: type[Exception], text: str, ending: str) -> None:
    opening = {
        ".ctl": lambda: places.open_ctl(channel.handle, os.O_RDWR),
        ".data": lambda: Subscriber(channel.handle).lease(),
    }
    with pytest.raises(error, match=text):
        opening[ending]()


def test_a_file_that_is_gone_is_a_publisher_that_has_gone(channel, folder) -> None:
    handle = channel.handle
    channel.close()
    with pytest.raises(PublisherGone, match=str(folder)):
        Subscriber(handle)


def test_a_directory_that_is_not_here_is_unreachable(channel) -> None:
    here = channel.handle
    there = Handle(1, 7, here.nonce, here.epoch, here.host, here.boot_id, "4026000000", "/dev/shm/not-shared/shmsync-0")
    with pytest.raises(ChannelUnreachable, match="/dev/shm/not-shared"):
        Subscriber(there)


# --- directories


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o707])
def test_a_directory_in_which_others_can_rename_is_refused(folder, mode) -> None:
    folder.chmod(mode)
    if mode & 0o022:
        with pytest.raises(ChannelError, match="SHMSYNC_DIR"):
            Publisher(LEAF, storage="file")
    folder.chmod(mode | stat.S_ISVTX)
    Publisher(LEAF, storage="file").close()


def test_a_directory_of_another_user_is_refused(folder, monkeypatch) -> None:
    uid = folder.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: uid + 1000)
    if uid:
        with pytest.raises(ChannelError, match=f"uid {uid}"):
            files.check_folder(folder)
        return
    files.check_folder(folder)  # root's are everybody's
    os.chown(folder, 1234, -1)
    with pytest.raises(ChannelError, match="uid 1234"):
        files.check_folder(folder)
    os.chown(folder, 0, -1)


@pytest.mark.parametrize("what", ["missing", "file"])
def test_what_is_no_directory_is_refused(folder, monkeypatch, what) -> None:
    if what == "file":
        (folder / what).touch()
    monkeypatch.setenv("SHMSYNC_DIR", str(folder / what))
    with pytest.raises(ChannelError, match=what):
        Publisher(LEAF, storage="file")


def test_a_file_system_without_nameless_files_is_an_error_with_advice(monkeypatch) -> None:
    monkeypatch.setenv("SHMSYNC_DIR", "/proc")
    with pytest.raises(ChannelError, match="SHMSYNC_DIR"):
        Publisher(LEAF, storage="file")


def test_another_storage_is_refused() -> None:
    with pytest.raises(ShmSyncError, match="memfd.*file.*'disk'"):
        Publisher(LEAF, storage="disk")


# --- room


def test_no_room_is_an_error_with_needed_and_free_bytes_and_path(folder, publisher, monkeypatch) -> None:
    channel = publisher(LEAF, storage="file")
    channel.publish()
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((4096, 1024, 9, 1, 1, 9, 9, 9, 0, 255)))
    with pytest.raises(OutOfSharedMemory, match=rf"needs 4096 bytes in {folder}, but 1024 are free"):
        channel.publish()
    assert channel.version == 1


# --- the end


def test_the_files_of_another_channel_are_not_taken_for_ones_own(channel, folder, publisher) -> None:
    """What was put in the place of a file is left there. Mutant: unlink by name."""
    path = replaced(channel, folder, ".ctl")
    path.write_text("somebody else's")
    channel.close()
    assert names(folder) == sorted(["aside.ctl", path.name])


def test_a_forked_child_leaves_them_alone(channel, folder) -> None:
    child = os.fork()
    if not child:
        channel.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert len(names(folder)) == 2
    channel.publish()


def test_a_channel_without_weights_is_one_file(folder, publisher) -> None:
    channel = publisher(storage="file")
    assert names(folder) == [f"shmsync-{channel.handle.nonce}.ctl"]
    with Subscriber(channel.handle) as follower:
        assert follower.seen == 0
        channel.publish(LEAF)
        assert follower.seen == 1
    channel.close()
    assert names(folder) == []


def test_a_failed_beginning_leaves_nothing(folder, monkeypatch) -> None:
    def fails(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "show", fails)
    with pytest.raises(KeyboardInterrupt):
        Publisher(LEAF, storage="file")
    assert names(folder) == []


def test_it_is_found_only_when_it_is_locked(folder, publisher, monkeypatch) -> None:
    """Else another publisher that starts just then would clear it away. Mutant: link first."""
    show, seen = files.show, []

    def show_and_clear(fd: int, path: str) -> None:
        show(fd, path)
        seen.append(leftovers.remove(folder))

    monkeypatch.setattr(files, "show", show_and_clear)
    channel = publisher(LEAF, storage="file")
    channel.publish()
    assert seen == [[], []]
    assert len(names(folder)) == 2


def test_an_end_that_cannot_remove_its_files_is_an_end_all_the_same(channel, folder, monkeypatch, caplog) -> None:
    """Its lock and descriptors go, so that the next one there can clear it away. Mutant: let the error out."""

    def fails(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(files, "remove", fails)
        channel.close()
    assert "its .data file stays" in caplog.text
    assert len(names(folder)) == 2
    assert len(leftovers.remove(folder)) == 1
    assert names(folder) == []


def test_a_file_system_without_a_limit_has_room(channel, monkeypatch) -> None:
    """A tmpfs with size=0 has no numbers. Mutant: take its 0 for a number."""
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255)))
    channel.publish()


def test_a_path_that_is_too_long_is_refused_at_once(folder, monkeypatch) -> None:
    """Mutant: find out when it is to be removed."""
    long = folder
    while len(os.fsencode(long)) < 4055:
        long = long / ("x" * min(200, 4056 - len(os.fsencode(long)) - 1))
    monkeypatch.setattr(files, "check_folder", lambda where: None)
    monkeypatch.setenv("SHMSYNC_DIR", str(long))
    with pytest.raises(ChannelError, match="shorter than 4096 bytes"):
        Publisher(LEAF, storage="file")


def test_a_directory_that_is_not_utf8_has_a_handle(folder, publisher, monkeypatch) -> None:
    raw = os.fsencode(folder) + b"/\xff\xfe"
    os.mkdir(raw, 0o700)
    monkeypatch.setenv("SHMSYNC_DIR", os.fsdecode(raw))
    channel = publisher(LEAF, storage="file")
    channel.publish()
    with Subscriber(str(channel.handle)) as follower:
        assert follower.seen == 1


def test_a_failed_definition_leaves_no_descriptor(folder, publisher, monkeypatch) -> None:
    channel = publisher(storage="file")
    before = probes.descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", fail_to_link)
        with pytest.raises(OSError, match="Too many"):
            channel.publish(LEAF)
    assert probes.descriptors().keys() == before.keys()
    channel.publish(LEAF)
    assert channel.version == 1


def fail_to_link(*_: object, **__: object) -> None:
    raise OSError(24, "Too many open files")
