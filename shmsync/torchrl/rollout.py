"""What a collector is doing at the moment, known by what it has: where it calls its policy, and the time between two
forwards or two batches."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

from ..errors import WaitTimeout

# The attribute that a rollout reads at every step. Before torchrl 0.11 that is `policy` itself.
CALLED_POLICY = "_wrapped_policy_maybe_compiled"
# By what a collector that makes its steps in its own process is known there.
_ROLLOUT_PARTS = ("rollout", "policy", "policy_weights", "next", "shutdown")
# So long a binding waits for the end of a forward that was begun before it.
_FORWARD_SECONDS = 30.0


def makes_steps(target: Any) -> bool:
    """Whether it is a collector that makes its steps in this process."""
    known = hasattr(target, CALLED_POLICY) or all(hasattr(target, part) for part in _ROLLOUT_PARTS)
    return known and not hasattr(target, "procs")


def rests_between_batches(collector: Any) -> bool:
    """Whether the inner processes of a collector make steps only while its `next()` runs."""
    sync = any(kind.__name__ in ("MultiSyncCollector", "MultiSyncDataCollector") for kind in type(collector).__mro__)
    return sync and hasattr(collector, "_iterator")


def steps_at_random(collector: Any) -> bool:
    """Whether it makes its first steps, without a forward."""
    frames = getattr(collector, "init_random_frames", None) or 0
    return bool(getattr(collector, "_frames", 0) < frames)


def makes_a_batch(iterator: Any) -> bool:
    """Whether a generator of batches is running; it is where `next()` of every release makes them."""
    return bool(getattr(iterator, "gi_running", False))


class Doorman:
    """Stands where a collector's rollout finds its policy while that is being bound: a forward that begins now waits.

    One that was begun before would see its parameters change, so `nobody_inside` waits until the rollout comes to its
    next forward, or ends.
    """

    def __init__(self, collector: Any) -> None:
        self._collector = collector
        self._place = CALLED_POLICY if hasattr(collector, CALLED_POLICY) else "policy"
        self.policy = collector._wrapped_policy if self._place == CALLED_POLICY else collector.policy
        self._entered, self._open = threading.Event(), threading.Event()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._entered.set()
        self._open.wait()
        return getattr(self._collector, self._place)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["policy"], name)

    def __enter__(self) -> Doorman:
        setattr(self._collector, self._place, self)
        return self

    def __exit__(self, *error: object) -> None:
        if getattr(self._collector, self._place) is self:
            setattr(self._collector, self._place, self.policy)
        self._open.set()

    def nobody_inside(self) -> None:
        """Wait for that. Raises WaitTimeout."""
        deadline = time.monotonic() + _FORWARD_SECONDS
        while makes_a_batch(getattr(self._collector, "_iterator", None)) and not steps_at_random(self._collector):
            if self._entered.wait(1e-3):
                return
            if time.monotonic() > deadline:
                raise WaitTimeout(
                    f"A collector (pid {os.getpid()}) is in the middle of a batch and has begun no forward within "
                    f"{_FORWARD_SECONDS} s, so its policy can't be bound between two of them; the next push tries again"
                )


class Batches:
    """Stands where a collector's `next()` finds its iterator, and runs an action between two batches."""

    def __init__(self, collector: Any) -> None:
        self._collector, self._own = collector, collector._iterator
        self._lock, self._running = threading.Lock(), False
        self._action: Callable[[], None] | None = None
        collector._iterator = self

    def before_the_next(self, action: Callable[[], None]) -> None:
        """Run it now, if no batch is being made; else, and again, at the beginning of the next."""
        with self._lock:
            self._action = action
            # A batch that was begun before this object was there shows by its generator alone.
            if not self._running and not makes_a_batch(self._own):
                action()

    def __next__(self) -> Any:
        with self._lock:
            if self._action is not None:
                self._action()
            self._running = True
        try:
            if self._own is None:
                self._own = iter(self._collector)
            return next(self._own)
        finally:
            self._running = False

    def leave(self) -> None:
        """Put the collector's own iterator back."""
        if self._collector._iterator is self:
            self._collector._iterator = self._own
