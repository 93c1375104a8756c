"""Notifications: the channel's bell for workers that answer it, one small RPC for the others, all within one timeout.

A worker that has attached listens to the bell and answers on the roster, in a tenth of the time that a message takes.
Where inner processes follow the channel in a worker's place, all of them do. Who does not answer soon, or did not the
last time, gets a message: it attaches those that are not, and brings back what went wrong.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.distributed import rpc
from torch.distributed.rpc.internal import PythonUDF, serialize

from .. import remote
from ..errors import ChannelUnreachable, NotAttached, ShmSyncError
from ..handle import Handle
from . import collector
from .answers import outcome
from .fallback import ByRpc, NothingToSend, Sending
from .report import WorkerReport
from .silence import Attached, Following, Silence, late_inside, told

# So long an answer to the bell is awaited before a message is sent: many workers may share few cores.
_BELL_SECONDS = 0.05
_LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 50e-6, 1e-3
_LONGEST_SECONDS = 2e6

Answer = Callable[[int, int], "tuple[int, int] | None"]


@dataclass
class Round:
    """One version's notifications: the messages sent, how many, and what the workers have reported so far.

    ``seconds`` for it, until ``deadline``, of time.monotonic(). ``by_bell``: the workers that may answer on the roster;
    the others' lines may show an earlier answer. ``rpc_nbytes``: of the weights that were sent, to workers that can't
    map the channel.
    ``passed``: who has answered a message, but whose inner processes have to answer as well.
    """

    version: int
    workers: list[int]
    by_bell: set[int]
    seconds: float
    deadline: float
    sent: int = 0
    rpc_nbytes: int = 0
    messages: dict[int, Any] = field(default_factory=dict)
    passed: set[int] = field(default_factory=set)
    reports: dict[int, WorkerReport] = field(default_factory=dict)

    @property
    def silent(self) -> list[int]:
        """Those that have not answered."""
        return [worker for worker in self.workers if worker not in self.reports]


class Messenger:
    """Attaches workers at their first message and notifies them from then on.

    ``rref_of(worker)`` gives the RRef of a worker's collector; ``answer``, ``following``, ``stir``: Publisher's methods
    of these names. ``bell``: workers listen to it. ``fallback``: who can't map the channel gets the weights by RPC.
    ``stamped``: collectors stamp their steps, see Stamps. Contract: the messages to all others carry a channel id and
    numbers.
    """

    def __init__(
        self,
        handle: Handle,
        rref_of: Callable[[int], Any],
        answer: Answer,
        following: Following,
        stir: Callable[[], None],
        *,
        bell: bool,
        fallback: bool = False,
        stamped: bool = False,
    ) -> None:
        self._handle, self._rref_of, self._answer, self._stir = handle, rref_of, answer, stir
        self._silence = Silence(handle, following)
        self._bell, self._stamped = bell, stamped
        self._attached: dict[int, Attached] = {}
        self._lost: dict[int, Attached] = {}  # those that were attached, until they are again
        self.by_rpc = ByRpc(handle, self._call)
        self._fallback = fallback
        self._owners: dict[tuple[int, str], Any] = {}  # of all that were ever attached
        self._answered: dict[int, int] = {}  # by worker, the newest version that it answered for
        self._prompt: set[int] = set()  # answered the last ring
        self._last: Round | None = None
        self._nudges: dict[int, Any] = {}
        self._sizes: dict[int, int] = {}

    def begin(self, workers: Iterable[int], version: int, timeout: float, force: bool = False) -> Round:
        """After the bell has rung: send to those that may not have heard it, or to all, without waiting."""
        if self._last is not None:  # which nobody may have finished
            self._prompt -= set(self.look(self._last))
        workers = list(workers)
        for worker in workers:
            self._follow_rref(worker)
        by_bell = {w for w in workers if self._bell and not force and self._answered.get(w, 0) < version}
        this = self._last = Round(version, workers, by_bell, timeout, time.monotonic() + timeout)
        self._send([worker for worker in this.silent if worker not in self._prompt & by_bell], this, timeout)
        return this

    def finish(self, this: Round, deadline: float) -> None:
        """Wait for all answers. A worker that has been started anew is attached again, in the time that is left."""
        ringing = time.monotonic() + _BELL_SECONDS
        pause = _LOOK_SECONDS
        while self.look(this):
            now = time.monotonic()
            if now > ringing:
                self._send([w for w in this.silent if w not in this.messages], this, max(deadline - now, 1e-3))
                pause = min(1.5 * pause, _LONGEST_LOOK_SECONDS)
            time.sleep(pause)
        lost = [w for w, report in this.reports.items() if isinstance(report.error, NotAttached)]
        if lost and time.monotonic() < deadline:
            self._send(lost, this, deadline - time.monotonic())
            this.reports |= {worker: self._result(worker, this.messages[worker]) for worker in lost}

    def look(self, this: Round) -> list[int]:
        """Take in what has been answered so far; who has not answered."""
        for worker in this.silent:
            attached, message = self._attached.get(worker), this.messages.get(worker)
            said = self._heard(attached, worker) if attached and worker in this.by_bell else None
            if said is not None and said[1] >= this.version:
                this.reports[worker] = self._confirmed(worker, *said)
            elif worker in this.passed:
                fault = self._silence.ended_inside(self._attached.get(worker)) or self._late_inside(worker, this)
                if fault is not None:
                    this.reports[worker] = self._failed(worker, fault)
            elif message is not None and (isinstance(message, BaseException) or message.done()):
                this.reports[worker] = self._result(worker, message)
                if self._awaits_inner(worker, this):
                    del this.reports[worker]
                    this.passed.add(worker)
                elif self._admitted(worker, message, this.reports[worker].error):
                    del this.reports[worker]
                    self._send([worker], this, max(this.deadline - time.monotonic(), 1e-3))
        return this.silent

    def nudge(self, workers: Iterable[int], version: int, timeout: float) -> None:
        """Notify attached workers once more, by a message whose answer nobody waits for, one at a time to each; inner
        processes by the bell."""
        workers = list(workers)
        if any(worker in self._attached and self._attached[worker].inner for worker in workers):
            self._stir()
        for worker in workers:
            attached, last = self._attached.get(worker), self._nudges.get(worker)
            under_way = last is not None and not isinstance(last, BaseException) and not last.done()
            if attached is None or attached.inner or under_way:
                continue
            arguments = (self._handle.nonce, worker, version)
            self._nudges[worker] = self._call(attached.rref.owner(), remote.notify, arguments, timeout)

    def unattached(self, workers: Iterable[int]) -> list[int]:
        """Those that have not confirmed an attachment yet."""
        return [worker for worker in workers if worker not in self._attached]

    def unasked(self, workers: Iterable[int]) -> bool:
        """Whether one of these was never asked to attach."""
        asked = {worker for worker, _ in self._owners}
        return not asked.issuperset(workers)

    def via(self, worker: int) -> str | None:
        """How it gets the weights; None if it has not attached."""
        return "rpc" if worker in self.by_rpc else "map" if worker in self._attached else None

    def fault(self, worker: int) -> BaseException | None:
        """What is known to be wrong with the inner processes of a worker, or with the process around them."""
        known = self._known(worker)
        return self._silence.ended_inside(known) or (self._silence.died_around(known) if known else None)

    def message_nbytes(self, version: int) -> int:
        """Bytes of one notification as RPC pickles it; measured again when the number gets longer."""
        digits = version.bit_length() // 8
        if digits not in self._sizes:
            call = PythonUDF(remote.notify, (self._handle.nonce, 0, version), {})
            self._sizes[digits] = len(serialize(call)[0])
        return self._sizes[digits]

    def detach(self, timeout: float) -> None:
        """Tell all that were ever attached that the channel ends, and await those that were there to the last.

        Who can't be reached finds out by itself.
        """
        there = {(worker, one.rref.owner().name) for worker, one in self._attached.items()}
        futures = {
            key: self._call(owner, remote.detach, (self._handle.nonce, key[0]), timeout)
            for key, owner in self._owners.items()
        }
        for key, future in futures.items():
            if key in there and not isinstance(future, BaseException):
                outcome(future)
        self.by_rpc.close()
        self._attached.clear()
        self._owners.clear()
        self._prompt.clear()

    def _follow_rref(self, worker: int) -> None:
        """A worker whose RRef is another one now is another object, in another process perhaps."""
        attached = self._known(worker)
        known = attached.rref if attached is not None else self.by_rpc.rref_of(worker)
        if known is not None:
            with contextlib.suppress(Exception):  # no RRefs at the moment
                if self._rref_of(worker) is not known:
                    self._lose(worker)
                    self._lost.pop(worker, None)
                    self.by_rpc.drop(worker)

    def _known(self, worker: int) -> Attached | None:
        """Where it is, or was when it was last heard of."""
        return self._attached.get(worker) or self._lost.get(worker)

    def _late_inside(self, worker: int, this: Round) -> BaseException | None:
        """The error if there is no time left to wait for inner processes."""
        if time.monotonic() < this.deadline:
            return None
        inner = self._attached[worker].inner if worker in self._attached else ()
        answers = {pid: self._answer(worker, pid) or (0, 0) for pid in inner}
        silent = [pid for pid, (_, answered) in answers.items() if answered < this.version]
        return late_inside(silent, this.seconds) if silent or not inner else None  # else they have just answered

    def _lose(self, worker: int) -> None:
        if worker in self._attached:
            self._lost[worker] = self._attached.pop(worker)
        self._prompt.discard(worker)

    def _send(self, workers: Iterable[int], this: Round, timeout: float) -> None:
        for worker in workers:
            # It has to earn it again that the next message waits for its answer to the bell.
            self._prompt.discard(worker)
            if worker in self.by_rpc:
                message = self.by_rpc.send(worker, timeout)
                this.rpc_nbytes += getattr(message, "nbytes", 0)
            else:
                message = self._message(worker, this.version, timeout)
                this.sent += 1
            this.messages[worker] = message

    def _message(self, worker: int, version: int, timeout: float) -> Any:
        if (error := self._silence.died(self._known(worker))) is not None:
            return error
        attached = self._attached.get(worker)
        if attached is not None:
            arguments = (self._handle.nonce, worker, version)
            return self._call(attached.rref.owner(), remote.notify, arguments, timeout)
        try:
            rref = self._rref_of(worker)
            owner = rref.owner()
        except Exception as error:
            return error
        self._owners[worker, owner.name] = owner
        attaching = (rref, str(self._handle), worker, self._bell, self._stamped)
        future = self._call(owner, collector.attach, attaching, timeout)
        return future if isinstance(future, BaseException) else _Attaching(rref, future)

    def _call(self, owner: Any, function: Callable[..., Any], arguments: tuple[Any, ...], timeout: float) -> Any:
        try:
            # RPC takes 0 for "for ever", and counts milliseconds in 32 bits.
            return rpc.rpc_async(owner, function, args=arguments, timeout=min(max(timeout, 1e-3), _LONGEST_SECONDS))
        except Exception as error:  # a dead peer may be refused at once
            return error

    def _result(self, worker: int, message: Any) -> WorkerReport:
        answer = message if isinstance(message, BaseException) else outcome(message)
        if isinstance(answer, BaseException):
            if not isinstance(answer, ShmSyncError):
                died = self._silence.died(self._known(worker), at_once=isinstance(answer, TimeoutError))
                answer = died or told(self._known(worker), worker in self.by_rpc, answer)
            return self._failed(worker, answer)
        used, seen, *where = answer
        if isinstance(message, _Attaching):
            pid, inner = where
            self._attached[worker] = Attached(message.rref, pid, inner, not inner or self._silence.follows(pid))
            self._lost.pop(worker, None)
        if isinstance(message, (Sending, NothingToSend)):
            self.by_rpc.confirmed(worker, used)
        if (fault := self._silence.ended_inside(self._attached.get(worker))) is not None:
            return self._failed(worker, fault)
        self._answered[worker] = seen
        return WorkerReport(in_use=used, seen=seen, via=self.via(worker))

    def _confirmed(self, worker: int, used: int, seen: int) -> WorkerReport:
        """By the bell. Inner processes may go on for a while without the process around them, unless they are told."""
        if (fault := self._silence.died_around(self._attached[worker])) is not None:
            return self._failed(worker, fault)
        self._answered[worker] = seen
        self._prompt.add(worker)
        return WorkerReport(in_use=used, seen=seen, via="map")

    def _failed(self, worker: int, error: BaseException) -> WorkerReport:
        self._lose(worker)
        return WorkerReport(error=error, via=self.via(worker))

    def _heard(self, attached: Attached, worker: int) -> tuple[int, int] | None:
        """The version in use, and the one answered for; of inner processes the oldest, if all have spoken."""
        said = [self._answer(worker, pid) for pid in attached.inner or (attached.pid,)]
        known = [one for one in said if one is not None]
        if len(known) < len(said):
            return None
        return min(used for used, _ in known), min(answered for _, answered in known)

    def _awaits_inner(self, worker: int, this: Round) -> bool:
        """Whether a message was answered, but by the process around those that have to answer to the bell."""
        attached = self._attached.get(worker)
        return attached is not None and bool(attached.inner) and worker in this.by_bell

    def _admitted(self, worker: int, message: Any, error: BaseException | None) -> bool:
        """Whether it has just turned out that a worker needs the weights by RPC."""
        unreachable = isinstance(message, _Attaching) and isinstance(error, ChannelUnreachable)
        if not (self._fallback and unreachable):
            return False
        try:
            self.by_rpc.admit(worker, message.rref, error)  # type: ignore[arg-type]
        except ShmSyncError:  # no room on the roster for who reads for it: its own error stands
            return False
        return True


class _Attaching(NamedTuple):
    """A message that attaches, and through which RRef."""

    rref: Any
    future: Any

    def done(self) -> bool:
        return bool(self.future.done())

    def wait(self) -> Any:
        return self.future.wait()
