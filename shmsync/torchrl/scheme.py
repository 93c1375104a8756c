"""What the two weight-sync schemes have in common.

One object plays both parts. In the trainer it owns a channel; its pickled copies, which torchrl hands to the workers,
carry the channel's handle and attach there. So no message is needed before the first forward.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from tensordict import TensorDict
from torch import nn

from ..errors import ChannelClosed, ShmSyncError
from ..subscriber import Subscriber
from .collector import is_function
from .receiver import Idle, Receiver, received, stand_in, starts_processes
from .releases import scheme_base
from .together import Together
from .updater import check_timeout

_log = logging.getLogger("shmsync")

WeightSyncScheme: Any = scheme_base()
_PASSED_ON = (
    "_options",
    "_timeout",
    "_stamp_steps",
    "_fallback",
    "strategy_str",
    "_strategy",
    "_model_id",
    "_together",
)


class SharedScheme(WeightSyncScheme):
    """What both schemes have in common: a channel in the trainer, and a receiver in each worker."""

    def __init__(self, strategy: str, timeout: float, stamp_steps: bool, options: Mapping[str, Any]) -> None:
        super().__init__(strategy)
        check_timeout(timeout)
        self._timeout, self._stamp_steps, self._options = timeout, stamp_steps, dict(options)
        self._fallback = options.get("fallback") is not None
        self._together: Together | None = None
        self._begin()

    @classmethod
    def together(cls, *model_ids: str, **options: Any) -> dict[str, Any]:
        """Schemes for several models that change together, under one version: what ``weight_sync_schemes=`` takes.

        ``model_ids``: as torchrl has them, "policy" or the path of an attribute of the collector ("env.value_net").
        ``options``: of the class. One update of several of them (``weights_dict=``) is one push; one of a single model
        leaves the others as they are.
        """
        together = Together(model_ids)
        if options.get("fallback"):
            raise ShmSyncError("Several models share one channel, so all their workers must map it: leave fallback=")
        schemes = {name: cls(**options) for name in model_ids}
        together.owner = next(iter(schemes.values()))
        for scheme in schemes.values():
            scheme._together = together
        return schemes

    def _owner(self) -> Any:
        """The scheme that has the channel."""
        return self._together.owner if self._together is not None else self

    def _push(self, weights: Any, worker_ids: Any, partial: bool) -> None:
        raise NotImplementedError

    def _push_first(self, source: Any) -> None:
        """Publish a model's weights to begin with; with others together, when those of all are known."""
        if _has_extra_state(source):
            _log.warning(
                "The extra state of %s (%s) is not pushed: only parameters and buffers are. Where it matters, as the "
                "statistics of a VecNormV2 do, keep it in buffers, or give this model a scheme of torchrl's",
                self.model_id or "policy",
                type(source).__qualname__,
            )
        if self._together is not None:
            source = self._together.add_source(self.model_id or "policy", source)
        if source is not None:
            self._push(source, None, False)

    def _push_next(self, weights: Any, worker_ids: Any) -> None:
        prepared = self.prepare_weights(weights, self.model_id or "policy", self._strategy, self.context)
        if self._together is not None:
            self._together.send(self.model_id or "policy", prepared, worker_ids, self._push)
        else:
            self._push(prepared, worker_ids, False)

    def _check_open(self) -> None:
        if self._owner()._ended:
            raise ChannelClosed(f"This {type(self).__name__} was shut down; make another one")

    def _check_connected(self) -> None:
        self._check_open()
        if not (self.initialized_on_sender and self.synchronized_on_sender):
            raise ShmSyncError("Expected a scheme that is connected (init_on_sender, connect) before it sends")

    def _begin(self) -> None:
        self._handle_text: str | None = None
        self._own_handle: str | None = None
        self._ended = False
        self._receiver: Receiver | None = None
        self._subscriber: Subscriber | None = None  # of a model without a collector

    def _handle(self) -> str:
        """The channel's address; it is made for that if need be, before there are weights."""
        raise NotImplementedError

    def _address(self) -> str:
        """The same, and in a forked child as well, where the channel can't be asked."""
        owner = self._owner()
        if owner._own_handle is None:
            owner._own_handle = owner._handle()
        return str(owner._own_handle)

    # --- in the trainer

    def prepare_weights(self, weights: Any, model_id: str, strategy: Any = None, context: Any = None) -> Any:
        """The weights as they are published: the model itself where torchrl would extract a copy of its weights."""
        return self._model() if weights is None else _weights(weights)

    def _model(self) -> Any:
        return _weights(WeightSyncScheme.model.fget(self))

    def _source(self) -> Any:
        """The weights of the trainer's model. With a policy_factory alone, the trainer builds a policy of its own from
        it, so that all workers begin with the same weights."""
        context, model_id = self.context, self.model_id or "policy"
        with contextlib.suppress(AttributeError):
            if (model := self._model()) is not None:
                return model
        factories = getattr(context, "policy_factory", None)
        if model_id != "policy" or context is None or not factories:
            return None
        made = (factories[0] if isinstance(factories, (list, tuple)) else factories)()
        context.policy = self.model = made
        return made

    # --- in a worker

    def _init_on_receiver_impl(
        self, model_id: str, context: Any = None, worker_idx: int | None = None, model: Any = None, **kwargs: Any
    ) -> None:
        self.model_id, self._worker_idx = model_id, worker_idx
        if self._receiver is not None and self.context is None and context is not None:
            self.context = context  # it had the bare policy before
            return
        if self._handle_text is None:
            raise ShmSyncError(
                f"Expected a copy of the trainer's {type(self).__name__} in worker {worker_idx}, got one that never "
                "was in a trainer; give the same object to the collector there"
            )
        names = self._together.names if self._together is not None else ()
        more: dict[str, Any] = {"first_seconds": self._timeout, "name": model_id if names else "", "names": names}
        more |= {"stamped": self._stamp_steps, "listening": self._inner_listen()}
        otherwise = stand_in(type(context), self._fallback)
        made = received(self._handle_text, worker_idx or 0, otherwise, more)
        _pass_to_inner_processes(context, model_id, made)
        self._receiver = made if isinstance(made, Receiver) else Idle(self._handle_text, worker_idx or 0)
        self._receiver.init_on_receiver(context=context, model=model)
        self.model = model
        if context is not None:
            WeightSyncScheme.context.fset(self, context)

    def _inner_listen(self) -> bool:
        """Whether inner processes shall answer to the bell."""
        return False

    def _setup_connection_and_weights_on_receiver_impl(self, *, worker_idx: int | None = None) -> None:
        if self._receiver is None:
            return
        self._receiver.connect()
        if self.context is None and isinstance(self.model, nn.Module):
            # It may get a collector later, and moves there then.
            self._bind(self.model)

    def _bind(self, model: nn.Module) -> None:
        """Let a model follow the channel; with others together, when all of them are there."""
        models: Any = model
        if self._together is not None:
            models = self._together.models
            models[self.model_id or "policy"] = model
            if len(models) < len(self._together.names):
                return
        self._subscriber = Subscriber(self._handle_text or "", worker_id=self._worker_idx)
        self._subscriber.bind(models)

    @property
    def initialized_on_receiver(self) -> bool:
        """As of Receiver: whether it has its collector."""
        return bool(self._initialized_on_receiver) and self.context is not None

    @property
    def context(self) -> Any:
        """The collector. In a worker, setting it attaches the collector."""
        return self._context_ref() if self._context_ref is not None else None

    @context.setter
    def context(self, context: Any) -> None:
        WeightSyncScheme.context.fset(self, context)
        if self._receiver is not None and context is not None:
            self._receiver.context = context
            self._leave()

    def _leave(self) -> None:
        """Let a model go that was bound without a collector."""
        subscriber, self._subscriber = getattr(self, "_subscriber", None), None
        if subscriber is not None:
            subscriber.close()

    def receive(self, timeout: float | None = None) -> None:
        """Take the newest version, if that is the right moment; else the next forward does."""
        if self._receiver is None:
            raise ShmSyncError("Expected a scheme that was initialised in a worker (init_on_receiver)")
        if self._subscriber is not None:
            self._subscriber.refresh()
        else:
            self._receiver.receive()

    def create_transport(self, **kwargs: Any) -> Any:
        """Raises ShmSyncError: weights are in shared memory, there is nothing to carry them."""
        raise ShmSyncError(f"{type(self).__name__} has no transports: workers map the weights")

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {
            **{name: value for name, value in state.items() if name in _PASSED_ON or name.startswith("_initialized")},
            "_handle_text": self._handle_text if self._receiver is not None else self._address(),
        }

    def __reduce_ex__(self, protocol: Any) -> Any:
        make, arguments, state = super().__reduce_ex__(max(2, protocol))[:3]
        return arrived, (make, arguments, state)

    def __setstate__(self, state: dict[str, Any]) -> None:
        WeightSyncScheme.__init__(self, state.get("strategy_str", "tensordict"))
        self._together = None
        self._begin()
        self.__dict__.update(state)

    def shutdown(self) -> None:
        """End what this object owns: in the trainer the channel, of which workers keep the weights that they have."""
        super().shutdown()
        self._ended, self._own_handle = True, None
        self._leave()


