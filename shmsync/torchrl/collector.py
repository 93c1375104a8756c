"""A torchrl collector in a worker: its policy bound to the channel, with the gate where its rollout calls the policy.

Known by what it has, not by its class, so that every torchrl release that has these parts will do.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tensordict import TensorDict
from torch import nn

from .. import remote
from ..binding import Binding, binding_of
from ..errors import BindingError, ChannelError, WaitTimeout
from .rollout import CALLED_POLICY, Batches, Doorman, makes_steps, rests_between_batches, steps_at_random
from .stamps import Stamps, has_entries

_log = logging.getLogger("shmsync")


class PolicyProxy:
    """Stands where the collector's rollout finds its policy: each call is a forward through the gate.

    It is no part of the policy, so neither pickling nor deepcopying nor compiling the policy meets it.
    """

    def __init__(self, binding: Binding, policy: Callable[..., Any], first: Callable[[], None] | None = None) -> None:
        self.__dict__.update(_binding=binding, _policy=policy, _first=first)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._first is not None:
            self._first()
            self.__dict__["_first"] = None
        return self._binding.call(self._policy, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_policy"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._policy, name, value)

    def __repr__(self) -> str:
        return repr(self._policy)


class CollectorAttachment(remote.Following):
    """Binds a collector's policy.

    While its `next()` or a rollout runs, only the entry of a forward switches, and that is where the policy-version
    tracker is set: so the stamp of each step is the version that its forward used. While it rests, or makes random
    steps without a forward, a notification switches at once.

    ``first_seconds``: how long the first forward waits for the trainer's first weights; 0 = it runs on its own.
    ``stamped``: each step gets an entry with the version of its forward, see Stamps.
    ``names``: of several models that follow the channel together; they switch where the policy is called, and nowhere
    else in a rollout, so that a step sees one version of all of them.
    """

    def __init__(
        self,
        collector: Any,
        subscribe: remote.Subscribe,
        first_seconds: float = 0.0,
        names: tuple[str, ...] = (),
        stamped: bool = False,
    ) -> None:
        super().__init__(collector, subscribe())
        self._running, self._alone, self._first_seconds = 0, not names, first_seconds
        stamped = stamped or has_entries(collector)
        self._stamps = Stamps(collector, stamped)
        with Doorman(collector) as door:
            if _gate(door.policy) is None:  # else it keeps switches and forwards apart, and the new one takes over
                door.nobody_inside()
            self._bind(names, door.policy)
        # Inner processes make their batches without `next`.
        wrapped = ("next", "shutdown", *(["rollout"] if hasattr(collector, "rollout") else []))
        self._methods = {name: _bare(getattr(collector, name)) for name in wrapped}
        for name in wrapped:
            setattr(collector, name, getattr(self, f"_{name}"))

    def _bind(self, names: tuple[str, ...], called: Any) -> None:
        """Bind the models, with the gate where the collector calls its policy, which it does as `called`."""
        collector, own = self.target, _bare(called)
        known = collector.policy if hasattr(collector, CALLED_POLICY) else own
        graphs = bool(getattr(collector, "cudagraphed_policy", False) or getattr(collector, "compiled_policy", False))
        policy = _module_of(known, graphs)
        models = {name: _model(collector, name) for name in names} if names else {"": policy}
        # Before torchrl 0.11 a policy is called as the module that others know it as: it has the gate itself then.
        place = None if isinstance(own, nn.Module) else "policy"
        self._place = CALLED_POLICY if hasattr(collector, CALLED_POLICY) else place
        self._binding = Binding(self._subscriber, models, wrap=self._place is None, steady=graphs)
        self._binding.at_entry(self._stamps.set)
        if self._place is not None:
            self._own = own
            self._proxy = PolicyProxy(self._binding, own, self._await_first if self._first_seconds else None)
            setattr(collector, self._place, self._proxy)
        _replace_weights(collector, policy)

    def notified(self) -> tuple[int, int]:
        with self._lock:  # no batch begins meanwhile: its environment may call one of the models, past the gate
            if not self._running or (self._alone and steps_at_random(self.target)):
                return self._after(self._binding.follow)
        return self._after(lambda: self._binding.version)

    def close(self) -> None:
        # A later attachment may have put its own in these places.
        if self._place is not None and getattr(self.target, self._place, None) is self._proxy:
            setattr(self.target, self._place, self._own)
        for name, method in self._methods.items():
            if getattr(getattr(self.target, name), "__self__", None) is self:
                setattr(self.target, name, method)
        self._leave()

    def _await_first(self) -> None:
        """Wait for the trainer's first weights. Raises WaitTimeout, naming the worker, or PublisherGone."""
        if self._binding.version:
            return
        try:
            self._subscriber.wait(1, self._first_seconds)
        except WaitTimeout:
            raise WaitTimeout(
                f"Worker {self._subscriber.worker_id} (pid {os.getpid()}) has had no weights from its trainer, pid "
                f"{self._subscriber.handle.pid}, within {self._first_seconds} s. The trainer connects its weight-sync "
                "scheme when all workers have started: has one of them failed?"
            ) from None

    @contextmanager
    def _making_steps(self) -> Iterator[None]:
        with self._lock:
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1

    def _next(self, *args: Any, **kwargs: Any) -> Any:
        with self._making_steps():
            return self._methods["next"](*args, **kwargs)

    def _rollout(self, *args: Any, **kwargs: Any) -> Any:
        with self._making_steps():
            self._stamps.begin()
            return self._methods["rollout"](*args, **kwargs)

    def _shutdown(self, *args: Any, **kwargs: Any) -> Any:
        shutdown = self._methods["shutdown"]
        remote.forget(self.target)
        return shutdown(*args, **kwargs)


