"""The small costs: a forward with no news, re-pointing, a switch, attaching. One publisher and one subscriber."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .copies import timed
from .policy import ProbePolicy
from .processes import Child
from .workloads import ALL, Pieces

CALLS, REPOINTS = 2000, 200
COUNTS = (10, 200, 2000)
# Pushes are a trainer's step apart, and what a worker does off their path is done by then.
_STEP_SECONDS = 0.03


class Still(nn.Module):
    """`count` parameters and a forward that does nothing: what is left is the call."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.pieces = Pieces(count, (16,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The input."""
        return x


class MicroPublisher:
    """Served by a child process; it has the subscriber for a child of its own. Answers: seconds by metric."""

    def __init__(self) -> None:
        self._child = Child("micro subscriber", MicroSubscriber)

    def start(self) -> int:
        """Open the channels."""
        from shmsync import Publisher

        self._sources: dict[str, Any] = {f"still{count}": Still(count) for count in COUNTS}
        self._sources |= {name: ProbePolicy(ALL[name]) for name in ("kb200", "leaves200")}
        self._publishers = {name: Publisher(source) for name, source in self._sources.items()}
        for publisher in self._publishers.values():
            publisher.publish()
        self._child.call("attach", {name: str(publisher.handle) for name, publisher in self._publishers.items()})
        for _ in range(4):  # until all slots are mapped
            self.switches()
        return 0

    def overheads(self) -> dict[str, float]:
        """Seconds of one forward more than unbound, by number of parameters, and of an unbound one."""
        return self._child.call("overheads")

    def switches(self) -> dict[str, float]:
        """Seconds of a whole switch, and of the re-pointing in it."""
        found = self._warm_switch("kb200")
        for name in ("kb200", "leaves200"):
            time.sleep(_STEP_SECONDS)
            self._publishers[name].publish()
            switch, point = self._child.call("switch", name)
            found |= {f"switch {name}": switch, **({f"re-point {name}": point} if point else {})}
        loop = self._child.call("repoint", "kb200")
        return found | ({"re-point kb200, in a loop": loop} if loop else {})

    def _warm_switch(self, name: str) -> dict[str, float]:
        """The same for one of several pushes right after each other: what they touch is in the caches."""
        for _ in range(4):
            self._publishers[name].publish()
            switch, point = self._child.call("switch", name)
        return {f"switch {name}, warm": switch, **({f"re-point {name}, warm": point} if point else {})}

    def attaches(self) -> dict[str, float]:
        """Seconds from a handle to a policy that is bound to 105 MB."""
        return {"attach leaves200": self._child.call("attach_anew", str(self._publishers["leaves200"].handle))}

    def close(self) -> None:
        """End the subscriber, then the channels."""
        self._child.end()
        for publisher in self._publishers.values():
            publisher.close()


class MicroSubscriber:
    """Served by a child process: what is timed runs here."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._x = torch.zeros(4)
        self._pointed: dict[str, dict[Any, tuple[Any, ...]]] = {}  # by name and span: what a re-pointing was given

    def attach(self, handles: dict[str, str]) -> None:
        """Bind a policy to each channel; keep an unbound one beside it."""
        from shmsync import Subscriber

        self._bound: dict[str, nn.Module] = {}
        self._unbound: dict[str, nn.Module] = {}
        self._bindings: dict[str, Any] = {}
        self._subscribers = {name: Subscriber(handle) for name, handle in handles.items()}
        for name, subscriber in self._subscribers.items():
            still = name.startswith("still")
            module = Still(int(name.removeprefix("still"))) if still else ProbePolicy(ALL[name])
            self._unbound[name] = copy.deepcopy(module) if still else module
            self._bound[name] = module
            self._bindings[name] = subscriber.bind(module)

    def overheads(self) -> dict[str, float]:
        """Alternating blocks of calls."""
        found: dict[str, float] = {}
        plain = []
        for count in COUNTS:
            bound, unbound = self._bound[f"still{count}"], self._unbound[f"still{count}"]
            base = self._per_call(unbound)
            found[f"forward overhead, {count} parameters"] = self._per_call(bound) - base
            plain.append(base)
        return {**found, "call": sum(plain) / len(plain)}

    def switch(self, name: str) -> tuple[float, float | None]:
        """Seconds of a switch to what has just been published, and of the re-pointing in it, if that can be told."""
        binding = self._bindings[name]
        before = binding.version
        with _pointing(binding, self._pointed.setdefault(name, {})) as pointing:
            seconds = timed(binding.refresh)
        if binding.version != before + 1:
            raise RuntimeError(f"Expected a switch from version {before} to the next, got {binding.version}")
        return seconds, (sum(pointing) if pointing else None)

    def repoint(self, name: str) -> float | None:
        """Seconds of one re-pointing of many, over the slots that switches have been to, back to the one in use."""
        rounds = [*self._pointed[name].values()]
        if not rounds:
            return None
        point = self._bindings[name]._point
        begin = time.perf_counter()
        for number in range(1, REPOINTS + 1):
            point(*rounds[(number - REPOINTS - 1) % len(rounds)])
        return (time.perf_counter() - begin) / REPOINTS

    def attach_anew(self, handle: str) -> float:
        """Subscribe and bind another policy, then leave."""
        from shmsync import Subscriber

        policy = ProbePolicy(ALL["leaves200"])
        policy.fill(0)
        begin = time.perf_counter()
        subscriber = Subscriber(handle)
        subscriber.bind(policy)
        seconds = time.perf_counter() - begin
        subscriber.close()
        return seconds

    def close(self) -> None:
        """Leave the channels."""
        for subscriber in self._subscribers.values():
            subscriber.close()

    def _per_call(self, module: nn.Module) -> float:
        x, calls = self._x, range(CALLS)
        begin = time.perf_counter()
        for _ in calls:
            module(x)
        return (time.perf_counter() - begin) / CALLS


@contextmanager
def _pointing(binding: Any, given: dict[Any, tuple[Any, ...]]) -> Iterator[list[float]]:
    """Seconds spent in giving parameters their new storage; empty if this version has no such method.

    What the method was given is put into `given`, by where the slot is mapped, the last one last.
    """
    seconds: list[float] = []
    point = getattr(binding, "_point", None)
    if point is None:
        yield seconds
        return

    def watched(views: Any) -> Any:
        place = tuple(view.span for view in views.values())
        given.pop(place, None)
        given[place] = (views,)
        begin = time.perf_counter()
        events = point(views)
        seconds.append(time.perf_counter() - begin)
        return events

    binding._point = watched
    try:
        yield seconds
    finally:
        del binding._point