def arrived(make: Callable[..., Any], arguments: tuple[Any, ...], state: dict[str, Any]) -> Any:
    """A scheme as it arrives in a process, which may have a program's own class from torchrl's module, not from here.

    Raises ShmSyncError then.
    """
    kind = arguments[0]
    if not issubclass(kind, SharedScheme):
        who = f"{kind.__module__}.{kind.__qualname__}"
        raise ShmSyncError(
            f"{who} is derived from torchrl's scheme in this process, pid {os.getpid()}, and from shmsync's in the "
            "trainer, where shmsync.install() or `python -m shmsync run` has put it. Call shmsync.install() before "
            "the name is imported from torchrl, in the same file, or derive that class from shmsync's"
        )
    scheme = make(*arguments)
    scheme.__setstate__(state)
    return scheme


def _has_extra_state(model: Any) -> bool:
    """Whether torchrl's own schemes would send more than parameters and buffers."""
    return isinstance(model, nn.Module) and type(model).get_extra_state is not nn.Module.get_extra_state


def _weights(model: Any) -> Any:
    """A policy that is a function has weights: none."""
    return TensorDict() if is_function(model) else model


def _pass_to_inner_processes(context: Any, model_id: str, receiver: Any) -> None:
    """Let a collector that is about to start processes hand them the receiver: they follow the channel themselves.

    torchrl takes a scheme there as a promise that the policy is a module.
    """
    if context is None or not starts_processes(context) or is_function(getattr(context, "policy", None)):
        return
    schemes = dict(getattr(context, "_weight_sync_schemes", None) or {})
    schemes[model_id] = receiver
    context._weight_sync_schemes = schemes
    if isinstance(getattr(context, "policy", None), nn.Module) and not hasattr(context, "policy_weights"):
        context.policy_weights = None
