"""torchrl's weight-sync schemes over shared memory, under torchrl's own class names."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase

from .. import ids
from ..errors import LayoutError, ShmSyncError, WorkerIdError
from ..layout import build, match
from ..publisher import Publisher, check_options
from ..weights import flatten
from .collector import is_function
from .injection import devices_of
from .receiver import of_worker
from .releases import SCHEME, refusal
from .report import Lag, PushReport
from .scheme import SharedScheme
from .staleness import is_awaited, measure, summary
from .stamps import make_room_in
from .updater import RPCWeightUpdater


class RPCWeightSyncScheme(SharedScheme):
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

    def _inner_listen(self) -> bool:
        return is_awaited(*(self._options[name] for name in ("notify", "max_lag", "on_lag")))

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
        return owner._updater.version if owner._updater is not None else 0

    @property
    def last_push(self) -> PushReport | None:
        """What the last push did, also after the end."""
        owner = self._owner()
        return owner._updater.last_push if owner._updater is not None else None

    def lag(self) -> Lag:
        """How many versions each attached worker is behind; see RPCWeightUpdater.lag."""
        return self._pusher().lag()

    def shutdown(self) -> None:
        super().shutdown()
        updater = getattr(self, "_updater", None)  # a constructor may have failed before
        if updater is not None:
            updater.close()


class SharedMemWeightSyncScheme(SharedScheme):
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
        if params_map is not None or device_map_fn is not None:
            self._check_alone()
        if params_map is not None:
            self._send_each(params_map, getattr(context, "num_workers", None) or num_workers or len(params_map))
        elif device_map_fn is not None:
            self._send_each({worker: device_map_fn(worker, source) for worker in range(num_workers or 0)}, num_workers)
        else:
            source = self._source() if source is None else source
            if source is not None:
                self._push_first(source)
        if self._together is not None and context is not None:
            self._together.watch(context, self._push)

    def _send_each(self, weights: Mapping[int, Any], num_workers: int | None) -> None:
        """Publish each worker's own weights to it, the same object once; to everybody if that is who it is for.

        Raises WorkerIdError, and LayoutError naming the worker, before anything is written; for want of room what
        Publisher.publish raises, when others may have theirs.
        """
        channel = self._channel()
        ids.resolve(list(weights), num_workers or channel.max_subscribers)
        self._check_each(weights)
        workers_of: dict[int, list[int]] = {}
        for worker, one in weights.items():
            workers_of.setdefault(id(one), []).append(worker)
        for workers in workers_of.values():
            everybody = len(workers) == num_workers
            channel.publish(weights[workers[0]], worker_ids=None if everybody else workers)

    def _check_each(self, weights: Mapping[int, Any]) -> None:
        """Raise LayoutMismatch, UnsupportedLeaf or TiedLeavesDiffer if some would be refused after others went out."""
        layout = self._channel().layout
        for worker, one in weights.items():
            try:
                table = flatten(one)
                layout = layout or build(table, self._options["dtype"])
                match(layout, table)
            except LayoutError as error:
                raise of_worker(f"The weights for worker {worker}", error) from error

    def _setup_connection_and_weights_on_sender_impl(
        self, *, worker_idx: int | None = None, weights: Any = None
    ) -> None:
        if weights is not None:
            self._channel().publish(weights)

    def send(self, weights: Any = None, worker_ids: int | Iterable[int] | None = None) -> None:
        """Publish weights. ``weights``: None = the model's; a dict by worker id = each its own, to nobody else.
        ``worker_ids``: None = all, or all in that dict. The workers use them from their next forward on.

        Raises WorkerIdError, what Publisher.publish raises, and ShmSyncError before the scheme is connected.
        """
        self._check_connected()
        by_worker = isinstance(weights, Mapping) and not isinstance(weights, TensorDictBase)  # which is a Mapping too
        if by_worker and weights and all(isinstance(key, numbers.Integral) for key in weights):
            self._send_by_worker(weights, worker_ids)
        else:
            self._push_next(weights, self._resolve(worker_ids))

    def _send_by_worker(self, weights: Mapping[int, Any], worker_ids: Any) -> None:
        self._check_alone()
        wanted = list(weights) if worker_ids is None else self._resolve(worker_ids, self._channel().max_subscribers)
        self._resolve(list(weights))
        without = [worker for worker in wanted if worker not in weights]
        if without:
            raise WorkerIdError(
                f"There are no weights for workers {without}, only for {list(weights)}. Nothing was sent"
            )
        self._send_each({worker: weights[worker] for worker in wanted}, getattr(self.context, "num_workers", None))

    def _check_alone(self) -> None:
        if self._together is not None:
            raise ShmSyncError(
                "Weights by worker can't go with several models under one version; send each worker's own "
                f"{self.model_id!r} with worker_ids=[...]. Nothing was written"
            )

    def _resolve(self, worker_ids: Any, otherwise: int | None = None) -> Any:
        """Worker ids of the collector, which knows how many there are, or of ``otherwise`` so many; as they are given
        if nobody knows. Raises WorkerIdError."""
        workers = getattr(self.context, "num_workers", None) or otherwise
        if worker_ids is None or not workers:
            return worker_ids
        return ids.resolve(worker_ids, workers, devices_of(self.context, workers))

    @property
    def version(self) -> int:
        """The newest published version, also after the end; 0 = nothing yet."""
        owner = self._owner()
        return owner._publisher.version if owner._publisher is not None else 0

    def lag(self) -> Lag:
        """How many versions each attached process is behind what is addressed to it; see RPCWeightUpdater.lag.

        They switch at their forwards, so one that rests is behind after each push.
        """
        return summary(measure(self._channel(), {}))

    def shutdown(self) -> None:
        super().shutdown()
        publisher = getattr(self, "_publisher", None)
        if publisher is not None:
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
