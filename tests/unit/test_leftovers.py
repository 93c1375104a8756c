"""What dead publishers left in files is removed, and nothing else.

Mutants: go by the pid; go by the name; follow links; remove CTL before DATA; take a lock that can't be seen for none.
"""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from shmsync import Publisher, files, leftovers, wire
from tests.helpers import workers
from tests.helpers.models import fill, uniform

LEAF = {"leaf": torch.zeros(300_000)}
pytestmark = pytest.mark.usefixtures("folder")


def lead(state: Any, pushes: int = 1) -> str:
    """Be a trainer with a channel in files."""
    state.channel = Publisher(LEAF, storage="file")
    for _ in range(pushes):
        state.channel.publish()
    return str(state.channel.handle)


def set_folder(_: Any, folder: Path) -> None:
    os.environ["SHMSYNC_DIR"] = str(folder)


@pytest.fixture
def trainer(peer, folder) -> Any:
    made = peer()
    made.call(set_folder, folder)
    return made


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_dead_channel_goes_and_a_live_one_stays(trainer, folder, publisher) -> None:
    live = publisher(LEAF, storage="file")
    live.publish()
    handle = trainer.call(lead)
    before = names(folder)
    assert leftovers.remove(folder) == []
    assert names(folder) == before
    pid = trainer.pid
    trainer.kill()
    (one,) = leftovers.remove(folder)
    assert (one.pid, one.path.rpartition("shmsync-")[2]) == (pid, handle.split(":")[3])
    assert one.nbytes >= 300_000 * 4
    assert len(names(folder)) == 2
    live.publish()


def test_the_next_publisher_there_clears_it_away(trainer, folder, publisher) -> None:
    trainer.call(lead)
    trainer.kill()
    assert len(names(folder)) == 2
    nonce = publisher(LEAF, storage="file").handle.nonce
    assert names(folder) == [f"shmsync-{nonce}.ctl", f"shmsync-{nonce}.data"]


def test_a_publisher_in_memory_looks_at_no_directory(trainer, folder, publisher) -> None:
    trainer.call(lead)
    trainer.kill()
    publisher(LEAF)
    assert len(names(folder)) == 2


def test_a_channel_whose_pid_belongs_to_somebody_else_now_is_dead(trainer, folder) -> None:
    """Its number says nothing, the lock does."""
    trainer.call(lead)
    trainer.kill()
    (ctl,) = folder.glob("*.ctl")
    with ctl.open("r+b") as file:
        file.seek(wire.offset_of(wire.CTL_HEAD, "pid"))
        file.write(os.getpid().to_bytes(4, "little"))
    assert [one.pid for one in leftovers.remove(folder)] == [os.getpid()]
    assert names(folder) == []


def test_workers_keep_what_was_cleared_away(trainer, folder, peer) -> None:
    source = torch.nn.Linear(30, 30)
    handle, worker = trainer.call(lead_module), peer()
    worker.call(workers.attach, handle, lambda_free_module)
    trainer.kill()
    leftovers.remove(folder)
    assert names(folder) == []
    assert worker.call(value) == 3.0
    assert uniform(fill(source, 3)) == 3.0


def lambda_free_module() -> torch.nn.Module:
    return torch.nn.Linear(30, 30)


def lead_module(state: Any) -> str:
    source = fill(torch.nn.Linear(30, 30), 3)
    state.channel = Publisher(source, storage="file")
    state.channel.publish()
    return str(state.channel.handle)


def value(state: Any) -> float:
    return uniform(state.module)


def dead_ctl(trainer: Any, folder: Path) -> Path:
    """A dead channel's CTL; its DATA is gone."""
    trainer.call(lead)
    trainer.kill()
    next(folder.glob("*.data")).rename(folder / "data")
    return next(folder.glob("*.ctl"))


def test_what_is_not_ours_stays(trainer, folder) -> None:
    """Under a right name: other bytes, a directory, a FIFO, links to a dead channel's file, and copies of it that
    another user or everybody could have written; under other names: anything."""
    ctl = dead_ctl(trainer, folder)
    kept = folder / "kept"
    kept.mkdir()
    ctl = ctl.rename(kept / ctl.name)
    fresh = (folder / f"shmsync-{secrets.token_hex(16)}.ctl" for _ in iter(int, 1))
    next(fresh).write_bytes(b"")
    next(fresh).write_bytes(os.urandom(70_000))
    next(fresh).mkdir()
    os.mkfifo(next(fresh))
    (folder / ctl.name).symlink_to(ctl)
    copied = [next(fresh), folder / "shmsync-tmp.ctl", folder / f"{ctl.name}.old", folder / f"old-{ctl.name}"]
    for path in copied:
        shutil.copy2(ctl, path)  # CTL says another name
    (folder / f"shmsync-{secrets.token_hex(16)}.data").write_bytes(os.urandom(9000))
    shutil.copy2(folder / "data", folder / f"shmsync-{secrets.token_hex(16)}.data")  # DATA says another name
    before = names(folder)
    assert leftovers.remove(folder) == []
    assert names(folder) == before


@pytest.mark.parametrize("how", ["mode", "owner"])
def test_a_dead_channels_file_that_cannot_be_trusted_stays(trainer, folder, how, monkeypatch) -> None:
    ctl = dead_ctl(trainer, folder)
    if how == "mode":
        ctl.chmod(0o666)
    else:
        uid = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    assert leftovers.remove(folder) == []
    assert ctl.exists()


def test_it_can_be_interrupted_anywhere(trainer, folder, monkeypatch) -> None:
    """The next one finishes. Mutant: remove CTL first."""
    trainer.call(lead)
    trainer.kill()
    remove = files.remove

    def remove_and_stop(path: str, fd: int) -> None:
        remove(path, fd)
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "remove", remove_and_stop)
    with pytest.raises(KeyboardInterrupt):
        leftovers.remove(folder)
    monkeypatch.setattr(files, "remove", remove)
    assert len(leftovers.remove(folder)) == 1
    assert names(folder) == []


def test_data_without_ctl_is_dead(trainer, folder) -> None:
    trainer.call(lead)
    trainer.kill()
    next(folder.glob("*.ctl")).unlink()
    (one,) = leftovers.remove(folder)
    assert one.pid is None
    assert one.nbytes >= 300_000 * 4
    assert names(folder) == []


def test_a_directory_that_is_not_there_has_nothing(folder) -> None:
    assert leftovers.remove(folder / "none") == []


def test_ctl_stays_as_long_as_its_data_does(trainer, folder) -> None:
    """Data that can't be trusted is not removed, and without CTL nobody would know what it is."""
    trainer.call(lead)
    trainer.kill()
    data = next(folder.glob("*.data"))
    data.chmod(0o644)
    assert leftovers.remove(folder) == []
    assert len(names(folder)) == 2
    data.chmod(0o600)
    assert len(leftovers.remove(folder)) == 1
