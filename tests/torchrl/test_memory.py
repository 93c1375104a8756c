"""What a big policy costs with real collectors: messages, and memory in workers and trainer."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tests.helpers import collectors
from tests.helpers.collectors import ask, collect, fill, net_policy, push
from tests.helpers.rpc_worlds import deafen, messages, undeafen, watch_messages
from tests.helpers.trainers import Trainer

NBYTES = 64 * 2**20
big_policy = partial(net_policy, layers=16, size=NBYTES // 4 // 16)


@pytest.fixture(scope="module")
def trainer(start_for_module: Callable[..., Trainer]) -> Trainer:
    """Three workers, at rest after their first batches and three pushes, so that all slots have been mapped."""
    trainer = start_for_module(policy=big_policy, workers=3, frames=12)
    trainer.do(watch_messages)
    for value in (1.0, 2.0, 3.0):
        trainer.do(push, value)
        assert trainer.do(collect).actions == [value]
    return trainer


def anonymous_kb(pid: int) -> int:
    """Memory of its own: what it does not share with a file or a segment."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


def private_of_mapped(collector: Any) -> tuple[int, int]:
    """Of the mappings that hold the policy's parameters: their size in bytes, and what of it is private."""
    wanted = {parameter.data_ptr() for parameter in collector.policy.parameters()}
    nbytes = private = 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            low, high = (int(end, 16) for end in head.split("-"))
            inside = any(low <= address < high for address in wanted)
            nbytes += (high - low) * inside
        elif inside and head in ("Private_Dirty:", "Anonymous:", "Swap:"):
            private += int(line.split()[1]) * 1024
    return nbytes, private


def own_anonymous_kb(collector: Any) -> int:
    return anonymous_kb(os.getpid())


def test_a_worker_has_no_copy_of_its_own(trainer: Trainer) -> None:
    """Its parameters lie in the segment, where under 2 % are private; nor does it keep the storages that it was built
    with. Mutants: bind by copying; leave `collector.policy_weights` with the old storages."""
    for worker in range(3):
        nbytes, private = trainer.do(ask, worker, private_of_mapped)
        assert nbytes >= NBYTES
        assert private < 0.02 * NBYTES
    without = trainer.do(ask, 0, own_anonymous_kb) * 1024
    trainer.do(ask, 0, keep_a_copy)
    assert trainer.do(ask, 0, own_anonymous_kb) * 1024 - without > 0.9 * NBYTES  # the instrument does see a copy
    trainer.do(ask, 0, drop_the_copy)
    assert trainer.do(ask, 0, storages_of_policy_weights) < 0.02 * NBYTES


def keep_a_copy(collector: Any) -> None:
    collector.kept = [parameter.detach().clone() for parameter in collector.policy.parameters()]


def drop_the_copy(collector: Any) -> None:
    del collector.kept


def storages_of_policy_weights(collector: Any) -> int:
    """Bytes that `collector.policy_weights` keeps alive besides the policy's own."""
    held = {p.untyped_storage().data_ptr() for p in collector.policy.parameters()}
    weights = collector.policy_weights
    leaves = weights.values(True, True) if weights is not None else ()
    return sum(leaf.untyped_storage().nbytes() for leaf in leaves if leaf.untyped_storage().data_ptr() not in held)


def test_notifications_are_small(trainer: Trainer) -> None:
    """For 64 MB and three workers that do not answer to the bell: three messages under 512 bytes, none with a tensor.
    Mutant: send the weights along."""
    for worker in range(3):
        trainer.do(ask, worker, deafen)
    trainer.do(messages)
    report = trainer.do(push, 4.0)
    sent = trainer.do(messages)
    assert report.nbytes == NBYTES
    assert [name for name, _, _ in sent] == ["notify"] * 3
    assert max(nbytes for _, nbytes, _ in sent) < 512
    assert [tensors for _, _, tensors in sent] == [0] * 3
    for worker in range(3):
        trainer.do(ask, worker, undeafen)


def test_the_trainer_keeps_a_few_slots_whatever_the_number_of_pushes(trainer: Trainer) -> None:
    """Twenty pushes in three forms: its own memory stays, and so does the number of slots in memory. Mutant: never
    reuse a slot."""
    before, growth = trainer.do(push_often, 20)
    assert before <= 5
    assert growth["slots"] <= 0
    assert growth["anonymous"] < NBYTES / 2


def push_often(world: SimpleNamespace, pushes: int) -> Any:
    def look() -> dict[str, int]:
        return {"anonymous": anonymous_kb(os.getpid()) * 1024, "slots": world.updater._publisher.stats()["slots"]}

    for value in range(3):
        push(world, float(value))
    first = look()
    for value in range(pushes):
        fill(world.policy, float(value))
        weights = [world.policy, TensorDict.from_module(world.policy).data, None][value % 3]
        world.updater.push_weights(weights)
    last = look()
    return first["slots"], {key: last[key] - first[key] for key in last}


def test_a_small_view_of_a_big_tensor_is_sent_as_what_it_is(start_for_module: Callable[..., Trainer]) -> None:
    """8 bytes of a 64 MB storage: 8 bytes are written, and neither messages nor memory grow. Mutant: publish
    storages."""
    trainer = start_for_module(policy=partial(net_policy, size=2), workers=1)
    report, grown = trainer.do(push_a_view)
    assert (report.nbytes, report.notification_nbytes < 512) == (8, True)
    assert grown < NBYTES / 2
    assert trainer.do(ask, 0, collectors.value_of) == 5.0


def push_a_view(world: SimpleNamespace) -> Any:
    push(world, 1.0)
    big = torch.full((NBYTES // 4,), 5.0)
    before = anonymous_kb(os.getpid()) * 1024
    world.updater.push_weights({"module.layers.0": big[7:9]})
    return world.updater.last_push, anonymous_kb(os.getpid()) * 1024 - before
