"""C25: after a thousand pushes and fifty attachments everything is as after the tenth.

Mutants: map a slot at each switch; keep a descriptor per attachment; a cycle that only the collector breaks.
"""

import pytest
from torch import nn

from tests.helpers import probes, workers
from tests.helpers.models import fill

ROUNDS = 50
KILLS = 25
SLACK_NBYTES = 1 << 20
SLACK_MAPPINGS = 4  # the allocator splits its own, once or twice


def policy() -> nn.Module:
    return nn.Sequential(*(nn.Linear(128, 128) for _ in range(16)))  # 1 MiB, in leaves that torch fills with one thread


def step(state) -> float:
    """One forward's worth: take the news, look at the weights."""
    state.binding.refresh()
    return float(state.module[15].bias.data[0])


def attach_and_detach(state, handle: str, rounds: int) -> list[float]:
    seen = []
    for _ in range(rounds):
        workers.attach(state, handle, policy, 1)
        seen.append(float(state.module[0].weight.data[0, 0]))
        with state.subscriber.lease() as lease:
            seen.append(float(lease.weights["0", "bias"][0]))
        workers.detach(state)
    return seen


def steady(before: probes.Footprint, after: probes.Footprint) -> None:
    assert after[:3] == before[:3], "descriptors, mappings of segments or shared bytes have grown"
    assert after.mappings - before.mappings <= SLACK_MAPPINGS
    assert after.rss_nbytes - before.rss_nbytes < SLACK_NBYTES


@pytest.mark.parametrize("mode", ["map", "copy"])
def test_a_thousand_pushes(publisher, peer, mode) -> None:
    source = policy()
    channel = publisher(source)
    crew = [peer(), peer()]
    for number, worker in enumerate(crew):
        worker.call(workers.attach, str(channel.handle), policy, number, mode)
    first: list[probes.Footprint] = []
    for k in range(1, 1001):
        channel.publish(fill(source, k))
        for worker in crew:
            worker.start(step)
        assert [worker.result() for worker in crew] == [k, k]
        if k == 10:
            first = [probes.footprint(), *(worker.call(workers.footprint) for worker in crew)]
    last = [probes.footprint(), *(worker.call(workers.footprint) for worker in crew)]
    for before, after in zip(first, last, strict=True):
        steady(before, after)


def test_fifty_attachments(publisher, peer) -> None:
    channel = publisher(fill(policy(), 3), max_subscribers=3)
    channel.publish()
    resident, guest = peer(), peer()
    resident.call(workers.attach, str(channel.handle), policy, 0)
    guest.call(attach_and_detach, str(channel.handle), 10)
    first = [probes.footprint(), *(worker.call(workers.footprint) for worker in (resident, guest))]
    assert guest.call(attach_and_detach, str(channel.handle), ROUNDS) == [3.0] * 2 * ROUNDS
    last = [probes.footprint(), *(worker.call(workers.footprint) for worker in (resident, guest))]
    for before, after in zip(first, last, strict=True):
        steady(before, after)
    assert [line.worker_id for line in channel.subscribers()] == [0]
    assert last[2].descriptors == guest.call(workers.footprint).descriptors


def test_processes_that_are_killed(publisher, peer) -> None:
    """The trainer keeps nothing of those that went without a word."""
    source = policy()
    channel = publisher(source, max_subscribers=3)
    channel.publish()
    before = None
    for number in range(KILLS):
        worker = peer()
        worker.call(workers.attach, str(channel.handle), policy)
        worker.kill()
        channel.publish()
        if number == 10:
            before = probes.footprint()
    assert channel.subscribers() == []
    after = probes.footprint()
    assert before is not None
    assert after.shared_nbytes == before.shared_nbytes
    assert channel.stats()["slots"] <= 3


def open_and_close(state, rounds: int) -> None:
    """A channel, a subscriber and a binding of its own, again and again."""
    import shmsync

    for _ in range(rounds):
        with shmsync.Publisher(fill(policy(), 1)) as channel, shmsync.Subscriber(channel.handle) as follower:
            module = policy()
            follower.bind(module)
            channel.publish()
            assert follower.refresh() == 1


def test_fifty_channels_in_one_process(peer) -> None:
    worker = peer()
    worker.call(open_and_close, 10)
    before = worker.call(workers.footprint)
    worker.call(open_and_close, ROUNDS)
    steady(before, worker.call(workers.footprint))
