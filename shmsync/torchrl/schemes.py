"""torchrl's weight-sync schemes over shared memory, under torchrl's own class names.

One object plays both parts. In the trainer it owns a channel; its pickled copies, which torchrl hands to the workers,
carry the channel's handle and attach there. So no message is needed before the first forward.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from .. import ids
from ..errors import ChannelClosed, ShmSyncError
from ..publisher import Publisher, check_options
from ..subscriber import Subscriber
from .collector import is_function
from .injection import devices_of
from .receiver import Idle, Receiver, received, stand_in
from .releases import SCHEME, refusal, scheme_base
from .report import Lag, PushReport
from .stamps import make_room_in
from .together import Together
from .updater import RPCWeightUpdater, check_timeout

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


class _SharedScheme(WeightSyncScheme):
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
        if self._owner()._ended_at is not None:
            raise ChannelClosed(f"This {type(self).__name__} was shut down; make another one")

    def _check_connected(self) -> None:
        self._check_open()
        if not (self.initialized_on_sender and self.synchronized_on_sender):
            raise ShmSyncError("Expected a scheme that is connected (init_on_sender, connect) before it sends")

    def _begin(self) -> None:
        self._handle_text: str | None = None
        self._own_handle: str | None = None
        self._ended_at: int | None = None  # the version that there was
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
        more["stamped"] = self._stamp_steps
        otherwise = stand_in(type(context), self._fallback)
        made = received(self._handle_text, worker_idx or 0, otherwise, more)
        _pass_to_inner_processes(context, model_id, made)
        self._receiver = made if isinstance(made, Receiver) else Idle(self._handle_text, worker_idx or 0)
        self._receiver.init_on_receiver(context=context, model=model)
        self.model = model
        if context is not None:
            WeightSyncScheme.context.fset(self, context)

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

    def __setstate__(self, state: dict[str, Any]) -> None:
        WeightSyncScheme.__init__(self, state.get("strategy_str", "tensordict"))
        self._together = None
        self._begin()
        self.__dict__.update(state)

    def shutdown(self) -> None:
        """End what this object owns: in the trainer the channel, of which workers keep the weights that they have."""
        super().shutdown()
        self._own_handle = None
        self._leave()


class RPCWeightSyncScheme(_SharedScheme):
    """Pushes weights to RPC collectors of this machine through shared memory; torchrl's scheme of that name sends them.

    ``RPCCollector(..., weight_sync_schemes={"policy": RPCWeightSyncScheme()})``, and nothing else changes. Collectors
    inside the workers' collectors follow the trainer's channel themselves.

    ``strategy``: as torchrl's, for what it extracts itself. ``timeout``: seconds that a push waits for the workers, and
    a worker for the first weights. ``notify``, ``dtype``, ``max_workers``, ``max_lag``, ``on_lag``, ``fallback``,
    ``stamp_steps``, ``first_version``, ``checksum``, ``storage``: see RPCWeightUpdater.
    Contract: one copy per push; workers begin with the trainer's weights, with a ``policy_factory`` too; a worker whose
    trainer has no weights within ``timeout`` raises WaitTimeout, naming itself, at its first forward.
    """

    def __init__(
        self,
        strategy: str = "tensordict",
        *,
        timeout: float = 60.0,
        notify: str = "rpc",
        dtype: torch.dtype | None = None,
        max_workers: int = 256,
        max_lag: int | None = None,
        on_lag: str = "wait",
        fallback: str | None = None,
        stamp_steps: bool = False,
        first_version: int = 1,
        checksum: bool = False,
        storage: str = "memfd",
    ) -> None:
        options = {
            **{"notify": notify, "dtype": dtype, "max_workers": max_workers, "max_lag": max_lag, "on_lag": on_lag},
            **{"fallback": fallback, "first_version": first_version, "checksum": checksum, "storage": storage},
        }
        super().__init__(strategy, timeout, stamp_steps, options)
        self._updater: RPCWeightUpdater | None = self._make_updater()

    def _begin(self) -> None:
        super()._begin()
        self._updater = None
        self._last_report: PushReport | None = None

    def _handle(self) -> str:
        return str(self._pusher()._open().handle)

    def _pusher(self) -> RPCWeightUpdater:
        self._check_open()
        owner: RPCWeightSyncScheme = self._owner()
        if owner._updater is None:
            owner._updater = owner._make_updater()
        return owner._updater

    def _make_updater(self) -> RPCWeightUpdater:
        return RPCWeightUpdater(timeout=self._timeout, stamp_steps=self._stamp_steps, **self._options)

    def _push(self, weights: Any, worker_ids: Any, partial: bool) -> None:
        self._pusher().push_weights(weights, worker_ids, partial=partial)

    def _init_on_sender_impl(
        self, *, model_id: str, context: Any = None, num_workers: int | None = None, **kwargs: Any
    ) -> None:
        if getattr(context, "collector_rrefs", None) is None:
            raise ShmSyncError(
                f"Expected a context with collector_rrefs, an RPCCollector, got {type(context).__qualname__}"
            )
        self.model_id, self.context = model_id, context
        updater = self._pusher()
        updater.collector_rrefs, updater._num_workers = context.collector_rrefs, num_workers
        updater._collector_ref = self._context_ref
        if self._together is not None:
            self._together.watch(context, self._push)

    def _setup_connection_and_weights_on_sender_impl(
        self, *, worker_idx: int | None = None, weights: Any = None
    ) -> None:
        source = self._source() if weights is None else weights
        if source is not None:
            self._push_first(source)

    def send(self, weights: Any = None, worker_ids: Any = None) -> None:
        """Publish weights and await the workers' answers. ``weights``: None = the model's. ``worker_ids``: None = all.

        Raises what RPCWeightUpdater.push_weights raises, and ShmSyncError before the scheme is connected.
        """
        self._check_connected()
        self._push_next(weights, worker_ids)

    @property
    def version(self) -> int:
        """The newest published version, also after the end; 0 = nothing yet."""
        owner = self._owner()
        return owner._updater.version if owner._updater is not None else owner._ended_at or 0

    @property
    def last_push(self) -> PushReport | None:
        """What the last push did, also after the end."""
        owner = self._owner()
        return owner._updater.last_push if owner._updater is not None else owner._last_report

    def lag(self) -> Lag:
        """How many versions each attached worker is behind; see RPCWeightUpdater.lag."""
        return self._pusher().lag()

    def shutdown(self) -> None:
        super().shutdown()
        updater, self._updater = getattr(self, "_updater", None), None
        if updater is not None:
            self._ended_at, self._last_report = updater.version, updater.last_push
            updater.close()


class SharedMemWeightSyncScheme(_SharedScheme):
    """Shares weights with the processes of a MultiSync- or MultiAsyncCollector through one channel.

    ``MultiSyncCollector(..., weight_sync_schemes={"policy": SharedMemWeightSyncScheme()})``. Unlike with torchrl's
    scheme of that name, the trainer's own parameters are not the shared buffer: steps are invisible until they are
    sent, and no forward sees half of them. ``send(worker_ids=[...])`` reaches these workers and no others.

    ``strategy``, ``sync``: as torchrl's; what is sent is picked up by each worker's next forward in either case.
    ``timeout``: seconds that a worker waits for the first weights. ``dtype``, ``checksum``, ``storage``,
    ``first_version``: see Publisher. ``max_workers``, ``stamp_steps``: see RPCWeightUpdater.
    Contract: one copy per push, whatever the number of processes.
    """

    def __init__(
        self,
        strategy: str = "tensordict",
        sync: bool = True,
        *,
        timeout: float = 60.0,
        dtype: torch.dtype | None = None,
        max_workers: int = 256,
        checksum: bool = False,
        storage: str = "memfd",
        stamp_steps: bool = False,
        first_version: int = 1,
    ) -> None:
        options: dict[str, Any] = {
            "dtype": dtype,
            "max_subscribers": max_workers,
            "checksum": checksum,
            "storage": storage,
        }
        check_options(**options, first_version=first_version)
        super().__init__(strategy, timeout, stamp_steps, {**options, "first_version": first_version})
        self.sync = sync

    def _begin(self) -> None:
        super()._begin()
        self.sync = True
        self._publisher: Publisher | None = None

    def _channel(self) -> Publisher:
        self._check_open()
        owner: SharedMemWeightSyncScheme = self._owner()
        if owner._publisher is None:
            owner._publisher = Publisher(name=type(self).__name__, timeout=self._timeout, **self._options)
        return owner._publisher

    def _push(self, weights: Any, worker_ids: Any, partial: bool) -> None:
        self._channel().publish(weights, worker_ids=worker_ids, partial=partial)

    def _handle(self) -> str:
        return str(self._channel().handle)

    def _init_on_sender_impl(
        self,
        *,
        model_id: str | None = None,
        context: Any = None,
        params_map: Mapping[int, Any] | None = None,
        weights: Any = None,
        model: Any = None,
        devices: Any = None,
        device_map_fn: Any = None,
        num_workers: int | None = None,
        ctx: Any = None,
    ) -> None:
        self.model_id = model_id or "policy"
        _check_processes(context)
        self._address()  # before processes are forked, which are handed this object itself
        if context is not None:
            self.context = context
            if self._stamp_steps:
                make_room_in(getattr(context, "replay_buffer", None))
        if model is not None:
            self.model = model
        source = weights if weights is not None else model
        if params_map is not None:
            self._send_each(params_map)
        elif device_map_fn is not None:
            self._send_each({worker: device_map_fn(worker, source) for worker in range(num_workers or 0)})
        else:
            source = self._source() if source is None else source
            if source is not None:
                self._push_first(source)
        if self._together is not None and context is not None:
            self._together.watch(context, self._push)

    def _send_each(self, weights: Mapping[int, Any]) -> None:
        """Publish each worker's own weights to it; once to all where they are the same object."""
        different = {id(one): one for one in weights.values()}
        if len(different) == 1:
            self._channel().publish(next(iter(different.values())))
            return
        for one in different.values():
            self._channel().publish(one, worker_ids=[worker for worker, its in weights.items() if its is one])

    def _setup_connection_and_weights_on_sender_impl(
        self, *, worker_idx: int | None = None, weights: Any = None
    ) -> None:
        if weights is not None:
            self._channel().publish(weights)

    def send(self, weights: Any = None, worker_ids: int | Iterable[int] | None = None) -> None:
        """Publish weights. ``weights``: None = the model's; a dict by worker id = each its own. ``worker_ids``: None =
        all. The workers use them from their next forward on.

        Raises WorkerIdError, what Publisher.publish raises, and ShmSyncError before the scheme is connected.
        """
        self._check_connected()
        by_worker = isinstance(weights, Mapping) and not isinstance(weights, TensorDictBase)  # which is a Mapping too
        if by_worker and weights and all(isinstance(key, int) for key in weights):
            self._resolve(list(weights))
            self._send_each(weights)
        else:
            self._push_next(weights, self._resolve(worker_ids))

    def _resolve(self, worker_ids: Any) -> Any:
        """Worker ids of the collector, which knows how many there are. Raises WorkerIdError."""
        workers = getattr(self.context, "num_workers", None)
        if worker_ids is None or not workers:
            return worker_ids
        return ids.resolve(worker_ids, workers, devices_of(self.context, workers))

    @property
    def version(self) -> int:
        """The newest published version, also after the end; 0 = nothing yet."""
        owner = self._owner()
        return owner._publisher.version if owner._publisher is not None else owner._ended_at or 0

    def shutdown(self) -> None:
        super().shutdown()
        publisher, self._publisher = getattr(self, "_publisher", None), None
        if publisher is not None:
            self._ended_at = publisher.version
            publisher.close()


