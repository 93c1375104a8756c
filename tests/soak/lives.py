"""The lives of a soak's trainer and of its workers, until they are killed or all is over."""

from __future__ import annotations

import ctypes
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import shmsync
from tests.soak.board import Board

PATIENCE_SECONDS = 1.0
PULSE_SECONDS = 0.3
_PLACES = 7
_PR_SET_PDEATHSIG = 1


class Policy(nn.Module):
    """A forward that says the least and the greatest of all weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.zeros(2000)) for _ in range(20)])

    def forward(self) -> tuple[float, float]:
        pairs = [layer.detach().aminmax() for layer in self.layers]
        return min(float(low) for low, _ in pairs), max(float(high) for _, high in pairs)


def _begin(folder: str) -> Board:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    return Board(Path(folder), _PLACES)


class Watch:
    """Counts what took too long though neither this process nor the machine was stopped meanwhile."""

    def __init__(self, board: Board, place: int) -> None:
        self._board, self._place = board, place

    def __enter__(self) -> None:
        self._stops, self._begin = self._stopped(), time.monotonic()

    def __exit__(self, *_: object) -> None:
        if time.monotonic() - self._begin > PATIENCE_SECONDS:
            time.sleep(PULSE_SECONDS)  # until the supervisor has noticed it too
            if self._stopped() == self._stops:
                self._board.counts["blocked"][self._place] += 1

    def _stopped(self) -> tuple[int, int]:
        return int(self._board.stops[self._place]), int(self._board.pauses[0])


def train(folder: str, place: int, seed: int) -> None:
    """Publish to all, to some, and in part, as fast as it goes with a breath now and then."""
    board, chance, policy = _begin(folder), random.Random(seed), Policy()
    count, watch = board.counts["pushes"], Watch(board, place)
    with shmsync.Publisher(policy, max_subscribers=_PLACES, name=f"trainer-{seed}") as channel:
        board.lead(str(channel.handle))
        while not board.over[0]:
            with watch:
                _push(channel, policy, chance)
            count[place] += 1
            if chance.random() < 0.3:
                time.sleep(chance.uniform(0, 0.01))


def _push(channel: shmsync.Publisher, policy: Policy, chance: random.Random) -> None:
    kind = chance.random()
    if kind < 0.2 and channel.version:
        layer = chance.randrange(len(policy.layers))  # with the value that it has: the whole stays of one value
        channel.publish({f"layers.{layer}": policy.layers[layer]}, partial=True)
        return
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.fill_(float(channel.version + 1))
    some = chance.sample(range(6), chance.randint(1, 5)) if kind > 0.8 else None
    channel.publish(policy, worker_ids=some)


def work(folder: str, place: int, seed: int) -> None:
    """Follow the newest trainer; every forward must be of one value, and values must not go back."""
    board, policy, watch = _begin(folder), Policy(), Watch(_begin(folder), place)
    follower: Any = None
    rng = np.random.default_rng(seed)
    last = 0.0
    while not board.over[0]:
        handle = board.leader()
        if follower is None or handle != str(follower.handle):
            moved = _follow(handle, policy, place)
            if moved is None:
                time.sleep(0.005)
                continue
            if follower is not None:
                follower.close()
                board.counts["moves"][place] += 1
            follower, last = moved, 0.0
        for _ in range(int(rng.integers(1, 50))):
            with watch:
                low, high = policy()
            board.counts["forwards"][place] += 1
            board.counts["mixed"][place] += low != high
            board.counts["back"][place] += low < last
            last = low
            if rng.random() < 0.05:
                with follower.lease() as lease:
                    board.counts["mixed"][place] += len({float(x) for x in lease.weights["layers", "3"][:50]}) != 1
    if follower is not None:
        follower.close()


def _follow(handle: str | None, policy: Policy, place: int) -> shmsync.Subscriber | None:
    """Bind to a trainer's channel once it has published; None if it is gone, or not so far."""
    if handle is None:
        return None
    try:
        follower = shmsync.Subscriber(handle, worker_id=place)
    except (shmsync.PublisherGone, shmsync.SubscribersExhausted):
        return None
    try:
        follower.wait(1, 0.5)
        follower.bind(policy)
    except (shmsync.PublisherGone, shmsync.WaitTimeout):
        follower.close()
        return None
    return follower
