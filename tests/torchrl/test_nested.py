"""What a push to workers with inner processes costs, and that it finds out what has become of them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torchrl.envs.utils import RandomPolicy

import shmsync
from shmsync import PushError, PushTimeout, SubscribersExhausted, listener
from shmsync.torchrl.answers import runs
from shmsync.torchrl.receiver import Receiver
from tests.helpers import collectors, schemes
from tests.helpers.collectors import ask, collect, net_policy, pid_of, push
from tests.helpers.processes import stop
from tests.helpers.rpc_worlds import messages, watch_messages
from tests.helpers.trainers import Trainer, wait_for

Start = Callable[..., Trainer]
NESTED = {"kind": "MultiSyncCollector", "workers": 1, "num_workers_per_collector": 2}
FLAT = {"kind": "Collector", "workers": 1}
TIMEOUT = 10.0


def build(
    world: SimpleNamespace,
    *,
    timeout: float = TIMEOUT,
    notify: str = "rpc",
    max_lag: int | None = None,
    max_workers: int = 256,
    storage: str = "memfd",
    **options: Any,
) -> None:
    limits = {"max_lag": max_lag, "max_workers": max_workers}
    updater = shmsync.RPCWeightUpdater(timeout=timeout, notify=notify, storage=storage, **limits)
    collectors.build(world, updater=updater, **options)


def inner_pids(world: SimpleNamespace) -> list[int]:
    return [line.pid for line in world.updater._publisher.subscribers() if line.worker_id is not None]


def used_by_inner(world: SimpleNamespace) -> list[int]:
    return [line.used for line in world.updater._publisher.subscribers() if line.worker_id is not None]


def pushed(world: SimpleNamespace, values: list[float]) -> list[tuple[Any, ...]]:
    """What each of these pushes has cost, and what it says of worker 0."""
    found = []
    for value in values:
        if isinstance(world.policy, RandomPolicy):
            world.collector.update_policy_weights_()
        else:
            push(world, value)
        report = world.updater.last_push
        worker = report.workers[0]
        costs = (report.nbytes, report.notification_nbytes, report.rpc_nbytes)
        found.append((costs, worker.seen == report.version, worker.via, worker.error))
    return found


def cost_of_pushes(start: Start, options: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    trainer = start(build=build, **options)
    trainer.do(collect)
    trainer.do(pushed, [1.0, 2.0])  # which attach the worker, and find out whether it answers to the bell
    trainer.do(watch_messages)
    found = trainer.do(pushed, [3.0, 4.0, 5.0])
    return found, trainer.do(messages)


def test_a_push_costs_as_many_bytes_as_to_a_collector_without_inner_processes(start: Start) -> None:
    """None but those of the weights, and no message. Mutants: let inner processes not listen; ask their worker."""
    flat, nested = cost_of_pushes(start, FLAT), cost_of_pushes(start, NESTED)
    assert flat == nested
    assert nested == ([((32, 0, 0), True, "map", None)] * 3, [])


def test_a_function_for_a_policy_costs_no_message_either(start: Start) -> None:
    """Mutant: attach as if inner processes followed."""
    found, sent = cost_of_pushes(start, {**NESTED, "policy": random_action})
    assert found == [((0, 0, 0), True, "map", None)] * 3
    assert sent == []


def random_action() -> Any:
    return RandomPolicy(collectors.Corridor().action_spec)


def test_inner_processes_that_rest_take_a_push_at_once(start: Start) -> None:
    """All of them. Mutants: let the first that answers do; let inner processes not listen."""
    trainer = start(build=build, **NESTED)
    for value in (2.0, 3.0):
        trainer.do(collect)
        report = trainer.do(push, value)
        assert (report.workers[0].in_use, report.workers[0].seen) == (report.version, report.version)
        assert trainer.do(used_by_inner) == [report.version] * 2


def test_the_process_around_inner_ones_is_no_version_behind(start: Start) -> None:
    """Where it has a line of the roster. Mutant: let it say what it has been offered."""
    trainer = start(build=build, **NESTED, storage="file")
    for value in (2.0, 3.0):
        trainer.do(push, value)
    trainer.do(init)  # which asks it too
    assert trainer.do(lags_on_the_roster) == [0] * 3


def lags_on_the_roster(world: SimpleNamespace) -> list[int]:
    """As seen from outside, by `python -m shmsync inspect`."""
    return [line.lag for line in world.updater._publisher.subscribers()]


@pytest.mark.parametrize("notify", ["rpc", "memory"])
def test_a_bound_on_the_lag_can_be_kept_by_processes_that_rest(start: Start, notify: str) -> None:
    """torchrl's inner processes rest between two batches. Mutant: let them listen with notify="rpc" only."""
    trainer = start(build=build, **NESTED, notify=notify, max_lag=0)
    trainer.do(collect)
    for value in (2.0, 3.0):
        trainer.do(push, value)
        assert trainer.do(lags) == {0: 0}


