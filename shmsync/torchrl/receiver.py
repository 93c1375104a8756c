"""The receiver: rides into a collector's constructor as if it were a weight-sync scheme, and attaches it there.

So a worker, and each inner process of a Multi*Collector, is bound before its first forward, without a message.
"""

from __future__ import annotations

import functools
import os
import weakref
from typing import Any

import torch
from torch import nn

from .. import remote
from ..errors import BindingError, LayoutError, LayoutMismatch, ShmSyncError
from ..handle import Handle
from ..weights import places
from .collector import attachment
from .fallback import reachable
from .releases import SCHEME, look
from .stamps import make_room_in


class Receiver:
    """What torchrl takes for a receiving weight-sync scheme; it carries a channel's handle and a worker id.

    ``otherwise``: what it becomes in a process that can't map the channel; None = there it is an error.
    ``first_seconds``: how long a collector's first forward waits for the trainer's first weights. ``names``: of all
    models of the channel, as torchrl has them, where there are several; ``name``: of the one that this stands for.
    ``stamped``: each step says which version its forward used, see Stamps. ``listening``: the policy's process answers
    to the channel's bell.
    Contract: pickles as a few hundred bytes; owns nothing, the attachment belongs to the collector.
    """

    def __init__(
        self,
        handle_text: str,
        worker_id: int,
        otherwise: str | None = None,
        *,
        first_seconds: float = 0.0,
        name: str = "",
        names: tuple[str, ...] = (),
        stamped: bool = False,
        listening: bool = False,
    ) -> None:
        self._handle_text, self._worker_id, self._otherwise = handle_text, worker_id, otherwise
        self._first_seconds, self._name, self._names = first_seconds, name, names
        self._stamped, self._listening = stamped, listening
        self._reset()

    def _reset(self) -> None:
        self.initialized_on_sender = self._receives = False
        self.synchronized_on_sender = self.synchronized_on_receiver = False
        self._context: Any = None
        self.model: Any = None

    @property
    def nonce(self) -> str:
        """Of its channel."""
        return Handle.parse(self._handle_text).nonce

    @property
    def context(self) -> Any:
        """The collector, once it is there. Setting it attaches the collector."""
        return self._context() if self._context is not None else None

    @context.setter
    def context(self, collector: Any) -> None:
        self._context = None if collector is None else weakref.ref(collector)
        # One that is about to start processes is attached by the first message: what lines there are are theirs.
        if collector is not None and self._receives and not starts_processes(collector):
            self._attach(collector)

    @property
    def initialized_on_receiver(self) -> bool:
        """Not before the collector is there: torchrl gives a bare policy first, and the collector, in every release, to
        schemes that are not initialised then."""
        return self._receives and self.context is not None

    def init_on_sender(self, **kwargs: Any) -> None:
        """In the parent of inner processes: they find the channel themselves, so only stamps need something."""
        self.initialized_on_sender = True
        scheme = look(SCHEME).its
        if scheme is not None:
            scheme.register(Receiver)  # collectors ask for that before they send
        if self._stamped:
            make_room_in(getattr(kwargs.get("context"), "replay_buffer", None))

    def init_on_receiver(self, *, context: Any = None, model: Any = None, **kwargs: Any) -> None:
        """In the process that runs the policy: with its collector, or before that with the bare policy."""
        self._receives = True
        self.initialized_on_sender = False  # a forked process has the very object that its parent has initialised
        self.model, self.context = model, context

    def connect(self, **kwargs: Any) -> None:
        """Give a bare policy its first values; a collector is attached already."""
        if not self._receives:
            self.synchronized_on_sender = True
            return
        if self.context is None and isinstance(self.model, nn.Module):
            # Collectors run the policy once in their constructor, before they can be attached.
            _materialize(self.model)
            with remote.subscribe(Handle.parse(self._handle_text), self._worker_id) as subscriber:
                subscriber.bind({self._name: self.model} if self._names else self.model, mode="copy").unbind()
        self.synchronized_on_receiver = True

    def prepare_weights(self, weights: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As the interface wants it."""
        return weights

    def send(self, weights: Any = None, worker_ids: Any = None) -> None:
        """Without weights, as with ``update_at_each_batch``, nothing: the inner processes are up to date by themselves.

        Raises ShmSyncError with some: the weights of this collector come from the trainer.
        """
        if weights is None:
            return
        raise ShmSyncError(
            f"The inner processes of worker {self._worker_id} follow the trainer's channel; push weights in "
            "the trainer, not here"
        )

    def receive(self, *args: Any, **kwargs: Any) -> None:
        """A hint that there may be news."""
        remote.notify(self.nonce, self._worker_id, 0)

    def shutdown(self) -> None:
        """Nothing to end: the attachment ends with its collector."""

    def __reduce__(self) -> Any:
        more: dict[str, Any] = {"first_seconds": self._first_seconds, "name": self._name, "names": self._names}
        more |= {"stamped": self._stamped, "listening": self._listening}
        return received, (self._handle_text, self._worker_id, self._otherwise, more)

    def _attach(self, collector: Any) -> None:
        more: dict[str, Any] = {"names": self._names, "stamped": self._stamped}
        make = functools.partial(attachment, first_seconds=self._first_seconds, **more)
        try:
            attached = remote.attach_object(collector, self._handle_text, self._worker_id, make)
        except (LayoutMismatch, BindingError) as error:
            raise of_worker(f"Worker {self._worker_id}, pid {os.getpid()}", error) from error
        if self._listening:
            attached.listen()


def starts_processes(collector: Any) -> bool:
    """Whether a collector is about to start processes of its own."""
    return hasattr(type(collector), "_run_processes") and not getattr(collector, "procs", None)


def of_worker(who: str, error: LayoutError | BindingError) -> Exception:
    """The same error, naming one of many: nobody else says which it is."""
    if isinstance(error, LayoutMismatch):
        lists = {name: getattr(error, name) for name in ("unexpected", "missing", "differing")}
        return type(error)(f"{who}: {error.what}", **lists)
    return type(error)(f"{who}: {error}")


class Idle(Receiver):
    """In the place of a receiver where the channel can't be mapped: the weights come by messages to the collector."""

    def connect(self, **kwargs: Any) -> None:
        """Nothing: the policy has come with its values, or gets some with the first push."""
        self.synchronized_on_receiver = True

    def _attach(self, collector: Any) -> None:
        pass


# What a receiver becomes where the channel can't be mapped.
IDLE, INNER = "idle", "inner"


def stand_in(collector_class: type, fallback: bool) -> str | None:
    """What a receiver for collectors of a class becomes where the channel can't be mapped."""
    return (INNER if hasattr(collector_class, "_run_processes") else IDLE) if fallback else None


def received(handle_text: str, worker_id: int, otherwise: str | None, more: dict[str, Any]) -> Any:
    """A receiver as it arrives in a process. For inner processes torchrl's own scheme stands in for it, which passes on
    what comes to their collector."""
    if otherwise is None or reachable(handle_text, worker_id):
        return Receiver(handle_text, worker_id, otherwise, **more)
    if otherwise == IDLE:
        return Idle(handle_text, worker_id, otherwise)
    from torchrl.weight_update import SharedMemWeightSyncScheme

    return SharedMemWeightSyncScheme()


def _materialize(module: nn.Module) -> None:
    """Give meta tensors memory, tied ones together: a Multi*Collector sends policies without values to its
    processes."""
    made: dict[int, torch.Tensor] = {}
    for place in places(module):
        old = place.table[place.name]
        if not old.is_meta:
            continue
        if id(old) not in made:
            real = torch.empty_like(old, device="cpu")
            made[id(old)] = real if place.is_buffer else nn.Parameter(real, requires_grad=old.requires_grad)
        place.table[place.name] = made[id(old)]
