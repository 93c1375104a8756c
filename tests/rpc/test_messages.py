"""What travels by RPC: small messages without tensors, whatever the size of the policy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.rpc_worlds import everywhere, messages, own, push, updater, watch_messages, weights_of
from tests.helpers.trainers import Trainer

SIZES = {"1 KB": (256,), "64 MB": (8 * 2**20, 8 * 2**20)}


@pytest.fixture(autouse=True)
def watched(trainer: Trainer) -> None:
    trainer.do(watch_once)


def watch_once(world: SimpleNamespace) -> None:
    if not hasattr(world, "messages"):
        watch_messages(world)
    world.messages.clear()


def push_twice(world: SimpleNamespace, sizes: tuple[int, ...], **options: Any) -> Any:
    """The messages that the first push and the second push of such a policy sent, and what the second one reported."""
    own(world, sizes=sizes)
    with updater(world, **options):
        push(world, 1.0)
        first = messages(world)
        report = push(world, 2.0)
        second = messages(world)
        assert everywhere(world, weights_of) == [(2.0 if options.get("notify") != "memory" else 1.0,) * 2] * 3
        return first, second, report.nbytes, report.notification_nbytes


@pytest.mark.parametrize("size", SIZES)
def test_a_notification_is_small_whatever_the_policy(trainer: Trainer, size: str) -> None:
    """Under 512 bytes and no tensor, one for each worker; the report says how many bytes they were. Attaching takes one
    small message too. Mutant: send the weights along."""
    first, second, nbytes, reported = trainer.do(push_twice, SIZES[size])
    assert nbytes == 4 * sum(SIZES[size])
    assert [name for name, _, _ in first] == ["last_version"] * 3 + ["attach"] * 3
    assert [name for name, _, _ in second] == ["notify"] * 3
    assert [tensors for _, _, tensors in second] == [0] * 3
    assert max(sent for _, sent, _ in second) < 512
    assert sum(sent for _, sent, _ in second) == reported
    assert max(sent for _, sent, _ in first) < 2048


def test_messages_are_as_big_for_64_mb_as_for_1_kb(trainer: Trainer) -> None:
    """Mutant: send the number of bytes, or the layout, along."""
    small, big = (trainer.do(push_twice, SIZES[size])[1] for size in SIZES)
    assert {sent for _, sent, _ in small} == {sent for _, sent, _ in big}


def test_with_notify_memory_nothing_is_sent_after_attach(trainer: Trainer) -> None:
    """Mutant: notify all the same."""
    first, second, _, reported = trainer.do(push_twice, SIZES["1 KB"], notify="memory")
    assert [name for name, _, _ in first] == ["last_version"] * 3 + ["attach"] * 3
    assert (second, reported) == ([], 0)


def test_workers_that_are_not_addressed_get_no_message(trainer: Trainer) -> None:
    """Mutant: notify everybody."""
    assert trainer.do(push_to_one, 1) == ["notify"]


def push_to_one(world: SimpleNamespace, worker: int) -> list[str]:
    own(world)
    with updater(world):
        push(world, 1.0)
        messages(world)
        push(world, 2.0, worker_ids=[worker])
        return [name for name, _, _ in messages(world)]