def lags(world: SimpleNamespace) -> dict[int, int]:
    return dict(world.updater.lag().workers)


@pytest.mark.parametrize("before", [0, 1])
def test_a_stopped_inner_process_is_named(start: Start, before: int) -> None:
    """And once it goes on, it has the version by itself. Mutants: take the answer of the process around it; that of
    those that have ever answered."""
    trainer = start(build=build, **NESTED, timeout=3.0, factory=None if before else net_policy)
    for _ in range(before):
        trainer.do(push, 2.0)
    trainer.do(ask, 0, pid_of)  # workers start by themselves
    assert len(trainer.do(inner_pids)) == 2
    stopped, other = trainer.do(inner_pids)
    stop(stopped)
    try:
        with pytest.raises(PushTimeout, match=f"its inner processes, pids {stopped}, within 3 s"):
            trainer.do(push, 3.0)
    finally:
        os.kill(stopped, signal.SIGCONT)
    wait_for(lambda: trainer.do(used_by_inner) == [1 + 2 * before] * 2, "both use it")
    report = trainer.do(push, 4.0)
    assert report.workers[0].in_use == report.version
    assert other in trainer.do(inner_pids)


def test_a_killed_worker_is_named_though_its_inner_processes_live(start: Start) -> None:
    """Stopped, they outlive it for as long as the test wants. Mutant: send it a message."""
    trainer = start(build=build, **NESTED)
    trainer.do(push, 2.0)
    inner = trainer.do(inner_pids)
    assert len(inner) == 2
    for pid in inner:
        stop(pid)
    outer = trainer.do(ask, 0, pid_of)
    os.kill(outer, signal.SIGKILL)
    wait_for(lambda: not runs(outer), "the end of the worker")
    trainer.do(watch_messages)
    for _ in range(2):
        begin = time.monotonic()
        with pytest.raises(PushError, match=f"worker 0: .*pid {outer}, has died; start it anew"):
            trainer.do(push, 3.0)
        assert time.monotonic() - begin < TIMEOUT / 2
    assert trainer.do(messages) == []
    assert trainer.do(inner_pids) == inner


def test_a_killed_worker_is_named_though_its_inner_processes_answer(start: Start) -> None:
    """Forked, they go on when it has died, and take every version. Mutant: be content with their answers."""
    trainer = start("fork", build=build, **NESTED)
    trainer.do(push, 2.0)
    inner, outer = trainer.do(inner_pids), trainer.do(ask, 0, pid_of)
    os.kill(outer, signal.SIGKILL)
    wait_for(lambda: not runs(outer), "the end of the worker")
    for value in (3.0, 4.0):
        with pytest.raises(PushError, match=f"worker 0: .*pid {outer}, has died; start it anew") as caught:
            trainer.do(push, value)
        assert "publishes again" not in str(caught.value)
    wait_for(lambda: trainer.do(used_by_inner) == [4] * 2, "both use the last, which no push has waited for")
    for pid in inner:
        os.kill(pid, signal.SIGKILL)


def test_inner_processes_that_have_died_are_named(start: Start) -> None:
    """Without waiting for them. Mutant: wait for the end of the time."""
    trainer = start(build=build, **NESTED)
    trainer.do(push, 2.0)
    first, second = trainer.do(inner_pids)
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: trainer.do(inner_pids) == [second], "its end")
    for _ in range(2):
        begin = time.monotonic()
        with pytest.raises(PushError, match=f"worker 0: .*inner processes, pids {first}, have ended"):
            trainer.do(push, 3.0)
        assert time.monotonic() - begin < TIMEOUT / 2
    with pytest.raises(PushError, match=f"worker 0: .*inner processes, pids {first}, have ended"):
        trainer.do(init)  # by a message, which the process around it answers


def init(world: SimpleNamespace) -> None:
    world.updater.init()


