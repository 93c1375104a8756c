"""Stamps: what the steps of a collector say about the version that their forward used."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

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
        self._env: Any = None  # whose trackers these are
        self._trackers: list[Any] = []

    def set(self, version: int) -> None:
        """The forward that begins now uses this version."""
        carrier = _carrier(self._collector)
        if self._env is None or self._env is not getattr(self._collector, "env", None):
            self._find_trackers()
        if self._trackers:
            for tracker in self._trackers:
                tracker.version = version
            if carrier is not None:
                _correct(carrier, version)
        if self._begun and carrier is not None:
            _put(carrier, version)

    def _find_trackers(self) -> None:
        """The collector's, and what has become of it in the environment: a transform around it (torchrl puts a counter
        of steps there for ``max_frames_per_traj``) has copies of those before it."""
        tracker = getattr(self._collector, "policy_version_tracker", None)
        self._env = getattr(self._collector, "env", None)
        self._trackers = []
        if tracker is not None and hasattr(tracker, "version"):
            inside = self._env.modules() if isinstance(self._env, nn.Module) else ()
            copies = [module for module in inside if type(module) is type(tracker) and module is not tracker]
            self._trackers = [tracker, *copies]

    def begin(self) -> None:
        """A rollout begins: make room for the entries of its steps."""
        self._env = None  # it may have got other transforms
        if not self._entries:
            return
        carrier = _carrier(self._collector)
        _put(carrier, 0)  # also where random steps come again, after a forward
        buffer = getattr(self._collector, "_final_rollout", None)
        if buffer is not None and buffer is not self._buffer and getattr(self._collector, "_use_buffers", True):
            _make_room(buffer)
            self._buffer = buffer
        self._begun = True


def has_entries(collector: Any) -> bool:
    """Whether an earlier attachment has begun with entries: they would stay as they are, so this one goes on."""
    carrier = _carrier(collector)
    return carrier is not None and ENTRY in carrier.keys(True)


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


def make_room_in(replay_buffer: Any) -> None:
    """Make room in a replay buffer whose storage torchrl has laid out before the processes that write to it start: what
    a storage has no room for it drops, and says nothing. A storage without a layout takes it from the first steps."""
    storage: Any = getattr(replay_buffer, "_storage", None)
    data = getattr(storage, "_storage", None)
    if not isinstance(data, TensorDictBase) or ENTRY in data.keys(True):
        return
    if data.is_memmap():
        data.make_memmap(ENTRY, shape=data.shape, dtype=torch.int64)
    else:
        _make_room(data, shared=data.is_shared())
    if getattr(storage, "_storage_keys", None) is not None:
        storage._storage_keys = None  # torchrl's note of what there is room for; it is made anew


def _make_room(buffer: Any, shared: bool = False) -> None:
    if ENTRY in buffer.keys(True):
        return
    room = torch.zeros(buffer.shape, dtype=torch.int64, device=buffer.device)
    if shared:
        room.share_memory_()
    if buffer.is_locked:
        with buffer.unlock_():
            buffer.set(ENTRY, room)
    else:
        buffer.set(ENTRY, room)
