"""A binding's switch to the newest slot, in the memories that its modules are in."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from . import device, segment, slots
from .errors import WaitTimeout
from .imports import Imports, View
from .leases import Locks
from .mapped import MappedData
from .passing import Reader

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .subscriber import Subscriber

# How often a wait looks whether the publisher still lives.
LOOK_SECONDS = 0.02
# How long the publisher may take to bring to the host what it has published on devices only.
BRING_SECONDS = 10.0


class _Absent(Exception):
    """The version that a row points to has no bytes yet in the memory where they are needed."""

    def __init__(self, word: int) -> None:
        self.word = word
        super().__init__(word)


def switch(
    subscriber: Subscriber,
    bound: slots.Bound,
    memories: frozenset[int],
    point: Callable[[Mapping[int, View]], list[device.Event]],
) -> int:
    """Move a binding to the newest slot. ``memories``: that its modules are in. ``point`` gets the slot's views,
    and gives the events after which the binding's old slot is not read any more."""
    data = subscriber._find_data()
    if data is None:
        return 0
    if subscriber._passing:
        subscriber.let_pass()
    before = bound.word

    def pointed(word: int) -> None:
        views = _views(subscriber, data, word, memories)
        reader: Reader | None = None
        if before and any(memory >= 0 for memory in memories):
            with subscriber._locked():  # a lease more, before the slot is left: it ends with its readers' streams
                slot = slots.slot_of(before)
                data.holder.counts[slot] += 1
                reader = subscriber._passing.add(slot)
        events: list[device.Event] = []
        try:
            events = point(views)
        finally:
            if reader is not None:
                reader.events = events

    try:
        word = subscriber._run(data, slots.switch(data.holder, bound), pointed)
    except _Absent as absent:
        subscriber._absent = absent.word
        subscriber._wishing.absent = True
        subscriber.wish()
        return before
    if word != before:
        subscriber._wishing.absent = False
        subscriber._uses(slots.version_of(word))
        if before:
            subscriber._written.leave(slots.slot_of(before), data)
        if subscriber._imports is not None:
            subscriber.unmap_retired()
            subscriber.wish()
    return word


def has_come(data: MappedData, word: int) -> bool:
    """Whether a version's bytes are on the host."""
    return data.on_host(slots.slot_of(word)) == slots.version_of(word)


def awaits_bytes(subscriber: Subscriber) -> bool:
    """Whether a version is published, but not to the memory where it is needed here, and will be. It waits a moment
    for that."""
    bell = subscriber.bell
    if not subscriber._absent or bell is None or subscriber._line is None or not subscriber.publisher_alive():
        return False
    bell.wait(bell.count, LOOK_SECONDS)
    return True


def acquire_on_host(subscriber: Subscriber) -> int:
    """Lease the newest slot and see to it that its bytes are on the host; 0 while nothing is published."""
    deadline = time.monotonic() + BRING_SECONDS
    while True:
        data, bell = subscriber._find_data(), subscriber.bell
        count = bell.count if bell is not None else 0
        word = subscriber._run(data, slots.acquire(data.holder)) if data is not None else 0
        if data is None or not word or has_come(data, word):
            return word
        subscriber._run(data, slots.release(data.holder, slots.slot_of(word)))
        subscriber._wishing.leases = True
        subscriber.wish()
        if time.monotonic() > deadline or subscriber._line is None or not subscriber.publisher_alive():
            raise WaitTimeout(
                f"Version {slots.version_of(word)} was published on devices only, and the publisher, pid "
                f"{subscriber.handle.pid}, has not brought it to the host within {BRING_SECONDS} s"
            )
        if bell is not None:
            bell.wait(count, LOOK_SECONDS)


def _views(subscriber: Subscriber, data: MappedData, word: int, memories: frozenset[int]) -> dict[int, View]:
    """A leased slot in the memories of a binding; on the host, where it is not to be had in one of them."""
    slot, version = slots.slot_of(word), slots.version_of(word)
    views: dict[int, View] = {}
    for memory in memories:
        view = _on_device(subscriber, data, memory, slot, version) if memory >= 0 else None
        if view is not None:
            views[memory] = view
    if len(views) == len(memories) and views:
        return views
    if data.on_host(slot) != version:
        raise _Absent(word)
    mapped = subscriber._slot(slot)
    views[device.HOST] = View(mapped.tensors, mapped.addresses, mapped.span)
    return views


def _on_device(subscriber: Subscriber, data: MappedData, memory: int, slot: int, version: int) -> View | None:
    if subscriber._imports is None:
        locks = subscriber._locks
        subscriber._imports = Imports(data, subscriber.handle, lambda: Locks(segment.reopen(locks.fd, os.O_RDONLY)))
    return subscriber._imports.view(memory, slot, version)
