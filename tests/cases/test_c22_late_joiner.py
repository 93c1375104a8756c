"""C22: whoever comes late, or comes back after being killed, is on its peers' version without any call to it.

The first batch and the collectors are in tests/torchrl; here late and reborn workers are plain subscribers.
Mutants: let a row say only what was published after the subscriber came; keep a dead subscriber's leases.
"""

import pytest
from torch import nn

from tests.helpers import workers
from tests.helpers.models import fill, snapshot


def policy() -> nn.Module:
    return nn.Linear(3, 3)


def first_use(state, handle: str, worker_id: int) -> tuple[int, dict]:
    """Subscribe, bind, one forward; the version it used and the weights: nothing else is called."""
    workers.attach(state, handle, policy, worker_id)
    version, _ = workers.forward(state, [1.0, 2.0, 3.0])
    return version, snapshot(state.module)


def use(state) -> tuple[int, dict]:
    version, _ = workers.forward(state, [1.0, 2.0, 3.0])
    return version, snapshot(state.module)


def test_late_and_reborn_workers_use_their_peers_version(publisher, peer) -> None:
    source = fill(policy(), 7)
    channel = publisher(source)
    handle = str(channel.handle)
    channel.publish()
    seven = snapshot(source)
    first = peer()
    assert first.call(first_use, handle, 0) == (1, seven)
    for _ in range(3):
        channel.publish(fill(source, 8))
    eight = snapshot(source)
    late = peer()
    assert late.call(first_use, handle, 1) == (4, eight)
    assert first.call(use) == (4, eight)
    first.kill()
    assert [line.worker_id for line in channel.subscribers()] == [1]
    reborn = peer()
    assert reborn.call(first_use, handle, 0) == (4, eight)
    channel.publish(fill(source, 9))
    assert reborn.call(use) == late.call(use) == (5, snapshot(source))


def test_a_newcomer_inherits_what_was_published_to_its_worker(publisher, peer) -> None:
    """Its row is its worker's, not its own."""
    source = fill(policy(), 1)
    channel = publisher(source)
    handle = str(channel.handle)
    channel.publish()
    first = peer()
    first.call(first_use, handle, 0)
    channel.publish(fill(source, 2), worker_ids=0)
    two = snapshot(source)
    first.kill()
    reborn, other = peer(), peer()
    assert reborn.call(first_use, handle, 0) == (2, two)
    assert other.call(first_use, handle, 1) == (1, snapshot(fill(policy(), 1)))


@pytest.mark.parametrize("leased", [False, True], ids=["bound", "leased"])
def test_a_killed_worker_blocks_no_slot(publisher, peer, leased) -> None:
    """With room for two slots only, each push needs the one that the dead worker held."""
    source = fill(policy(), 1)
    channel = publisher(source, max_slots=2, timeout=20.0)
    channel.publish()
    victim = peer()
    victim.call(first_use, str(channel.handle), 0)
    if leased:
        victim.call(hold_lease)
    channel.publish(fill(source, 2))
    victim.kill()
    for k in (3, 4, 5):
        assert channel.publish(fill(source, k)).version == k
    survivor = peer()
    assert survivor.call(first_use, str(channel.handle), 0) == (5, snapshot(source))


def hold_lease(state) -> None:
    state.lease = state.subscriber.lease()


def test_a_channel_without_weights_yet_is_followed_from_its_first_push(publisher, peer) -> None:
    channel = publisher()
    early = peer()
    own = early.call(first_use, str(channel.handle), 0)
    assert own[0] == 0, "at version 0 a module keeps its own weights"
    channel.publish(fill(policy(), 7))
    seven = snapshot(fill(policy(), 7))
    assert early.call(use) == (1, seven)
    late = peer()
    assert late.call(first_use, str(channel.handle), 1) == (1, seven)
