"""C24: SIGKILL of a trainer with two workers attached leaves nothing; live channels and other files are untouched.

Mutants: the files of a dead run are found by its pid; a file that only has the name is removed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shmsync import Publisher, survey
from tests.helpers import probes, workers
from tests.helpers.models import fill, uniform

NBYTES = 4 * (512 * 512 + 512)


def policy() -> nn.Module:
    return nn.Linear(512, 512)


def lead(state: Any, storage: str, folder: Path) -> str:
    os.environ["SHMSYNC_DIR"] = str(folder)
    state.channel = Publisher(fill(policy(), 4), storage=storage)
    state.channel.publish()
    return str(state.channel.handle)


def value(state: Any) -> float:
    return uniform(state.module)


def left(state: Any) -> tuple[int, int, int]:
    workers.detach(state)
    return len(probes.segment_descriptors()), len(probes.segment_maps()), probes.shared_nbytes()


@pytest.mark.parametrize("storage", ["memfd", "file"])
def test_nothing_is_left(storage, folder, peer, publisher) -> None:
    live = publisher(fill(policy(), 1), storage=storage)
    live.publish()
    foreign = folder / f"shmsync-{'0' * 32}.ctl"
    foreign.write_text("somebody else's")
    before = sorted(folder.iterdir())
    trainer, crew = peer(), [peer(), peer()]
    handle = trainer.call(lead, storage, folder)
    for worker in crew:
        worker.call(workers.attach, handle, policy)
    pid = trainer.pid
    assert [one.pid for one in survey.handles(pid)] == [pid]
    trainer.kill()
    assert survey.handles(pid) == []
    assert [worker.call(value) for worker in crew] == [4.0, 4.0], "they keep their weights"
    assert [worker.call(left) for worker in crew] == [(0, 0, 0)] * 2
    publisher({"next": torch.zeros(1)}, storage="file").close()
    assert sorted(folder.iterdir()) == before
    assert foreign.read_text() == "somebody else's"
    live.publish()
    assert survey.look(live.handle, 0.0).version == 2
