"""C13: after attaching, a worker's policy becomes another object, or has its tensors exchanged in place.

Right: the policy in use gets the update, or the push fails saying that what was bound is no longer the policy's own.
Mutants: go on with the old policy's binding; look at the number of parameters only.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from shmsync import BindingLost, remote
from tests.helpers.models import fill, uniform


class Player:
    """What an RRef points to: an object with a policy."""

    def __init__(self, policy: nn.Module) -> None:
        self.policy = policy

    def local_value(self) -> Player:
        return self


def policy() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


@pytest.fixture
def world(publisher):
    """A trainer at version 1 and a worker that is attached to it."""
    source, player = policy(), Player(policy())
    channel = publisher(fill(source, 1))
    channel.publish()
    assert remote.attach(player, str(channel.handle), 0)[:2] == (1, 1)
    yield channel, source, player
    remote.detach(channel.handle.nonce, 0)


def push(channel: Any, source: nn.Module, value: float) -> Any:
    channel.publish(fill(source, value))
    return remote.notify(channel.handle.nonce, 0, channel.version)


def copied(player: Player) -> None:
    player.policy = copy.deepcopy(player.policy)


def another(player: Player) -> None:
    player.policy = policy()


def loaded(player: Player) -> None:
    player.policy.load_state_dict({k: torch.zeros_like(t) for k, t in policy().state_dict().items()}, assign=True)


def new_layer(player: Player) -> None:
    player.policy[0] = nn.Linear(3, 3)


@pytest.mark.parametrize("replace", [copied, another, loaded, new_layer], ids=lambda replace: replace.__name__)
def test_the_policy_in_use_gets_the_update(world, replace) -> None:
    channel, source, player = world
    old = player.policy
    replace(player)
    for value in (2, 3):
        assert push(channel, source, value) == (value, value)
        assert uniform(player.policy) == value
        assert player.policy(torch.zeros(1, 3)).tolist() == [[3 * value * value + value] * 3]
    if old is not player.policy:
        assert uniform(old) == 1, "the old one is let go with what it had"


def doubled(player: Player) -> None:
    player.policy.double()


def pruned(player: Player) -> None:
    player.policy[1].register_parameter("bias", None)


def narrower(player: Player) -> None:
    player.policy[1] = nn.Linear(3, 2)


@pytest.mark.parametrize("replace", [doubled, pruned, narrower], ids=lambda replace: replace.__name__)
def test_what_does_not_fit_is_an_error_that_says_so(world, replace) -> None:
    """At each push, by the class of the error and its text; a policy that fits again is followed again."""
    channel, source, player = world
    replace(player)
    for value in (2, 3):
        kind, text = push(channel, source, value)
        assert kind == BindingLost.__name__
        assert "no longer the module's" in text
    player.policy = policy()
    assert push(channel, source, 4) == (4, 4)
    assert uniform(player.policy) == 4