def deaf_policy() -> Any:
    """Of a process that looks at the bell when it is rung, and at no other time; its forwards take a while."""
    listener._LOOK_SECONDS = 1e6
    return net_policy(pause=0.2)


def test_who_was_in_a_forward_is_told_again_when_it_rests(start: Start) -> None:
    """With max_lag=0 a push waits for that. Mutants: nudge no inner processes; report the answers alone."""
    trainer = start(build=build, **NESTED, max_lag=0, frames=4, factory=deaf_policy)
    for delay in (0.05, 0.15, 0.25, 0.35):
        for wait in (True, False):
            assert trainer.do(collect_and_push, delay, wait)
            assert trainer.do(lags) == {0: 0}


def collect_and_push(world: SimpleNamespace, delay: float, wait: bool) -> bool:
    """Whether the report tells what the push has waited for."""
    batch = threading.Thread(target=collect, args=(world,))
    batch.start()
    time.sleep(delay)
    report = push(world, 2.0 + delay, wait=wait)
    batch.join()
    return bool(report.workers[0].in_use == report.version)


@pytest.mark.parametrize("together", [list, tuple])
@pytest.mark.parametrize("kind", ["MultiSyncCollector", "Collector"])
def test_the_same_arguments_for_all_workers_make_no_worker_another(start: Start, kind: str, together: Any) -> None:
    """One dict for both of them, in a list or a tuple. Mutants: write into the user's dicts; take lists alone."""
    trainer = start(build=build_alike, kind=kind, together=together)
    wait_for(lambda: trainer.do(workers_and_versions) == {0: {1}, 1: {1}}, "both workers")  # they start by themselves
    for worker in (0, 1):
        report = trainer.do(push, 2.0 + worker, worker_ids=[worker])
        assert list(report.workers) == [worker]
        assert (report.workers[worker].in_use, report.workers[worker].error) == (report.version, None)
        assert trainer.do(workers_and_versions) == {0: {2}, 1: {1 + 2 * worker}}


def build_alike(world: SimpleNamespace, kind: str, together: Any) -> None:
    given = {"track_policy_version": True}
    build(world, kind=kind, workers=2, collector_kwargs=together([given] * 2))


def workers_and_versions(world: SimpleNamespace) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for line in world.updater._publisher.subscribers():
        if line.worker_id is not None:
            found.setdefault(line.worker_id, set()).add(line.used)
    return found


@pytest.mark.parametrize("storage", ["memfd", "file"])
def test_a_roster_without_room_for_the_process_around_is_room_enough(start: Start, storage: str) -> None:
    """Its line would only show that it lives, which in memory its pid does. Mutant: insist on a line."""
    trainer = start(build=build, **NESTED, max_workers=2, storage=storage)
    trainer.do(push, 2.0)
    report = trainer.do(push, 3.0)
    assert report.workers[0].in_use == report.version


def test_a_killed_worker_is_named_where_pids_say_nothing(start: Start) -> None:
    """By its line, in a channel of files, which other pid namespaces may share. Mutant: no line there either."""
    trainer = start("fork", build=build, **NESTED, storage="file")
    trainer.do(push, 2.0)
    inner, outer = trainer.do(inner_pids), trainer.do(ask, 0, pid_of)
    os.kill(outer, signal.SIGKILL)
    wait_for(lambda: outer not in trainer.do(pids_on_the_roster), "the end of the worker")
    with pytest.raises(PushError, match=f"worker 0: .*pid {outer}, has ended or let go of the channel"):
        trainer.do(push, 3.0)
    for pid in inner:
        os.kill(pid, signal.SIGKILL)


def pids_on_the_roster(world: SimpleNamespace) -> list[int]:
    return [line.pid for line in world.updater._publisher.subscribers()]


def test_processes_around_take_no_room_from_other_workers(start: Start) -> None:
    """One has attached before another's inner processes have started. Mutant: let it have a line."""
    trainer = start(build=build, **{**NESTED, "workers": 2}, max_workers=4)
    for value in (2.0, 3.0):
        report = trainer.do(push, value)
        assert [one.in_use for one in report.workers.values()] == [report.version] * 2


