"""The trainer is killed at every step of a push, of giving a slot back, and of its end; the workers go on.

They run whole versions that were published, before and after; and a new trainer takes them over. Mutants: move the row
before the copy (a torn version); leave the exclusive lock to the process (fcntl locks instead of none at its death).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from torch import nn

import shmsync
from shmsync import Publisher, faults
from tests.crash.support import killed
from tests.helpers import probes, workers
from tests.helpers.models import fill, uniform
from tests.helpers.trainers import wait_for

LAYERS = 6


def policy() -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(LAYERS)))


def lead(state: Any) -> str:
    """Be a trainer at version 1."""
    state.source = fill(policy(), 1)
    state.channel = Publisher(state.source, name="trainer")
    state.channel.publish()
    return str(state.channel.handle)


def push_until_killed(state: Any, step: str) -> None:
    """Whole pushes and partial ones, growth and giving back, and an end: somewhere in there is the step."""
    faults.arm(step)
    leases = []
    for number in range(90):
        if number < 5:
            leases.append(shmsync.Subscriber(state.channel.handle).lease())
        elif number == 5:
            leases.clear()
        if number % 3 == 1:
            # With the value that it has already, so that the weights stay of one value.
            state.channel.publish({"0.weight": state.source[0].weight}, partial=True)
        push(state)
    state.channel.close()


def push(state: Any, times: int = 1) -> None:
    for _ in range(times):
        state.channel.publish(fill(state.source, state.channel.version + 1))


def look(state: Any) -> tuple[int, float]:
    """A forward's worth: the version in use and the value of the weights, which must be one."""
    state.subscriber.refresh()
    return state.binding.version, uniform(state.module)


def alive(state: Any) -> bool:
    return state.subscriber.publisher_alive()


def go_over(state: Any, handle: str) -> tuple[int, float]:
    """To a new trainer's channel."""
    state.subscriber.reattach(handle)
    return look(state)


def left(state: Any) -> tuple[int, int]:
    """Descriptors and mappings of segments after leaving."""
    workers.detach(state)
    return len(probes.segment_descriptors()), len(probes.segment_maps())


# Each "nth" was chosen so that the step comes after the workers have attached, and not only at the first push.
STEPS = [
    *("publish.load_rows", "publish.try_exclusive:2", "publish.reserve", "publish.store_slot_version:1"),
    *("publish.store_slot_version:2", "publish.store_slot_version:5", "publish.copy_in:2", "publish.copied_half:2"),
    *("publish.copied_half:3", "publish.copy_over", "publish.unlock:2", "publish.store_row:2", "publish.ring:2"),
    *("give_back.load_rows", "give_back.try_exclusive", "give_back.store_slot_version", "give_back.punch"),
    *("give_back.unlock", "end.close", "end.closed", "end.hidden_data"),
]


@pytest.mark.parametrize("step", STEPS)
def test_workers_go_on(peer, step: str) -> None:
    trainer, crew = peer(), [peer(), peer()]
    handle = trainer.call(lead)
    for worker in crew:
        worker.call(workers.attach, handle, policy)
    trainer.call(push, 2)
    trainer.start(push_until_killed, step)
    while not killed(trainer):
        for worker in crew:
            version, value = worker.call(look)
            assert version >= value >= 1, "a version shows what was published under it or, if partial, before it"
    before = [worker.call(look) for worker in crew]
    assert before[0] == before[1], "both took the last version that was published"
    assert not any(worker.call(alive) for worker in crew)
    other = peer()
    handle = other.call(lead)
    assert [worker.call(go_over, handle) for worker in crew] == [(1, 1.0)] * 2
    assert [worker.call(left) for worker in crew] == [(0, 0)] * 2


def test_every_step_is_killed_at(peer) -> None:
    """No step of a publisher is missing above: these are all that an armed process comes by."""
    trainer = peer()
    trainer.call(lead)
    found = trainer.call(steps_of_a_life)
    assert found == {step.partition(":")[0] for step in STEPS}


def steps_of_a_life(state: Any) -> set[str]:
    faults.arm("nowhere")
    with shmsync.Subscriber(state.channel.handle) as follower:
        leases = [follower.lease()]
        for _ in range(5):
            push(state, 2)
            leases.append(follower.lease())
        for lease in leases:
            lease.close()
    for _ in range(80):
        state.channel.publish({"0.weight": state.source[0].weight}, partial=True)
        push(state, 2)
    state.channel.close()
    return {step for step in faults.steps if step.split(".")[0] in ("publish", "give_back", "end")}


def test_the_environment_arms_a_process(tmp_path) -> None:
    """Read once, at import. Mutant: read another name."""
    code = (
        "import torch, shmsync\n"
        "channel = shmsync.Publisher({'w': torch.zeros(3)})\n"
        "channel.publish(); print(1, flush=True)\n"
        "channel.publish(); print(2, flush=True)\n"
    )
    for armed, expected in (("publish.store_row:2", (-signal.SIGKILL, "1\n")), ("", (0, "1\n2\n"))):
        environment = {**os.environ, "SHMSYNC_CRASH_AT": armed}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stdout) == expected


def test_what_was_left_by_a_wait_is_nothing(peer) -> None:
    """A subscriber that waits for the dead trainer's next version hears of its death."""
    trainer, worker = peer(), peer()
    worker.call(workers.attach, trainer.call(lead), policy)
    worker.start(wait_for_next)
    trainer.kill()
    assert wait_for(worker.done, "the end of the wait")
    assert worker.result() == ("PublisherGone", str(trainer.pid), 1)


def wait_for_next(state: Any) -> tuple[str, str, int]:
    try:
        state.subscriber.wait(2)
    except shmsync.PublisherGone as error:
        text = str(error)
        return type(error).__name__, text.split("pid ")[1].split(",")[0], state.binding.version
    raise AssertionError("version 2 was never published")