def _check_processes(context: Any) -> None:
    """Raise ShmSyncError for a collector that has nobody to push to, or nothing to push."""
    if context is None:
        return
    if not getattr(context, "num_workers", None):
        raise ShmSyncError(
            "Expected a collector with processes of its own, a MultiSyncCollector, say, got "
            f"{type(context).__qualname__}: a collector in this process uses the policy itself, so leave the scheme out"
        )
    if is_function(getattr(context, "policy", None)):
        raise ShmSyncError(
            f"Expected a policy that is an nn.Module, got {type(context.policy).__qualname__}: a function has no "
            "weights, so leave the scheme out"
        )


def _has_extra_state(model: Any) -> bool:
    """Whether torchrl's own schemes would send more than parameters and buffers."""
    return isinstance(model, nn.Module) and type(model).get_extra_state is not nn.Module.get_extra_state


def _weights(model: Any) -> Any:
    """A policy that is a function has weights: none."""
    return TensorDict() if is_function(model) else model


def _register() -> None:
    """Let torchrl find them by name, where its release has names (0.14)."""
    if refusal(SCHEME) is not None:
        return
    try:
        from torchrl.weight_update.weight_sync_schemes import register_weight_sync_backend
    except ImportError:
        return
    register_weight_sync_backend("shmsync_rpc")(RPCWeightSyncScheme)
    register_weight_sync_backend("shmsync_shared")(SharedMemWeightSyncScheme)


_register()


def _pass_to_inner_processes(context: Any, model_id: str, receiver: Any) -> None:
    """Let a collector that is about to start processes hand them the receiver: they follow the channel themselves.

    torchrl takes a scheme there as a promise that the policy is a module.
    """
    if context is None or not hasattr(type(context), "_run_processes") or getattr(context, "procs", None):
        return
    if is_function(getattr(context, "policy", None)):
        return
    schemes = dict(getattr(context, "_weight_sync_schemes", None) or {})
    schemes[model_id] = receiver
    context._weight_sync_schemes = schemes
    if isinstance(getattr(context, "policy", None), nn.Module) and not hasattr(context, "policy_weights"):
        context.policy_weights = None