def _model(collector: Any, name: str) -> nn.Module:
    """One of several models of a collector, by torchrl's path."""
    from torchrl.weight_update.utils import _resolve_model

    model = _resolve_model(collector, name)
    if not isinstance(model, nn.Module):
        raise BindingError(
            f"Expected an nn.Module as model {name!r} of this {type(collector).__qualname__}, got "
            f"{type(model).__qualname__}"
        )
    return model


def is_function(policy: Any) -> bool:
    """Whether a policy has no weights, since it is no module: it acts at random, say."""
    return callable(policy) and not isinstance(policy, nn.Module)


def _replace_weights(collector: Any, policy: nn.Module) -> None:
    """Let go of the storages from before the binding, which would be a second private copy of the weights."""
    if not hasattr(collector, "policy_weights"):
        return
    before, collector.policy_weights = collector.policy_weights, TensorDict.from_module(policy)
    updater = getattr(collector, "weight_updater", None)
    if updater is not None and getattr(updater, "policy_weights", None) is before:  # before torchrl 0.11
        updater.policy_weights = collector.policy_weights


def _gate(called: Any) -> Any:
    """The binding that a policy's forwards go through, if it is bound already."""
    if isinstance(called, PolicyProxy):
        return called.__dict__["_binding"]
    return binding_of(called) if isinstance(called, nn.Module) else None


def _module_of(policy: Any, compiled: bool) -> nn.Module:
    """The module whose weights a policy uses; an empty one for a function.

    Before torchrl 0.11 a collector that compiles its policy puts in its place a function around it, or an object that
    has it.
    """
    wrapped = (getattr(policy, "__wrapped__", None), getattr(policy, "module", None)) if compiled else ()
    return next((one for one in (policy, *wrapped) if isinstance(one, nn.Module)), nn.Module())


def _bare(called: Any) -> Any:
    """What an earlier attachment has wrapped, or `called` itself."""
    if isinstance(called, PolicyProxy):
        return called.__dict__["_policy"]
    earlier = getattr(called, "__self__", None)
    if isinstance(earlier, CollectorAttachment):
        return earlier._methods[called.__name__.lstrip("_")]
    return called


class OuterAttachment:
    """A collector whose inner processes have bound themselves to the channel: here there is nothing to switch.

    By its pid the trainer sees that it lives; where pids say nothing, in channels of files, by a line of the roster,
    which is not the worker's. ``nonce``: of the channel that they follow. Raises ChannelError if it is another one.
    """

    def __init__(self, collector: Any, subscribe: remote.Subscribe, nonce: str) -> None:
        self.target, self._subscriber = collector, subscribe(counted=False)
        if nonce != self._subscriber.handle.nonce:
            raise ChannelError(
                f"The inner processes of worker {self._subscriber.worker_id} (pids {', '.join(map(str, self.inner))}) "
                "follow the channel that they were started with, and can't be taken over by another one: push with the "
                "updater or scheme that the RPCCollector was made with, or make a new RPCCollector"
            )

    @property
    def inner(self) -> tuple[int, ...]:
        """As Attachment says; none before they have started."""
        return tuple(process.pid for process in getattr(self.target, "procs", None) or ())

    @property
    def newest(self) -> int:
        """The newest version that is addressed to the inner processes."""
        return self._subscriber.offered()

    def listen(self) -> None:
        """No answer from here: the inner processes give theirs."""

    def notified(self) -> tuple[int, int]:
        pids = self.inner
        inner = [line.used for line in self._subscriber.peers() if line.pid in pids]
        return min(inner, default=0), self._subscriber.offered()

    def close(self) -> None:
        self._subscriber.close()


