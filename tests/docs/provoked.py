"""What docs/faq.md has an entry for, provoked: each function raises its error, or warns, and gives the text.

Most need a Publisher and a Subscriber in one process, and nothing else. Where a worker or a device would be needed, the
part of shmsync that finds the fault is asked on its own.
"""

from __future__ import annotations

import copyreg
import dataclasses
import logging
import pickle
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import shmsync
from shmsync import errors, limits, remote
from shmsync.torchrl import fallback, releases, scheme, staleness
from tests.helpers.trainers import wait_for

Provoke = Callable[[], Any]
ERRORS: dict[str, Provoke] = {}
# By headings that are no class's name, the functions that give the text.
TEXTS: dict[str, Callable[[], str]] = {}
WARNINGS: dict[str, Provoke] = {}


def error(function: Provoke) -> Provoke:
    """Registers what raises the error of that name."""
    ERRORS[function.__name__] = function
    return function


def text(title: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Registers what gives the text under that heading."""

    def register(function: Callable[[], str]) -> Callable[[], str]:
        TEXTS[title] = function
        return function

    return register


def warning(title: str) -> Callable[[Provoke], Provoke]:
    """Registers what gives the warning under that heading."""

    def register(function: Provoke) -> Provoke:
        WARNINGS[title] = function
        return function

    return register


def text_of(name: str) -> str:
    """The text of an error that is provoked by its name."""
    kind = getattr(errors, name)
    with pytest.raises(kind) as found:
        ERRORS[name]()
    assert found.type is kind
    return str(found.value)


def text_of_warning(title: str) -> str:
    """The text of the first warning of that heading, in Python's way or in the log."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("shmsync")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            WARNINGS[title]()
    finally:
        logger.removeHandler(handler)
    texts += [str(one.message) for one in caught]
    assert texts, f"no warning: {title}"
    return texts[0]


@text("this needs torchrl")
def lacking() -> str:
    """As with a release that has no such class."""
    return str(releases.refusal(releases.SCHEME._replace(name="WhatItLacks")))


# ── The weights ─────────────────────────────────────────────────────────────────────────────────────────────────────


@error
def LayoutError() -> None:
    shmsync.Publisher([torch.zeros(2)])


@error
def UnsupportedLeaf() -> None:
    shmsync.Publisher({"embedding": torch.eye(3).to_sparse()})


@error
def LayoutMismatch() -> None:
    with shmsync.Publisher(nn.Linear(4, 2)) as publisher:
        publisher.publish(nn.Linear(8, 2, bias=False))


@error
def TiedLeavesDiffer() -> None:
    policy = nn.ModuleDict({"encoder": nn.Linear(4, 4), "decoder": nn.Linear(4, 4)})
    policy["decoder"].weight = policy["encoder"].weight
    with shmsync.Publisher(policy) as publisher:
        publisher.publish({key: torch.rand_like(value) for key, value in policy.state_dict().items()})


# ── The way to the channel ──────────────────────────────────────────────────────────────────────────────────────────


@error
def ChannelError() -> None:
    shmsync.Subscriber("localhost:5000")


@error
def ChannelClosed() -> None:
    publisher = shmsync.Publisher(nn.Linear(4, 2), name="trainer")
    publisher.close()
    publisher.publish()


@error
def ChannelUnreachable() -> None:
    with shmsync.Publisher(nn.Linear(4, 2)) as publisher:
        elsewhere = dataclasses.replace(publisher.handle, host="node-2", boot_id="another")
        shmsync.Subscriber(elsewhere)


@error
def ChannelCorrupt() -> None:
    with _published(checksum=True) as (_, subscriber), subscriber.lease() as lease:
        lease.weights["weight"].fill_(7.0)
        subscriber.verify()


@error
def PublisherGone() -> None:
    with shmsync.Publisher(nn.Linear(4, 2)) as publisher:
        handle = publisher.handle
    shmsync.Subscriber(handle)


@error
def NotAttached() -> None:
    remote.attached_as("1f2e3d", 1)


@error
def NotThePublisher() -> None:
    with shmsync.Publisher(nn.Linear(4, 2)) as publisher:
        pickle.dumps(publisher)


# ── Room ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@error
def LimitError() -> None:
    shmsync.Publisher(nn.Linear(4, 2), max_slots=1)


@error
def SlotsExhausted() -> None:
    with _published(max_slots=2, timeout=0.1) as (publisher, subscriber), subscriber.lease():
        publisher.publish()
        with subscriber.lease():
            publisher.publish()


@error
def SubscribersExhausted() -> None:
    with shmsync.Publisher(nn.Linear(4, 2), max_subscribers=1) as publisher, shmsync.Subscriber(publisher.handle):
        shmsync.Subscriber(publisher.handle)


@error
def OutOfSharedMemory() -> None:
    limits.check_growth(1 << 50, "A slot of the channel")


@error
def DeviceError() -> None:
    with shmsync.Publisher(nn.Linear(4, 2)) as publisher:
        publisher._failure = errors.DeviceError("cudaMemcpyAsync: an illegal memory access was encountered")
        publisher.wait()


# ── Modules that follow ─────────────────────────────────────────────────────────────────────────────────────────────


@error
def BindingError() -> None:
    with _published(dtype=torch.bfloat16) as (_, subscriber):
        subscriber.bind(nn.Linear(4, 2), mode="map")


@error
def BindingLost() -> None:
    with _published() as (publisher, subscriber):
        policy = nn.Linear(4, 2)
        subscriber.bind(policy)
        policy.bias = None
        publisher.publish()
        policy(torch.zeros(4))


# ── Versions ────────────────────────────────────────────────────────────────────────────────────────────────────────


@error
def NothingPublished() -> None:
    with shmsync.Publisher(nn.Linear(4, 2)) as publisher, shmsync.Subscriber(publisher.handle) as subscriber:
        subscriber.lease()


@error
def WaitTimeout() -> None:
    with _published() as (_, subscriber):
        subscriber.wait(2, timeout=0.1)


@error
def WorkerIdError() -> None:
    with shmsync.Publisher(nn.Linear(4, 2), max_subscribers=2) as publisher:
        publisher.publish(worker_ids=[2])


# ── Pushes that were not confirmed ──────────────────────────────────────────────────────────────────────────────────


def _late(on_lag: str) -> dict[int, BaseException]:
    behind = {1: staleness.Behind(used=3, addressed=7, where="pid 4711")}
    bound = staleness.Staleness(max_lag=2, on_lag=on_lag)
    return bound.enforce(lambda: behind, lambda workers: None, [0, 1], time.monotonic())


@error
def LagExceeded() -> None:
    raise _late("raise")[1]


@error
def LagTimeout() -> None:
    raise _late("wait")[1]


@error
def PushError() -> None:
    raise errors.PushError(7, {1: errors.BindingLost("The bound parameters are no longer the module's own ...")})


@error
def PushTimeout() -> None:
    raise errors.PushTimeout(
        7,
        {
            1: TimeoutError(
                "no answer to a message within 60 s from its process, pid 4711; is it stopped, or in one long call?"
            )
        },
    )


@text("is derived from torchrl's scheme in this process")
def _torchrls() -> str:
    kind = type("MyScheme", (), {"__module__": "__mp_main__"})
    with pytest.raises(errors.ShmSyncError) as found:
        scheme.arrived(copyreg.__newobj__, (kind,), {})
    return str(found.value)


@error
def ShmSyncError() -> None:
    shmsync.RPCWeightUpdater(notify="email")


# ── Warnings ────────────────────────────────────────────────────────────────────────────────────────────────────────


@warning("wrote to shared weights")
def _writes() -> None:
    with _published() as (publisher, subscriber):
        policy = nn.Linear(4, 2)
        subscriber.bind(policy)
        with torch.no_grad():
            policy.weight.fill_(7.0)
        for _ in range(4):
            publisher.publish()
            policy(torch.zeros(4))


@warning("moved out of the channel")
def _moves() -> None:
    with _published() as (publisher, subscriber):
        policy = nn.Linear(4, 2)
        subscriber.bind(policy)
        policy.share_memory()
        for _ in range(4):
            publisher.publish()
            policy(torch.zeros(4))


@warning("can't map weights on devices")
def _copies() -> None:
    with _published() as (_, subscriber):
        subscriber._wishing.warn_of_copies("no CUDA runtime is loaded in this process")


@warning("gets the weights by RPC")
def _by_rpc() -> None:
    with shmsync.Publisher(nn.Linear(4, 2)) as publisher:
        workers = fallback.ByRpc(publisher.handle, lambda *arguments: None)
        workers.admit(1, None, errors.ChannelUnreachable("Worker 1 on host node-2: ..."))
        workers.close()


@warning("is behind by more than max_lag")
def _lags() -> None:
    _late("warn")


@warning("inner processes had started before the channel was known")
def _inner() -> None:
    from shmsync.torchrl.collector import CopyingAttachment

    CopyingAttachment(type("MultiSyncCollector", (), {})(), lambda: SimpleNamespace(worker_id=1))


@warning("reacting to the bell failed")
def _fails() -> None:
    with _published() as (_, subscriber):
        actor = SimpleNamespace(policy=nn.Linear(4, 2))
        attached = remote.ModuleAttachment(actor, lambda: subscriber)
        actor.policy = nn.Linear(2, 2)
        attached.listen()
        wait_for(lambda: attached._listener._failed, "a reaction")
        attached.close()


@contextmanager
def _published(**options: Any) -> Iterator[tuple[shmsync.Publisher, shmsync.Subscriber]]:
    """A channel at version 1, and who follows it."""
    with shmsync.Publisher(nn.Linear(4, 2), **options) as publisher:
        publisher.publish()
        with shmsync.Subscriber(publisher.handle, worker_id=0, name="worker-0") as subscriber:
            yield publisher, subscriber
