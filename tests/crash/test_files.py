"""A trainer with its channel in files is killed while it makes, uses or ends it; the next one there clears it away.

Mutants: link CTL before it is locked and DATA before it is written; hide CTL before DATA.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from shmsync import Publisher, Subscriber, faults
from tests.crash.support import killed
from tests.helpers.models import fill
from tests.helpers.trainers import wait_for

STEPS = [
    *("make.ctl", "make.data", "publish.reserve", "publish.copied_half:2", "publish.store_row", "give_back.punch"),
    *("end.close", "end.closed", "end.hidden_data"),
]


def policy() -> nn.Module:
    return nn.Linear(64, 64)


def live_until_killed(state: Any, folder: str, step: str) -> None:
    faults.arm(step)
    os.environ["SHMSYNC_DIR"] = folder
    source = policy()
    with Publisher(source, storage="file") as channel:
        leases = []
        for version in range(1, 90):
            channel.publish(fill(source, version))
            if version < 5:
                leases.append(Subscriber(channel.handle).lease())
            else:
                leases.clear()


@pytest.mark.parametrize("step", STEPS)
def test_the_next_trainer_finds_nothing(peer, publisher, folder: Path, step: str) -> None:
    live = publisher(policy(), storage="file")
    live.publish()
    beside = sorted(folder.iterdir())
    trainer = peer()
    trainer.start(live_until_killed, str(folder), step)
    wait_for(lambda: killed(trainer), "its death")
    publisher(policy(), storage="file").close()
    assert sorted(folder.iterdir()) == beside
    live.publish()
