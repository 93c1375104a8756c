"""RPCWeightUpdater: the drop-in for torchrl's class of that name."""

from __future__ import annotations

import numbers
import threading
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch.distributed import rpc

from .. import ids
from ..errors import ChannelClosed, LimitError, NothingPublished, PushError, PushTimeout, ShmSyncError
from ..publisher import Publication, Publisher, check_options
from .answers import newest_used
from .base import UpdaterBase
from .injection import devices_of, inject, weights_of
from .messenger import Messenger, Round
from .releases import UPDATER, look, require_updater
from .report import Lag, PushReport, WorkerReport
from .staleness import Behind, Staleness, is_awaited, measure, summary

NOTIFY = ("rpc", "memory")
FALLBACK = (None, "rpc")
# Workers that are there already are asked once what they have used before; nobody waits longer for a dead one.
_ASK_SECONDS = 1.0


class RPCWeightUpdater(UpdaterBase):
    """Pushes policy weights to collectors in other processes of this machine through shared memory.

    A drop-in for ``torchrl.collectors.distributed.RPCWeightUpdater``: pass the class itself,
    ``RPCCollector(..., weight_updater=RPCWeightUpdater)``, or an instance, with any of torchrl's five arguments. What
    is not given is taken from the collector when it is needed; without one, ``collector_rrefs``, ``policy_weights``
    and ``num_workers`` are needed.

    ``timeout``: seconds that a push waits for the workers. ``notify``: "rpc" notifies each addressed worker and, with
    ``wait=True``, awaits its answer: through shared memory from a worker that answers there, else by one small message
    to its RRef; "memory" notifies nobody after a worker has attached, workers see the news at their next forward.
    ``dtype``: store floating leaves as this dtype. ``checksum``, ``storage``: see Publisher.
    ``max_workers``: room for subscribers, inner processes included. ``max_lag``: how many versions a worker may be
    behind what is addressed to it when a push to it returns; None = any number. ``on_lag``: where it is behind by
    more, "wait" waits for it within ``timeout``, also with ``wait=False``, "warn" says so in the log, once until it has
    caught up, "raise" raises. ``fallback``: what becomes of a worker that can't map the channel (another host, pid
    namespace or user): None = an error, "rpc" = it gets the weights by RPC at every push, as with torchrl's class, and
    the log says so once; ``last_push`` tells who. A push waits for a worker's first attachment then, also with
    ``wait=False``. ``stamp_steps``: collectors give each step an entry ``("collector", "policy_version")``, int64, of
    the environment's batch shape: the version that its forward used, 0 = none of the trainer's. ``first_version``: the
    number of the first version; None = 1, or where the workers have had another updater's before, the one after the
    newest of these.

    Contract: one copy of the weights per push, whatever the number of workers; the trainer's parameters are never
    moved or shared; workers that die or hang delay a push by at most ``timeout``; if the trainer dies, workers keep
    their weights.
    """

    def __init__(
        self,
        collector_infos: Any = None,
        collector_class: Any = None,
        collector_rrefs: Any = None,
        policy_weights: Any = None,
        num_workers: int | None = None,
        *,
        timeout: float = 60.0,
        notify: str = "rpc",
        dtype: torch.dtype | None = None,
        max_workers: int = 256,
        max_lag: int | None = None,
        on_lag: str = "wait",
        fallback: str | None = None,
        stamp_steps: bool = False,
        first_version: int | None = None,
        checksum: bool = False,
        storage: str = "memfd",
    ) -> None:
        super().__init__()
        require_updater()
        if notify not in NOTIFY:
            raise ShmSyncError(f"Expected notify as one of {NOTIFY}, got {notify!r}")
        if fallback not in FALLBACK:
            raise ShmSyncError(f"Expected fallback as one of {FALLBACK}, got {fallback!r}")
        check_timeout(timeout)
        if stamp_steps and fallback:
            raise ShmSyncError("stamp_steps= needs workers that map the channel, so it can't go with fallback=")
        self.collector_infos, self.collector_class, self.collector_rrefs = (
            collector_infos,
            collector_class,
            collector_rrefs,
        )
        self.policy_weights, self._num_workers = policy_weights, num_workers
        self.timeout, self.notify, self.fallback = timeout, notify, fallback
        self._stamp_steps, self._first_version = stamp_steps, first_version
        self._staleness = Staleness(max_lag, on_lag)
        options: dict[str, Any] = {"dtype": dtype, "max_subscribers": max_workers}
        options |= {"checksum": checksum, "storage": storage}
        check_options(**options, first_version=1 if first_version is None else first_version)
        self._options = {**options, "timeout": timeout}
        self._publisher: Publisher | None = None
        self._messenger: Messenger | None = None
        self._mutex = threading.RLock()
        self._closed = False
        self._came_to: dict[int, int] = {}  # by worker, the version in use after a wait for the bound on the lag
        self._spent = 0.0  # of the first push's timeout, before it
        self._report: PushReport | None = None
        self._round: Round | None = None

    @classmethod
    def from_policy(cls, policy: Any) -> RPCWeightUpdater | None:
        """An updater for a module's weights; None for anything that is no nn.Module."""
        return cls(policy_weights=policy) if isinstance(policy, torch.nn.Module) else None

    # --- what a collector and a user call

    @property
    def num_workers(self) -> int:
        """How many workers there are; 0 before the collector is known."""
        if self._num_workers:
            return self._num_workers
        collector = self.collector
        known = getattr(collector, "num_workers", None)
        return int(known) if known is not None else len(self.collector_rrefs or ())

    def all_worker_ids(self) -> list[int]:
        """0 .. num_workers - 1."""
        return list(range(self.num_workers))

    @property
    def version(self) -> int:
        """The newest published version; 0 = nothing yet."""
        return self._publisher.version if self._publisher else 0

    @property
    def last_push(self) -> PushReport | None:
        """What the last push did; with ``wait=False`` its answers come in as they arrive."""
        with self._mutex:
            if self._report is not None and self._round is not None and self._messenger is not None:
                if not self._closed:
                    self._messenger.look(self._round)
                self._report.workers.update(self._round.reports)
                self._tell_use(self._report)
            return self._report

    def register_collector(self, collector: Any) -> None:
        """Register the collector: publish its policy's weights and give its workers-to-be the channel's handle.

        Raises ShmSyncError if the updater serves another collector already, or this one has no workers under RPC,
        UnsupportedLeaf if the weights can't be shared.
        """
        if any(hasattr(type(collector), its) for its in ("rollout", "_run_processes")):
            raise ShmSyncError(
                f"Expected an RPCCollector, got {type(collector).__qualname__}, whose workers are not RPC's: a "
                "MultiSync- or MultiAsyncCollector takes weight_sync_schemes={'policy': SharedMemWeightSyncScheme()}, "
                "and a Collector in this process uses the policy itself"
            )
        super().register_collector(collector)
        with self._mutex:
            if self.policy_weights is None and getattr(collector, "policy", None) is not None:
                self.policy_weights = weights_of(collector)
            self._publish_first()
            listening = is_awaited(self.notify, self._staleness.max_lag, self._staleness.on_lag)
            inject(collector, str(self._open().handle), self.fallback == "rpc", self._stamp_steps, listening)

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Attach all workers and give them the current weights.

        Raises PushError if a worker can't attach.
        """
        with self._mutex:
            self._publish_first()
            errors = self._tell(self.all_worker_ids(), wait=True, force=True) if self.num_workers else {}
        if errors:
            _raise(self.version, errors)

    def push_weights(
        self,
        weights: Any = None,
        worker_ids: Any = None,
        *,
        policy_or_weights: Any = None,
        wait: bool = True,
        partial: bool = False,
    ) -> None:
        """Publish weights to all workers or to some.

        ``weights`` (or ``policy_or_weights``): a module, TensorDict or dict; None = the server's. ``worker_ids``:
        None, an int, a torch.device, or several of these. ``wait``: for the workers' answers. ``partial``: only some
        leaves are given.

        Raises WorkerIdError, LayoutMismatch, UnsupportedLeaf, NothingPublished before anything is written or sent;
        PushError (PushTimeout) naming the workers that did not confirm within ``timeout``, or are behind by more than
        ``max_lag`` (LagExceeded, LagTimeout), when the others are up to date.
        SlotsExhausted, OutOfSharedMemory, TiedLeavesDiffer, ChannelClosed as Publisher.publish.
        Contract: blocks for one copy and, with ``wait=True``, for the answers; hooks run after it, also if a worker
        failed; with no worker addressed nothing happens.
        """
        given = _one_of(weights, policy_or_weights)
        with self._mutex:
            self._check_open()
            workers = self._resolve(worker_ids)
            if workers == []:
                return
            source = self._maybe_map_weights(self._server_weights(given))
            addressed = self.all_worker_ids() if workers is None else workers
            self._publish(source, workers, partial)
            deadline = time.monotonic() + self.timeout
            errors = self._notify_workers(addressed, source, wait)
            in_touch = [worker for worker in addressed if worker not in errors]
            errors |= self._staleness.enforce(self._measure, self._nudge, in_touch, deadline)
            self._note_use(in_touch)
            version = self.version
        try:
            for hook in self.post_hooks:
                hook()
        except Exception:
            if errors:
                _raise(version, errors)  # with the hook's as its context
            raise
        if errors:
            _raise(version, errors)

    def update_weights(self, *args: Any, **kwargs: Any) -> None:
        """`push_weights` under its older name."""
        self.push_weights(*args, **kwargs)

    def __call__(self, policy_or_weights: Any = None, worker_ids: Any = None, **kwargs: Any) -> None:
        """What the collector calls. With `policy_factory` only, nothing happens until weights have been given once."""
        weights = _one_of(kwargs.pop("weights", None), policy_or_weights)
        if weights is None and self._has_no_weights():
            return
        self.push_weights(weights, worker_ids, **kwargs)

    def lag(self) -> Lag:
        """How many versions each attached worker is behind what is addressed to it, by the roster.

        ``min``, ``mean``, ``max`` over the workers (0 without any), and ``workers``, each one's by its id. A worker
        that newer versions were not addressed to is not behind; of inner processes the slowest counts.
        Contract: a look, not a lock; waits for a push that is going on.
        """
        with self._mutex:
            return summary(self._measure())

    def close(self) -> None:
        """Let the workers' policies go (they keep their values) and end the channel. A second call does nothing.

        Contract: ends within ``timeout``, whatever the workers do, after a push that is going on.
        """
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            if self._messenger is not None and _rpc_running():
                self._messenger.detach(self.timeout)
            if self._publisher is not None:
                self._publisher.close()

    def __reduce__(self) -> Any:
        raise ShmSyncError(
            "An RPCWeightUpdater stays in the trainer's process, where its channel is; make one there, or hand "
            "on what to make it with (the class, or functools.partial)"
        )

    def __repr__(self) -> str:
        state = f"version={self.version}, notify={self.notify!r}, closed={self._closed}"
        return f"{type(self).__name__}(num_workers={self.num_workers}, {state})"

    def __enter__(self) -> RPCWeightUpdater:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- the extension points that subclasses override

    def _get_server_weights(self) -> Any:
        """The weights that a push without weights sends."""
        return self.policy_weights

    def _sync_weights_with_worker(self, worker_id: int, server_weights: Any) -> None:
        """Tell one worker of the published weights. Where a subclass overrides this, it is called for each worker."""
        errors = self._tell([worker_id], wait=True)
        if errors:
            _raise(self.version, errors)

    # --- how it is done

    def _server_weights(self, given: Any) -> Any:
        if given is not None:
            if self._is_empty(self.policy_weights):
                self.policy_weights = given
            return given
        weights = self._get_server_weights()
        if weights is None or self._has_no_weights():
            raise NothingPublished(
                "There are no weights to push: the collector has a policy_factory and no policy. Give "
                "push_weights() the trainer's "
                "module or TensorDict the first time; that fixes the layout"
            )
        return weights

    def _has_no_weights(self) -> bool:
        """With `policy_factory` only there is no policy. A policy without parameters has weights: none."""
        collector = self.collector
        factory_only = collector is not None and getattr(collector, "policy", None) is None
        return self.policy_weights is None or (factory_only and self._is_empty(self.policy_weights))

    def _resolve(self, worker_ids: Any) -> list[int] | None:
        """None = everybody, which is one store for all of them."""
        if worker_ids is None:
            everybody = self.all_worker_ids()
            wanted = [worker for worker in everybody if not self._skip_update(worker)]
            return None if wanted == everybody else wanted
        workers = ids.resolve(worker_ids, self.num_workers, devices_of(self.collector, self.num_workers))
        return [worker for worker in workers if not self._skip_update(worker)]

    def _open(self) -> Publisher:
        self._check_open()
        if self._publisher is None:
            first = self._first_version if self._first_version is not None else 1 + self._used_before()
            options: dict[str, Any] = {**self._options, "first_version": first}
            self._publisher = Publisher(name="RPCWeightUpdater", **options)
            self._messenger = Messenger(
                self._publisher.handle,
                self._rref,
                self._publisher.answer,
                self._publisher.following,
                self._publisher.stir,
                bell=self.notify == "rpc",
                fallback=self.fallback == "rpc",
                stamped=self._stamp_steps,
            )
        if self.num_workers > self._publisher.max_subscribers:
            raise LimitError(
                f"There are {self.num_workers} workers, but room for {self._publisher.max_subscribers}; "
                "make the RPCWeightUpdater with a larger max_workers="
            )
        return self._publisher

    def _used_before(self) -> int:
        """The newest version that the workers have had from other updaters: theirs must not look newer than ours."""
        rrefs = self.collector_rrefs or getattr(self.collector, "collector_rrefs", None) or ()
        begin = time.monotonic()
        newest = newest_used(rrefs, min(self.timeout / 2, _ASK_SECONDS)) if _rpc_running() else 0
        self._spent = time.monotonic() - begin
        return newest

    def _publish_first(self) -> None:
        publisher = self._open()
        if publisher.version == 0 and not self._has_no_weights():
            self._publish(self._maybe_map_weights(self._server_weights(None)), None, False)

    def _publish(self, source: Any, workers: list[int] | None, partial: bool) -> Publication:
        publisher = self._open()
        done = publisher.publish(source, worker_ids=workers, partial=partial)
        self._report = PushReport(done.version, done.nbytes, done.leaves, {"copy": done.seconds})
        self._round, self._came_to = None, {}
        return done

    def _notify_workers(self, workers: list[int], source: Any, wait: bool) -> dict[int, BaseException]:
        if type(self)._sync_weights_with_worker is RPCWeightUpdater._sync_weights_with_worker:
            return self._tell(workers, wait)
        errors: dict[int, BaseException] = {}
        for worker in workers:
            try:
                self._sync_weights_with_worker(worker_id=worker, server_weights=source)
            except PushError as error:
                errors.update(error.errors)
        return errors

    def _tell(self, workers: list[int], wait: bool, force: bool = False) -> dict[int, BaseException]:
        """Notify workers, and await their answers if asked; the errors of those that did not confirm."""
        begin = time.perf_counter()
        timeout, self._spent = self.timeout - self._spent, 0.0
        deadline = time.monotonic() + timeout
        messenger, version = self._messenger, self.version
        assert messenger is not None
        silent = self.notify == "memory" and not force
        told = messenger.unattached(workers) if silent else workers
        report = self._report or PushReport(version, 0, 0)
        self._report = report
        report.workers.update({worker: WorkerReport(via=messenger.via(worker)) for worker in workers})
        # Whether a worker can map the channel shows by its attachment: nobody else would send it the weights.
        wait = wait or (self.fallback is not None and messenger.unasked(told))
        self._round = messenger.begin(told, version, timeout, force)
        if wait:
            messenger.finish(self._round, deadline)
        report.workers.update(self._round.reports)
        report.rpc_nbytes += self._round.rpc_nbytes
        report.notification_nbytes += self._round.sent * messenger.message_nbytes(version) if self._round.sent else 0
        report.seconds["notify"] = report.seconds.get("notify", 0.0) + time.perf_counter() - begin
        return {w: report.workers[w].error for w in workers if report.workers[w].error is not None}  # type: ignore[misc]

    def _measure(self) -> dict[int, Behind]:
        publisher, messenger = self._open(), self._messenger
        assert messenger is not None
        if self._round is not None:
            messenger.look(self._round)
        return measure(publisher, messenger.by_rpc.in_use)

    def _note_use(self, workers: Iterable[int]) -> None:
        """After a wait for the bound on the lag, what the report says is in use is what the workers have come to: all
        of the processes of one."""
        if self._staleness.max_lag is None or self._report is None or self._messenger is None:
            return
        used = {worker: behind.used for worker, behind in self._measure().items()}
        whole = [worker for worker in workers if worker in used and self._messenger.fault(worker) is None]
        self._came_to = {worker: used[worker] for worker in whole}
        self._tell_use(self._report)

    def _tell_use(self, report: PushReport) -> None:
        for worker, used in self._came_to.items():
            said = report.workers.get(worker)
            if said is None or said.error is not None or used <= (said.in_use or 0):
                continue
            # Who uses the version has confirmed it, asked or not; who is behind by less than it may be has not.
            if said.seen is not None or used >= report.version:
                said.in_use, said.seen = used, max(used, said.seen or 0)

    def _nudge(self, workers: Iterable[int]) -> None:
        assert self._messenger is not None
        self._messenger.nudge(workers, self.version, self.timeout)

    def _rref(self, worker: int) -> Any:
        """Late: the collector registers this updater before its workers exist."""
        rrefs = self.collector_rrefs or getattr(self.collector, "collector_rrefs", None)
        if not rrefs:
            raise ShmSyncError(
                f"Worker {worker} has no RRef yet: push after the collector was built, or give collector_rrefs="
            )
        if worker >= len(rrefs):
            raise ShmSyncError(
                f"Worker {worker} has no RRef: num_workers={self.num_workers}, but {len(rrefs)} collector_rrefs"
            )
        return rrefs[worker]

    def _check_open(self) -> None:
        if self._closed:
            raise ChannelClosed("This RPCWeightUpdater is closed; make another one")


def _one_of(weights: Any, policy_or_weights: Any) -> Any:
    """What was given under one of two names, or under both."""
    given = policy_or_weights if weights is None else weights
    if policy_or_weights is not None and given is not policy_or_weights:
        raise ShmSyncError("Expected weights or policy_or_weights, got both; nothing was published")
    return given


def check_timeout(timeout: Any) -> None:
    """Raise ShmSyncError for what is no number of seconds to wait."""
    try:
        fine = timeout is not True and isinstance(timeout, numbers.Real) and float(timeout) > 0
    except OverflowError:  # a number that is larger than any clock's, but for infinity
        fine = False
    if not fine:
        raise ShmSyncError(f"Expected timeout in seconds above 0, got {timeout!r}")


def _raise(version: int, errors: dict[int, BaseException]) -> None:
    timed_out = any(isinstance(error, TimeoutError) for error in errors.values())
    raise (PushTimeout if timed_out else PushError)(version, errors)


def _rpc_running() -> bool:
    return bool(rpc.api._is_current_rpc_agent_set())


def _register_with_torchrl() -> None:
    """Make it an instance of torchrl's base class, without inheriting its deprecation warning."""
    theirs = look(UPDATER).its
    if theirs is not None and theirs is not RPCWeightUpdater:  # else install() has registered it
        theirs.register(RPCWeightUpdater)


_register_with_torchrl()