@pytest.mark.parametrize(("method", "storage"), [("forkserver", "memfd"), ("forkserver", "file"), ("fork", "memfd")])
def test_a_scheme_leaves_the_room_to_the_inner_processes(start: Start, method: str, storage: str) -> None:
    """Mutants: attach the process around them before they have started, which in a channel of files takes the last
    line; let it have a line in memory too, which forked ones begin with."""
    trainer = start(method, build=schemes.build_rpc, **NESTED, max_workers=2, storage=storage)
    assert trainer.do(collect).actions[-1] == 7.0
    assert trainer.do(schemes.push, 2.0) == 2
    assert trainer.do(collect, 2).actions == [2.0]


@pytest.mark.parametrize("given", ["model", "context"])
def test_no_room_for_an_inner_process_says_whose(given: str) -> None:
    """Where its policy gets its first values, and where its collector is attached. Mutant: let the subscriber say it,
    which knows no worker."""
    with shmsync.Publisher(net_policy(), max_subscribers=4) as publisher:
        publisher.publish()
        others = [shmsync.Subscriber(publisher.handle) for _ in range(4)]
        receiver = Receiver(str(publisher.handle), 2)
        with pytest.raises(SubscribersExhausted, match=rf"Worker 2, pid {os.getpid()}: All 4 .*max_workers="):
            begin(receiver, given)
        for other in others:
            other.close()


def begin(receiver: Receiver, given: str) -> None:
    receiver.init_on_receiver(**{given: net_policy()})
    receiver.connect()


@pytest.mark.parametrize("notify", ["rpc", "memory"])
def test_a_worker_that_has_lost_an_inner_process_has_confirmed_nothing(start: Start, notify: str) -> None:
    """Whatever the others use, also where nobody is asked. Mutant: tell what the living ones have come to."""
    trainer = start(build=build, **NESTED, notify=notify, max_lag=1)
    for value in (2.0, 3.0):
        trainer.do(push, value)
    first, second = trainer.do(inner_pids)
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: trainer.do(inner_pids) == [second], "its end")
    for value in (4.0, 5.0):
        trainer.do(push_anyhow, value)
        for report in trainer.do(reports):
            assert (report.in_use, report.seen) == (None, None)
    wait_for(lambda: trainer.do(used_by_inner) == [5], "the other one follows")


def push_anyhow(world: SimpleNamespace, value: float) -> None:
    with contextlib.suppress(PushError):
        push(world, value, wait=False)


def reports(world: SimpleNamespace) -> list[Any]:
    return list(world.updater.last_push.workers.values())


def test_update_at_each_batch_does_no_harm(start: Start) -> None:
    """A worker's collector then updates its inner processes before each batch, with nothing. Mutants: be no scheme of
    torchrl's; refuse to send nothing."""
    trainer = start(build=build, **NESTED, collector_kwargs={"update_at_each_batch": True})
    trainer.do(push, 2.0)
    assert trainer.do(collect, 2).actions == [2.0]
    with pytest.raises(Exception, match="inner processes of worker 0 follow the trainer's channel"):
        trainer.do(ask, 0, update_inside)


def update_inside(collector: Any) -> None:
    collector.update_policy_weights_(collector.policy)


def test_another_updater_cannot_take_inner_processes_over(start: Start) -> None:
    """It is told so, and the one that they follow goes on. Mutant: take processes that follow any channel for ones
    that follow this one."""
    trainer = start(build=build, **NESTED)
    trainer.do(push, 2.0)
    with pytest.raises(PushError, match="ChannelError: The inner processes of worker 0 .* can't be taken over"):
        trainer.do(push_by_another)
    report = trainer.do(push, 3.0)
    assert report.workers[0].in_use == report.version
    assert trainer.do(collect).actions == [3.0]


def push_by_another(world: SimpleNamespace) -> None:
    rrefs = world.collector.collector_rrefs
    with shmsync.RPCWeightUpdater(collector_rrefs=rrefs, policy_weights=world.policy, num_workers=1) as other:
        other.push_weights(world.policy)


def test_a_subscriber_of_somebody_else_does_not_answer_for_a_worker(start: Start) -> None:
    """It may have its worker id. Mutant: let all lines with that id count."""
    trainer = start(build=build, **NESTED)
    trainer.do(push, 2.0)
    trainer.do(watch_worker_0)
    report = trainer.do(push, 3.0)
    assert report.workers[0].in_use == report.version


def watch_worker_0(world: SimpleNamespace) -> None:
    world.watching = shmsync.Subscriber(world.updater._publisher.handle, worker_id=0)