class EmptyAttachment(remote.ModuleAttachment):
    """A collector with inner processes whose policy is a function: there is nothing to bind in them, and here versions
    are taken without weights."""

    def __init__(self, collector: Any, subscribe: remote.Subscribe) -> None:
        self._nothing = nn.Module()
        super().__init__(collector, subscribe)

    def _module_of(self, target: Any) -> nn.Module:
        return self._nothing


class CopyingAttachment:
    """A collector with inner processes that could not be reached when they started: it passes each version
    on itself, in the way that its torchrl release has for that.

    Where they rest between two batches it is passed on between two batches, so that no forward sees parts of two
    versions. Elsewhere one may, as with torchrl's own classes.
    """

    inner: tuple[int, ...] = ()

    def __init__(self, collector: Any, subscribe: remote.Subscribe, stamped: bool = False) -> None:
        if stamped:
            raise BindingError(
                f"The inner processes of this {type(collector).__name__} had started before the channel was known, so "
                "their steps can't be stamped: give RPCCollector the updater as weight_updater=, or leave stamp_steps="
            )
        if getattr(collector, "weight_updater", self) is None and not getattr(collector, "_weight_sync_schemes", None):
            raise BindingError(
                f"This {type(collector).__name__} was made with a policy_factory, and its torchrl release can't pass "
                "weights on to inner processes then: give RPCCollector a policy, or use a newer torchrl"
            )
        self.target, self._subscriber = collector, subscribe()
        self._passed_on = 0
        self._batches = Batches(collector) if rests_between_batches(collector) else None
        _log.warning(
            "Worker %s: the inner processes of this %s had started before the channel was known. It passes each "
            "version on to them, a second copy. From torchrl 0.11 on weight_updater= of RPCCollector lets them map the "
            "channel themselves",
            self._subscriber.worker_id,
            type(collector).__name__,
        )

    @property
    def newest(self) -> int:
        """The newest version that it has passed on."""
        return self._passed_on

    def listen(self) -> None:
        """No answer but to messages: each is a copy to the inner processes, and two at once would be one too many."""

    def notified(self) -> tuple[int, int]:
        if self._batches is None:
            self._pass_on()
        else:
            self._batches.before_the_next(self._pass_on)
        return self._passed_on, self._subscriber.seen

    def close(self) -> None:
        if self._batches is not None:
            self._batches.leave()
        self._subscriber.close()

    def _pass_on(self) -> None:
        if self._subscriber.seen > self._passed_on:
            with self._subscriber.lease() as lease:
                self.target.update_policy_weights_(lease.weights)
                self._passed_on = lease.version


def attachment(
    target: Any,
    subscribe: remote.Subscribe,
    first_seconds: float = 0.0,
    names: tuple[str, ...] = (),
    stamped: bool = False,
) -> remote.Attachment:
    """The right attachment for an object: a collector, a collector of collectors, a module or what has one."""
    from .receiver import Receiver

    schemes = getattr(target, "_weight_sync_schemes", None) or {}
    if hasattr(type(target), "_run_processes") and is_function(getattr(target, "policy", None)):
        return EmptyAttachment(target, subscribe)
    for scheme in schemes.values():
        if isinstance(scheme, Receiver):
            return OuterAttachment(target, subscribe, scheme.nonce)
    if makes_steps(target):
        return CollectorAttachment(target, subscribe, first_seconds, names, stamped)
    if hasattr(target, "procs") and hasattr(target, "update_policy_weights_"):
        return CopyingAttachment(target, subscribe, stamped)
    if hasattr(target, "policy") or isinstance(target, nn.Module):
        return remote.ModuleAttachment(target, subscribe)
    raise BindingError(f"Expected a collector, a module, or an object with a policy, got {type(target).__qualname__}")


def attach(
    rref: Any, handle_text: str, worker_id: int, listening: bool, stamped: bool = False
) -> remote.Answer | remote.Failure:
    """RPC entry: `remote.attach` for a collector."""
    return remote.attach_as(rref, handle_text, worker_id, listening, functools.partial(attachment, stamped=stamped))
