"""The command line, against real channels: what it shows is there, and a wrong target is one line and exit 2.

Mutants: list the descriptors of workers as channels; count slots without memory; let an error of the tree out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import shmsync
from shmsync import Publisher, ShmSyncError, cli, doctor
from tests.helpers import workers
from tests.helpers.models import fill


@pytest.fixture(params=["rich", "plain"])
def look(request, monkeypatch) -> str:
    """With rich if it is installed, and without."""
    if request.param == "plain":
        for name in ("rich.console", "rich.table"):
            monkeypatch.setitem(sys.modules, name, None)
    return request.param


def policy() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2))


@pytest.fixture
def channel(publisher) -> Any:
    """At version 3."""
    source = policy()
    made = publisher(source, name="policy")
    for version in range(1, 4):
        made.publish(fill(source, version))
    return made


def told(capsys, *arguments: str) -> Any:
    assert cli.main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_ls_shows_the_live_channels_of_their_owners(channel, publisher, peer, capsys) -> None:
    """Not a second time for each worker that has them open, and not those that were closed."""
    worker = peer()
    worker.call(workers.attach, str(channel.handle), policy, 5)
    publisher({"w": torch.zeros(3)}).close()
    (found,) = [one for one in told(capsys, "ls") if one["pid"] in (os.getpid(), worker.pid)]
    assert (found["pid"], found["version"], found["alive"], found["checksum"]) == (os.getpid(), 3, True, False)
    assert found["handle"] == str(channel.handle)
    assert found["nbytes"] >= channel.stats()["nbytes"]
    assert len(found["slots"]) == channel.stats()["slots"]
    (line,) = found["subscribers"]
    assert (line["pid"], line["worker_id"], line["used"]) == (worker.pid, 5, 3)
    assert [slot["pids"] for slot in found["slots"] if slot["version"] == 3] == [[worker.pid]]


def test_ls_after_the_end_shows_nothing(channel, capsys) -> None:
    channel.close()
    assert [one for one in told(capsys, "ls") if one["pid"] == os.getpid()] == []


def test_the_tables_name_what_is_there(channel, peer, capsys, look) -> None:
    worker = peer()
    worker.call(workers.attach, str(channel.handle), policy, 5)
    assert cli.main(["ls"]) == 0
    assert str(os.getpid()) in capsys.readouterr().out
    assert cli.main(["inspect", str(os.getpid())]) == 0
    text = capsys.readouterr().out
    for expected in ("version 3", "0.weight", "[64, 64]", "torch.float32", "16.0 KiB", str(worker.pid), "subscriber-"):
        assert expected in text


def test_inspect_takes_a_handle_too(channel, capsys) -> None:
    found = told(capsys, "inspect", str(channel.handle))
    assert [leaf["keys"] for leaf in found["layout"]] == [["0.weight"], ["0.bias"], ["1.weight"], ["1.bias"]]
    assert found["layout"][1] == {"keys": ["0.bias"], "dtype": "torch.float32", "shape": [64], "nbytes": 256}


def test_a_channel_without_weights_can_be_looked_at(publisher, capsys) -> None:
    publisher()
    (found,) = [one for one in told(capsys, "ls") if one["pid"] == os.getpid()]
    assert (found["version"], found["nbytes"], found["slots"]) == (0, 0, [])
    assert cli.main(["inspect", str(os.getpid())]) == 0


@pytest.mark.parametrize("command", ["inspect", "verify"])
@pytest.mark.parametrize("target", ["1", "99999999", "nonsense", "shmsync1:1:2:zz"])
def test_a_wrong_target_is_one_line_and_exit_2(command, target, capsys) -> None:
    assert cli.main([command, target]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("shmsync: ")


def test_verify_compares_where_there_are_checksums(publisher, channel, capsys) -> None:
    summed = publisher({"w": torch.zeros(1000)}, checksum=True)
    summed.publish()
    answers = told(capsys, "verify", str(os.getpid()))
    assert sorted((answer["checksums"], answer["versions"]) for answer in answers) == [("none", [3]), ("right", [1])]
    store = summed._store
    os.pwrite(store.fd, b"\1", store.head.slot_offset(store.writer.newest & 0xFFFF))
    assert cli.main(["verify", str(summed.handle)]) == 1
    assert "Version 1" in capsys.readouterr().err


def test_top_shows_rates(channel, capsys, monkeypatch) -> None:
    """Between two looks the channel goes on by two versions."""
    monkeypatch.setattr(cli.time, "sleep", lambda seconds: [channel.publish(), channel.publish()])
    (rate,) = [one for one in told(capsys, "top", "--count", "1", "--seconds", "2") if one["pid"] == os.getpid()]
    assert (rate["versions_per_second"], rate["version"], rate["subscribers"]) == (1.0, 5, 0)


def test_doctor_finds_this_machine_fit(capsys) -> None:
    found = told(capsys, "doctor")
    assert {finding["what"]: finding["state"] for finding in found}["channel"] == "ok"
    assert "FAILS" not in [finding["state"] for finding in found]


def test_doctor_says_what_fails_and_exits_1(capsys, monkeypatch) -> None:
    """Mutant: exit by whether something is slow."""

    def no_memfd(*_args: object, **_options: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(doctor, "Publisher", no_memfd)
    assert cli.main(["doctor"]) == 1
    assert "Function not implemented" in capsys.readouterr().out


def test_doctor_without_extension_or_futex_is_slow_but_fit(capsys, monkeypatch) -> None:
    monkeypatch.setattr(doctor.copying, "has_extension", False)
    monkeypatch.setattr(doctor.bell, "has_futex", False)
    states = {finding["what"]: finding["state"] for finding in told(capsys, "doctor")}
    assert (states["extension"], states["futex"]) == ("slow", "slow")


def test_a_failure_while_looking_is_exit_1_without_a_traceback(capsys, monkeypatch) -> None:
    def broken() -> None:
        raise ShmSyncError("broken")

    monkeypatch.setattr(cli, "_surveys", broken)
    assert cli.main(["ls"]) == 1
    assert capsys.readouterr().err == "shmsync: broken\n"


def test_it_runs_as_a_module() -> None:
    run = [sys.executable, "-m", "shmsync", "inspect", "nonsense"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


# --- channels in files


def files_channel(publisher) -> Any:
    source = policy()
    made = publisher(source, storage="file")
    made.publish(fill(source, 1))
    return made


def test_ls_and_inspect_show_a_channel_in_files(folder, publisher, capsys) -> None:
    made = files_channel(publisher)
    (found,) = [one for one in told(capsys, "ls") if one["pid"] == os.getpid()]
    assert (found["version"], found["alive"]) == (1, True)
    path = next(folder.glob("*.ctl"))
    for target in (
        str(path),
        str(path.with_suffix(".data")),
        str(path.with_suffix("")),
        str(made.handle),
        found["handle"],
    ):
        assert told(capsys, "inspect", target)["version"] == 1


@pytest.mark.parametrize("target", ["./nothing", "/dev/null", "/dev/shm", "/proc/self/mem"])
def test_a_path_that_is_no_channel_is_a_wrong_target(folder, target, capsys) -> None:
    assert cli.main(["inspect", target]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("shmsync: no channel's file: ")


def test_looks_at_no_channel_at_all_say_so(capsys, monkeypatch) -> None:
    monkeypatch.setattr(cli, "_surveys", list)
    for arguments in (["ls"], ["top", "--count", "1", "--seconds", "0.01"]):
        assert cli.main(arguments) == 0
        assert capsys.readouterr().out == "no live channel of this user\n"
    assert told(capsys, "ls") == []


def test_the_version_is_that_of_the_package(capsys) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"shmsync {shmsync.__version__}\n"


def lead_in_files(state: Any, where: str) -> None:
    os.environ["SHMSYNC_DIR"] = where
    state.channel = Publisher(policy(), storage="file")
    state.channel.publish()


def test_gc_removes_dead_channels_and_says_which(folder, publisher, peer, capsys, look) -> None:
    live = files_channel(publisher)
    trainer = peer()
    trainer.call(lead_in_files, str(folder))
    assert told(capsys, "gc") == []
    pid = trainer.pid
    trainer.kill()
    assert [one["pid"] for one in told(capsys, "ls") if one["pid"] in (pid, os.getpid())] == [os.getpid()]
    assert cli.main(["gc", "--dir", str(folder)]) == 0
    out = capsys.readouterr().out
    assert str(folder) in out
    assert str(pid) in out
    assert told(capsys, "gc") == []
    assert cli.main(["gc"]) == 0
    assert capsys.readouterr().out == f"nothing to remove in {folder}\n"
    assert len(list(folder.iterdir())) == 2
    live.publish()


def test_gc_in_no_directory_is_a_wrong_target(capsys) -> None:
    assert cli.main(["gc", "--dir", "/nowhere"]) == 2
    assert capsys.readouterr().err == "shmsync: there is no directory /nowhere\n"


def test_doctor_says_whether_files_can_be_made(folder, capsys, monkeypatch) -> None:
    states = {finding["what"]: finding for finding in told(capsys, "doctor")}
    assert states["file storage"]["state"] == "ok"
    monkeypatch.setenv("SHMSYNC_DIR", "/nowhere")
    states = {finding["what"]: finding for finding in told(capsys, "doctor")}
    assert states["file storage"]["state"] == "none"
    assert "/nowhere" in states["file storage"]["text"]


@pytest.mark.parametrize("target", ["²", "9" * 5000, "", ":", "/", "shmsync1:/"])
def test_a_strange_target_is_one_line_and_exit_2(target, capsys) -> None:
    assert cli.main(["inspect", target]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "x"])
def test_seconds_that_cannot_be_meant_are_refused(seconds, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["top", "--seconds", seconds])
    assert "--seconds" in capsys.readouterr().err


def test_names_are_shown_as_they_are(publisher, subscriber, capsys, look) -> None:
    """Mutant: let rich read them as markup."""
    channel = publisher({"b[bold]x": torch.zeros(1), "c[/red]": torch.zeros(1), "é": torch.zeros(1)})
    channel.publish()
    subscriber(channel, name="w[dim]1[/pool]")
    assert cli.main(["inspect", str(channel.handle)]) == 0
    out = capsys.readouterr().out
    for expected in ("b[bold]x", "c[/red]", "é", "w[dim]1[/pool]"):
        assert expected in out
