"""What runs in a worker process: attaching objects that have a policy to a channel, and reacting to notifications.

The trainer calls these functions by torch.distributed.rpc; nothing here needs torchrl. Only the handle's text and
plain numbers travel.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from .binding import Binding
from .errors import BindingError, ChannelError, ChannelUnreachable, NotAttached, ShmSyncError, SubscribersExhausted
from .handle import Handle
from .listener import Listener
from .subscriber import Subscriber

# What a worker answers: the version in use, and the newest version that it has seen; after attaching also its pid, and
# those of inner processes that follow the channel in its place ...
Answer = tuple[int, int] | tuple[int, int, int, tuple[int, ...]]
# ... or the name of an error's class and its text: RPC itself would turn any error into a RuntimeError.
Failure = tuple[str, str]
Subscribe = Callable[..., Subscriber]


class Attachment(Protocol):
    """One worker's side of a channel."""

    target: Any

    @property
    def inner(self) -> tuple[int, ...]:
        """The pids of processes inside it, if they follow the channel and it does not itself; they answer to the
        bell."""

    @property
    def newest(self) -> int:
        """The newest version that it has seen; 0 = none."""

    def notified(self) -> tuple[int, int]:
        """React to a notification: switch now if that is the right moment, and say which versions there are."""

    def listen(self) -> None:
        """From now on, answer to the channel's bell as to a notification. A second call does nothing."""

    def close(self) -> None:
        """Let the target go, with the values that it has."""


class Following:
    """What attachments that switch here have in common: a subscriber, and a listener that answers the bell for it."""

    inner: tuple[int, ...] = ()

    def __init__(self, target: Any, subscriber: Subscriber) -> None:
        self.target, self._subscriber = target, subscriber
        self._lock = threading.Lock()
        self._listener: Listener | None = None

    def notified(self) -> tuple[int, int]:
        """As Attachment says."""
        raise NotImplementedError

    @property
    def newest(self) -> int:
        """As Attachment says."""
        return self._subscriber.seen

    def listen(self) -> None:
        """As Attachment says."""
        with self._lock:
            if self._listener is None:
                self._listener = Listener(self._subscriber, self.notified)

    def _after(self, switch: Callable[[], int]) -> tuple[int, int]:
        """Switch, and answer: the version in use, and the newest that was seen before.

        What comes during a switch has a ring and a message of its own.
        """
        seen = self._subscriber.seen
        used = switch()
        return used, max(used, seen)

    def _leave(self) -> None:
        self._subscriber.close()
        if self._listener is not None:
            self._listener.end()


class ModuleAttachment(Following):
    """A plain module, or the module that is some object's `policy`."""

    def __init__(self, target: Any, subscribe: Subscribe) -> None:
        self._policy = self._module_of(target)
        super().__init__(target, subscribe())
        self._binding: Binding = self._subscriber.bind(self._policy)

    def _module_of(self, target: Any) -> nn.Module:
        return policy_of(target)

    def notified(self) -> tuple[int, int]:
        with self._lock:
            policy = self._module_of(self.target)
            if policy is not self._policy:  # it was given another one
                binding = self._subscriber.bind(policy)  # or if that fails, the one before goes on
                self._binding.unbind()
                self._policy, self._binding = policy, binding
        return self._after(self._binding.follow)

    def close(self) -> None:
        self._leave()


Maker = Callable[[Any, Subscribe], Attachment]

_attached: dict[tuple[str, int], Attachment] = {}
_epochs: dict[str, int] = {}  # of all channels that were ever attached to
# By id, since targets need not be hashable: the newest version that each had from channels that it has left.
_left: dict[int, tuple[weakref.ref[Any], int]] = {}
_lock = threading.RLock()


def attach_object(target: Any, handle_text: str, worker_id: int, make: Maker = ModuleAttachment) -> Attachment:
    """Attach `target` as a worker of the channel, once; another target or channel replaces what was there.

    Raises ChannelUnreachable, naming worker and host, BindingError or LayoutMismatch.
    """
    handle = Handle.parse(handle_text)
    with _lock:
        known = _attached.get((handle.nonce, worker_id))
        if known is not None and known.target is target:
            return known
        _check_epoch(target, handle, worker_id)
        try:
            made = _make(target, handle, worker_id, make)
        except SubscribersExhausted:
            if known is None:
                raise
            _forget(handle.nonce, worker_id)  # its line is the one that there is for this worker
            made = _make(target, handle, worker_id, make)
        _forget(handle.nonce, worker_id)
        forget(target)  # what it followed before, a channel of an earlier trainer, say
        _attached[handle.nonce, worker_id], _epochs[handle.nonce] = made, handle.epoch
        return made


def _check_epoch(target: Any, handle: Handle, worker_id: int) -> None:
    """A trainer that was started anew takes a worker over; the one before it, come back to life, does not."""
    for nonce, _ in [key for key, known in _attached.items() if known.target is target]:
        if _epochs[nonce] > handle.epoch:
            raise ChannelError(
                f"Worker {worker_id} (pid {os.getpid()}) follows a later channel than that of pid {handle.pid}: epoch "
                f"{_epochs[nonce]} against {handle.epoch}. Push from the trainer that was started last, or make a new "
                "updater there"
            )


