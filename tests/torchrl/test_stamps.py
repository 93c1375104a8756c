"""The version on each step: torchrl's entries before and after it, and ``("collector", "policy_version")``.

The weights of version v are all v, and a step shows its forward's weights: so a wrong stamp shows. What happens while
pushes go on without pause is in test_versions.py.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torchrl.collectors import Collector
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from torchrl.envs import EnvBase, SerialEnv, StepCounter, TransformedEnv

import shmsync
from shmsync import remote
from shmsync.torchrl import stamps
from shmsync.torchrl.collector import attachment
from shmsync.torchrl.receiver import Receiver
from shmsync.torchrl.staleness import measure, summary
from tests.helpers import collectors
from tests.helpers.collectors import Corridor, ask, collect, fill, net_policy, push
from tests.helpers.trainers import Trainer

Start = Callable[..., Trainer]
FRAMES = 12
ENTRIES = (("collector", "policy_version"), "policy_version", ("next", "policy_version"))


def serial_env() -> EnvBase:
    return TransformedEnv(SerialEnv(3, Corridor))


def ending_env() -> EnvBase:
    return TransformedEnv(Corridor(), StepCounter(max_steps=5))


class Alone:
    """A collector in this process, with the channel that it follows; a push happens before each third step."""

    def __init__(self, env: Any = Corridor, pushing: bool = True, **options: Any) -> None:
        self.policy = net_policy(value=1.0)
        self.publisher = shmsync.Publisher(self.policy)
        self.push()
        receiver = Receiver(str(self.publisher.handle), 0, stamped=True)
        self.collector = Collector(
            env,
            net_policy(value=-1.0),
            frames_per_batch=FRAMES,
            total_frames=FRAMES * 1000,
            weight_recv_schemes={"policy": receiver},
            track_policy_version=True,
            auto_register_policy_transforms=False,
            **options,
        )
        if pushing:
            step = self.collector.env.step_and_maybe_reset
            self.collector.env.step_and_maybe_reset = partial(self._step, step)
        self.steps = 0

    def _step(self, step: Callable[..., Any], *args: Any) -> Any:
        """After the forward, before the environment's step: where a tracker that is set at the switch goes wrong."""
        self.steps += 1
        if self.steps % 3 == 0:
            self.push()
            remote.notify(self.publisher.handle.nonce, 0, self.publisher.version)
        return step(*args)

    def push(self) -> int:
        fill(self.policy, self.publisher.version + 1)
        return self.publisher.publish(self.policy).version

    def close(self) -> None:
        self.collector.shutdown()
        self.publisher.close()


