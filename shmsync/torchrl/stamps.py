"""Stamps: what the steps of a collector say about the version that their forward used."""

from __future__ import annotations

from typing import Any

import torch

# The entry of each step, where it is asked for. torchrl keeps the ids of trajectories beside it.
ENTRY = ("collector", "policy_version")
# torchrl's own: written by its environment transform into what comes after the step, and carried to the next one.
_TRACKED = "policy_version"


class Stamps:
    """Writes the version of each forward to where the collector's steps record it.

    torchrl's tracker, if the collector has one, is set, and so is what it has carried over from the step before: it
    would say the version that was current then. ``entries``: each step also gets ``("collector", "policy_version")``,
    int64, of the environment's batch shape; 0 where a step made no forward, or one with the worker's own weights.
    Contract: `set` is called at the entry of a forward, on its thread; entries begin with a rollout, all steps of which
    then have them.
    """

    def __init__(self, collector: Any, entries: bool = False) -> None:
        self._collector, self._entries = collector, entries
        self._begun = False
        self._buffer: Any = None  # of the collector, with room for the entries

    def set(self, version: int) -> None:
        """The forward that begins now uses this version."""
        carrier = _carrier(self._collector)
        tracker = getattr(self._collector, "policy_version_tracker", None)
        if tracker is not None and hasattr(tracker, "version"):
            tracker.version = version
            if carrier is not None:
                _correct(carrier, version)
        if self._begun and carrier is not None:
            _put(carrier, version)

    def begin(self) -> None:
        """A rollout begins: make room for the entries of its steps."""
        if not self._entries:
            return
        carrier = _carrier(self._collector)
        if ENTRY not in carrier.keys(True):
            _put(carrier, 0)
        buffer = getattr(self._collector, "_final_rollout", None)
        if buffer is not None and buffer is not self._buffer and getattr(self._collector, "_use_buffers", True):
            _make_room(buffer)
            self._buffer = buffer
        self._begun = True


def _carrier(collector: Any) -> Any:
    """What a collector carries from step to step. Before torchrl 0.11 it had another name."""
    return getattr(collector, "_carrier", getattr(collector, "_shuttle", None))


def _correct(carrier: Any, version: int) -> None:
    before = carrier.get(_TRACKED, None)
    if isinstance(before, torch.Tensor):
        carrier.set(_TRACKED, torch.full_like(before, version))


def _put(carrier: Any, version: int) -> None:
    # A tensor of its own for each step: what is collected refers to it until the rollout is stacked.
    carrier.set(ENTRY, torch.full(carrier.shape, version, dtype=torch.int64, device=carrier.device))


def _make_room(buffer: Any) -> None:
    if ENTRY in buffer.keys(True):
        return
    room = torch.zeros(buffer.shape, dtype=torch.int64, device=buffer.device)
    if buffer.is_locked:
        with buffer.unlock_():
            buffer.set(ENTRY, room)
    else:
        buffer.set(ENTRY, room)