def _make(target: Any, handle: Handle, worker_id: int, make: Maker) -> Attachment:
    subscribers: list[Subscriber] = []

    def one(*, counted: bool = True) -> Subscriber:
        subscribers.append(subscribe(handle, worker_id, counted))
        return subscribers[-1]

    try:
        return make(target, one)
    except BaseException:
        for subscriber in subscribers:
            subscriber.close()
        raise


def answer(attached: Callable[[], Attachment]) -> Answer | Failure:
    """What an attachment says when it is notified, or the failure to say it."""
    try:
        return attached().notified()
    except ShmSyncError as error:
        return type(error).__name__, str(error)
    except Exception as error:
        return type(error).__name__, f"{error}\n{traceback.format_exc()}"


def attach(rref: Any, handle_text: str, worker_id: int, listening: bool = False) -> Answer | Failure:
    """RPC entry: attach the object that `rref` owns here, and answer as for a notification; ``listening``: from now on
    also to the bell."""
    return attach_as(rref, handle_text, worker_id, listening, ModuleAttachment)


def attach_as(rref: Any, handle_text: str, worker_id: int, listening: bool, make: Maker) -> Answer | Failure:
    """As `attach`, with the kind of attachment that `make` gives."""

    made: list[Attachment] = []

    def attached() -> Attachment:
        made.append(attach_object(rref.local_value(), handle_text, worker_id, make))
        if listening:
            made[0].listen()
        return made[0]

    said = answer(attached)
    return said if isinstance(said[0], str) else (*said[:2], os.getpid(), made[0].inner)


def notify(nonce: str, worker_id: int, version: int) -> Answer | Failure:
    """RPC entry: `version` is a hint that there is news; what is taken is what the shared rows say."""
    return answer(lambda: attached_as(nonce, worker_id))


def attached_as(nonce: str, worker_id: int) -> Attachment:
    """The attachment of a worker to a channel. Raises NotAttached."""
    with _lock:
        known = _attached.get((nonce, worker_id))
    if known is None:
        raise NotAttached(
            f"Worker {worker_id} (pid {os.getpid()} on {socket.gethostname()}) has not attached to channel {nonce}; "
            "the next push attaches it"
        )
    return known


def detach(nonce: str, worker_id: int) -> None:
    """RPC entry: let the worker's policy go, with the values that it has."""
    with _lock:
        _forget(nonce, worker_id)


def forget(target: Any) -> None:
    """Detach `target` from whatever it is attached to."""
    with _lock:
        for nonce, worker_id in [key for key, known in _attached.items() if known.target is target]:
            _forget(nonce, worker_id)


def _forget(nonce: str, worker_id: int) -> None:
    old = _attached.pop((nonce, worker_id), None)
    if old is not None:
        _remember(old)
        old.close()


def _remember(left: Attachment) -> None:
    newest = max(left.newest, _had(left.target))
    for key in [key for key, (reference, _) in _left.items() if reference() is None]:
        del _left[key]
    with contextlib.suppress(TypeError):  # not every object can be referred to weakly
        _left[id(left.target)] = weakref.ref(left.target), newest


def _had(target: Any) -> int:
    reference, newest = _left.get(id(target), (lambda: None, 0))
    return newest if reference() is target else 0


def last_version(rref: Any) -> int:
    """RPC entry: the newest version of any channel that the object of `rref` has followed here; 0 = none."""
    target = rref.local_value()
    with _lock:
        following = [known.newest for known in _attached.values() if known.target is target]
    return max([_had(target), *following])


def subscribe(handle: Handle, worker_id: int, counted: bool = True) -> Subscriber:
    """A worker's subscriber. ``counted``: as of Subscriber. One that is not takes a line only where nothing else shows
    that its process lives, and where there is room: others need theirs.

    Raises ChannelUnreachable and SubscribersExhausted, naming the worker, and what Subscriber raises.
    """
    name = f"worker-{worker_id}" if counted else f"around worker-{worker_id}"
    try:
        listed = counted or bool(handle.path)  # without a path the trainer sees its pid
        return Subscriber(handle, worker_id=worker_id, name=name, listed=listed, counted=counted)
    except SubscribersExhausted as error:
        if not counted:
            return Subscriber(handle, worker_id=worker_id, name=name, listed=False)
        raise SubscribersExhausted(f"Worker {worker_id}, pid {os.getpid()}: {error}") from None
    except ChannelUnreachable as error:
        text = f"Worker {worker_id} on host {socket.gethostname()}, pid {os.getpid()}: {error}"
        raise ChannelUnreachable(text) from None


def policy_of(target: Any) -> nn.Module:
    """The module that an object is, or has as its `policy`. Raises BindingError."""
    policy = target if isinstance(target, nn.Module) else getattr(target, "policy", None)
    if not isinstance(policy, nn.Module):
        raise BindingError(
            f"Expected an nn.Module or an object whose `policy` is one, got {type(target).__qualname__} with "
            f"{type(policy).__qualname__}"
        )
    return policy