@pytest.fixture
def alone() -> Iterator[Callable[..., Alone]]:
    made: list[Alone] = []

    def make(**options: Any) -> Alone:
        made.append(Alone(**options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def stamped(data: TensorDictBase) -> list[list[float]]:
    """What each of the entries says, and what the forwards used, by step."""
    return [data[key].flatten().tolist() for key in (*ENTRIES, "low")]


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "of a SerialEnv": {"env": serial_env},
    "with episodes that end": {"env": ending_env},
    "with a limit of frames per trajectory": {"max_frames_per_traj": 5},
    "without buffers": {"use_buffers": False},
    "on a device": {"device": "cpu"},
    "on a policy_device": {"policy_device": "cpu"},
    "on a storing_device": {"storing_device": "cpu"},
    "compiled": {"compile_policy": {"backend": "eager"}},
    "without ids of trajectories": {"track_traj_ids": False},
    "reset at each batch": {"env": ending_env, "reset_at_each_iter": True},
    "split into trajectories": {"env": ending_env, "split_trajs": True},
}


@pytest.mark.filterwarnings("ignore:split_trajs=True:UserWarning")
@pytest.mark.filterwarnings("ignore:Nested TransformedEnvs:UserWarning")  # torchrl about itself
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # torch about itself
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_entry_says_what_the_forward_used(alone: Any, variant: str) -> None:
    """Three batches, in which the version changes after every third forward. Mutants: leave what the tracker has
    carried over; forget the tracker's copies; write the entry once per rollout; make no room in the collector's buffer.
    """
    one = alone(**VARIANTS[variant])
    versions = set()
    for _, batch in zip(range(3), one.collector, strict=False):
        data = batch[batch["collector", "mask"]] if "split_trajs" in VARIANTS[variant] else batch
        said = stamped(data)
        assert said[0] == said[1] == said[2] == said[3]
        assert data["collector", "policy_version"].dtype == torch.int64
        versions.update(said[0])
    assert len(versions) > 3


def test_steps_at_random_have_no_version(alone: Any) -> None:
    """Mutant: keep the entry of the version that is there."""
    one = alone(init_random_frames=2 * FRAMES)
    data = [data["collector", "policy_version"].tolist() for _, data in zip(range(3), one.collector, strict=False)]
    assert data[0] == data[1] == [0] * FRAMES
    assert 0 not in data[2]


@pytest.mark.parametrize("extend", [True, False])
def test_a_replay_buffer_has_them_too(alone: Any, extend: bool) -> None:
    """Also where each step goes there on its own, before its batch is complete. Mutant: repair what the tracker has
    carried over when the batch is there."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(200), batch_size=4)
    one = alone(replay_buffer=buffer, extend_buffer=extend)
    for _ in zip(range(3), one.collector, strict=False):
        pass
    said = stamped(buffer[:])
    assert len(said[0]) >= 2 * FRAMES
    assert said[0] == said[1] == said[2] == said[3]


def test_a_wrapped_policy_is_stamped_alike(alone: Any) -> None:
    """A batch without any push: the stamps stay."""
    one = alone(pushing=False)
    for version in (1, 2, 2):
        while one.publisher.version < version:
            one.push()
        said = stamped(next(iter(one.collector)))
        assert set(sum(said, [])) == {version}


# ── Collectors that are attached later, and those that were not asked ───────────────────────────────────────────────


@contextmanager
def plain_collector(**options: Any) -> Iterator[Collector]:
    collector = Collector(
        Corridor,
        net_policy(value=-1.0),
        frames_per_batch=FRAMES,
        total_frames=FRAMES * 1000,
        auto_register_policy_transforms=False,
        **options,
    )
    try:
        yield collector
    finally:
        collector.shutdown()


@pytest.mark.parametrize("use_buffers", [True, False])
def test_a_collector_that_has_begun_is_stamped_from_its_next_rollout_on(use_buffers: bool) -> None:
    """Mutant: begin at the attachment, in the middle of a rollout."""
    policy = net_policy(value=1.0)
    with shmsync.Publisher(policy) as publisher, plain_collector(use_buffers=use_buffers) as collector:
        publisher.publish()
        step = collector.env.step_and_maybe_reset
        make = partial(attachment, stamped=True)

        def attaching(*args: Any) -> Any:
            collector.env.step_and_maybe_reset = step
            remote.attach_object(collector, str(publisher.handle), 0, make)
            return step(*args)

        batches = iter(collector)
        collector.env.step_and_maybe_reset = attaching
        first = next(batches)
        assert stamps.ENTRY not in first.keys(True)
        assert not isinstance(first.get("collector"), LazyStackedTensorDict)  # its steps are alike
        assert next(batches)["collector", "policy_version"].tolist() == [1] * FRAMES


def test_who_did_not_ask_has_no_entry(start: Start) -> None:
    """Mutant: write it for everybody."""
    trainer = start(workers=1)
    assert trainer.do(keys_of_a_batch)["entry"] is False


def keys_of_a_batch(world: SimpleNamespace) -> dict[str, bool]:
    data = next(world.batches)
    return {"entry": stamps.ENTRY in data.keys(True), "tracked": "policy_version" in data}


def test_it_needs_no_tracker(start: Start) -> None:
    trainer = start(workers=1, updater=stamping, collector_kwargs={"track_policy_version": False})
    assert trainer.do(keys_of_a_batch) == {"entry": True, "tracked": False}
    trainer.do(push, 8.0)
    assert trainer.do(entries_after, 2) == ([8.0], [2])


def stamping(**options: Any) -> shmsync.RPCWeightUpdater:
    return shmsync.RPCWeightUpdater(stamp_steps=True, **options)


def entries_after(world: SimpleNamespace, batches: int) -> tuple[list[float], list[int]]:
    for _ in range(batches):
        data = next(world.batches)
    return sorted(set(data["action"].flatten().tolist())), sorted(set(data[stamps.ENTRY].flatten().tolist()))


def test_a_worker_that_can_not_map_can_not_be_asked() -> None:
    with pytest.raises(shmsync.ShmSyncError, match="stamp_steps= needs workers that map"):
        shmsync.RPCWeightUpdater(stamp_steps=True, fallback="rpc")
    with pytest.raises(shmsync.ShmSyncError, match="stamp_steps= needs workers that map"):
        shmsync.RPCWeightSyncScheme(stamp_steps=True, fallback="rpc")


# ── Over restarts ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_next_updaters_versions_follow_those_before(start: Start) -> None:
    """A second updater for the same workers goes on counting, so no stamp goes back; it attaches them by a message, and
    may ask for entries that the first did not. Mutants: begin with 1; let the message not ask; leave entries as they
    are that an earlier one has asked for."""
    trainer = start()
    for value in (8.0, 9.0):
        trainer.do(push, value)
    assert trainer.do(collect, 2).versions == [3]
    assert trainer.do(another_updater, True) == 4
    trainer.do(push, 10.0)
    assert trainer.do(entries_after, 2) == ([10.0], [4])
    assert trainer.do(another_updater, True, False) == 5  # which does not ask for entries, but they are there
    trainer.do(push, 11.0)
    assert trainer.do(entries_after, 2) == ([11.0], [5])


def test_a_version_to_begin_with(start: Start) -> None:
    """For a trainer that goes on from a checkpoint: no worker lives that has seen the versions before."""
    trainer = start(updater=continuing)
    batch = trainer.do(collect)
    assert (batch.actions, batch.versions) == ([7.0], [5001])
    trainer.do(push, 8.0)
    assert trainer.do(collect, 2).versions == [5002]


def test_who_has_nothing_yet_is_behind_from_the_first_version_on() -> None:
    """Mutant: count from 0."""
    with (
        shmsync.Publisher(net_policy(), first_version=5001) as publisher,
        shmsync.Subscriber(publisher.handle, worker_id=0),
    ):
        publisher.publish()
        publisher.publish()
        assert summary(measure(publisher, {})).workers == {0: 2}


def continuing(**options: Any) -> shmsync.RPCWeightUpdater:
    return shmsync.RPCWeightUpdater(first_version=5001, **options)


def another_updater(world: SimpleNamespace, closed: bool, stamp_steps: bool = True) -> int:
    """Put another updater into the collector's place; the version that its first push will have."""
    old = world.updater
    if closed:
        old.close()
    world.updater = shmsync.RPCWeightUpdater(
        collector_rrefs=world.collector.collector_rrefs,
        policy_weights=world.policy,
        num_workers=world.workers,
        stamp_steps=stamp_steps,
    )
    world.updater._open()
    return world.updater._publisher.first_version


def test_a_lost_worker_delays_the_first_push_by_no_more_than_a_second(start: Start) -> None:
    """Who is dead or stopped can't be asked. Mutant: ask without a limit."""
    trainer = start()
    pid = trainer.do(ask, 1, collectors.pid_of)
    os.kill(pid, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        assert trainer.do(another_updater, False) == 2
        assert time.monotonic() - begin < 10
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("first", [0, -1, 2**47 + 1, True, 1.5, "1"])
def test_bad_first_versions_are_named(first: Any) -> None:
    with pytest.raises(shmsync.ShmSyncError, match="Expected first_version from 1 to"):
        shmsync.Publisher(first_version=first)


def test_large_versions_are_whole() -> None:
    policy, bound = net_policy(value=3.0), net_policy()
    with shmsync.Publisher(policy, first_version=2**47) as publisher, shmsync.Subscriber(publisher.handle) as follower:
        binding = follower.bind(bound)
        for value in (4.0, 5.0, 6.0):
            fill(policy, value)
            publisher.publish()
            follower.refresh()
            assert {p.mean().item() for p in bound.parameters()} == {value}
        assert binding.version == publisher.version == 2**47 + 2
        assert follower.lag == 0


@pytest.mark.parametrize("kind", [LazyMemmapStorage, LazyTensorStorage])
def test_a_replay_buffer_that_is_laid_out_already_gets_room(kind: Any) -> None:
    """As a MultiSyncCollector lays it out before its processes start. Mutant: leave it as it is."""
    steps = Corridor().fake_tensordict().expand(3).clone()
    buffer = ReplayBuffer(storage=kind(10), batch_size=1, shared=True)
    buffer.extend(steps)
    buffer.empty()
    stamps.make_room_in(buffer)
    buffer.extend(steps.set(stamps.ENTRY, torch.full((3,), 7)))
    assert buffer[:][stamps.ENTRY].tolist() == [7, 7, 7]


def test_steps_at_random_after_a_forward_have_no_version(alone: Callable[..., Alone]) -> None:
    """As after an older state was loaded. Mutant: begin with the entry of the step before."""
    one = alone(init_random_frames=FRAMES, pushing=False)
    steps = iter(one.collector)
    for expected in (0, 1):
        assert next(steps)[stamps.ENTRY].tolist() == [expected] * FRAMES
    one.collector.load_state_dict({**one.collector.state_dict(), "frames": 0})
    assert next(steps)[stamps.ENTRY].tolist() == [0] * FRAMES
