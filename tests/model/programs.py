"""What the simulated threads do: the shipping generators, put to use as publisher.py, binding.py and subscriber.py do.

A program is a generator of operations over the `Objects` of its process. Locals that are not needed any more are kept
out of it (short functions), since they would tell apart states that are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from .state import Fault
from .threads import Objects, Operation, Program
from .words import slot_of

Steps = Generator[Operation, Any, Any]


def expanded(steps: Steps, parts: dict[str, Callable[..., Steps]]) -> Steps:
    """A generator whose operations of the given names are made of smaller ones. As `slots.drive` passes errors on."""
    resume: Callable[[Any], Operation] = steps.send
    value: Any = None
    while True:
        try:
            operation = resume(value)
        except StopIteration as stop:
            return stop.value
        try:
            part = parts.get(operation[0])
            value = (yield operation) if part is None else (yield from part(*operation[1:]))
            resume = steps.send
        except Fault as fault:
            resume, value = steps.throw, fault


# ── The publisher ───────────────────────────────────────────────────────────────────────────────────────────────────


class Push(NamedTuple):
    """A publish: the rows that it moves, and the leaves that the caller brings."""

    rows: tuple[int, ...] = (0,)
    changed: tuple[int, ...] = (0, 1)


class GiveBack(NamedTuple):
    """Give back one of the slots that have memory, any of them."""


Act = Push | GiveBack


def publisher(slots: ModuleType, leaves: int, max_slots: int, acts: Sequence[Sequence[Act]]) -> Program:
    """A publisher that does one act after the other; each is chosen from several."""

    def program(_: Objects) -> Steps:
        writer = slots.Writer(leaves, max_slots)
        for options in acts:
            number = 0 if len(options) == 1 else (yield ("choose", *range(len(options))))
            act = options[number]
            if isinstance(act, GiveBack):
                yield from _give_back(slots, writer)
            else:
                yield from _push(slots, writer, act)

    return program


def _push(slots: ModuleType, writer: Any, push: Push) -> Steps:
    changed = push.changed if writer.newest else tuple(range(writer.leaves))
    yield ("attempt", 0 in push.rows, changed)
    raised = False
    try:
        steps = slots.publish(writer, push.rows, np.array(changed, np.int64))
        yield from expanded(steps, {"copy_in": _copy_in, "copy_over": _copy_over})
    except Fault:
        raised = True
    yield ("outcome", push.rows, writer.version, raised)


def _give_back(slots: ModuleType, writer: Any) -> Steps:
    if not writer.stamps:
        return
    slot = yield ("choose", *sorted(writer.stamps))
    yield ("give_back_begins",)
    with suppress(Fault):
        yield from slots.give_back(writer, slot)
    yield ("give_back_ends",)


def _copy_in(slot: int, leaves: np.ndarray) -> Steps:
    for leaf in leaves.tolist():
        yield ("write", slot, leaf)


def _copy_over(slot: int, source: int, leaves: np.ndarray) -> Steps:
    for leaf in leaves.tolist():
        yield ("write_over", slot, leaf, source)


# ── A subscriber's threads ──────────────────────────────────────────────────────────────────────────────────────────


class Forwards(NamedTuple):
    """Runs forwards of a binding. `joins`: in a subscriber that attaches then. `unbind`: lets it go afterwards."""

    times: int
    binding: int = 0
    joins: bool = False
    unbind: bool = False


class Notified(NamedTuple):
    """Gets notifications: each lets a binding switch between two forwards."""

    times: int
    binding: int = 0


class Leases(NamedTuple):
    """Takes leases, reads and ends them."""

    times: int


class Writes(NamedTuple):
    """Writes a leaf through an alias of a binding that it has got some time before."""

    times: int = 1
    binding: int = 0


Job = Forwards | Notified | Leases | Writes


def job(slots: ModuleType, leaves: int, what: Job) -> Program:
    """The program of one thread of a subscriber."""
    runner = {Forwards: _forwards, Notified: _notified, Leases: _leases, Writes: _writes}[type(what)]

    def program(objects: Objects) -> Steps:
        if getattr(what, "joins", False):
            yield ("join", objects.holder.rows)
        for _ in range(what.times):
            yield from runner(slots, objects, leaves, what)
        if getattr(what, "unbind", False):
            yield from _unbind(slots, objects, what.binding)

    return program


def _forwards(slots: ModuleType, objects: Objects, leaves: int, what: Forwards) -> Steps:
    """Binding.call: through the gate, then each leaf."""
    try:
        yield from _switch_if_news(slots, objects, what.binding, (yield ("gate_lock", what.binding)))
    except Fault:
        yield ("gate_unlock", what.binding, False)
        return
    yield ("gate_unlock", what.binding, True)
    word = objects.bounds[what.binding].word
    if word:
        for leaf in range(leaves):
            yield ("read", what.binding, leaf, word)
    yield ("gate_leave", what.binding)


def _notified(slots: ModuleType, objects: Objects, leaves: int, what: Notified) -> Steps:
    """Gate.try_switch."""
    with suppress(Fault):
        yield from _switch_if_news(slots, objects, what.binding, (yield ("gate_lock", what.binding)))
    yield ("gate_unlock", what.binding, False)


def _switch_if_news(slots: ModuleType, objects: Objects, binding: int, inside: int) -> Steps:
    """Gate._switch_when_empty: waits for those inside, but only for a while."""
    if not (yield from _has_news(objects, binding)):
        return
    if inside:
        yield ("gate_unlock", binding, False)
        if (yield ("gate_lock", binding)) or not (yield from _has_news(objects, binding)):
            return
    floor = yield ("floor", objects.holder.rows)
    word = yield from _run(objects, slots.switch(objects.holder, objects.bounds[binding]), binding)
    yield ("acquired", word, floor)


def _run(objects: Objects, steps: Steps, binding: int = 0) -> Steps:
    """Subscriber._run: what the operations are in this subscriber, for this binding."""
    parts: dict[str, Callable[..., Steps]] = {"point": lambda word: _point(word, binding)}
    if objects.queued:
        parts["leave"] = lambda: _leave(objects)
    return expanded(steps, parts)


def _point(word: int, binding: int) -> Steps:
    yield ("point", word, binding)


def _has_news(objects: Objects, binding: int) -> Steps:
    newest = 0
    for row in objects.holder.rows:
        newest = max(newest, (yield ("load_row", row)))
    return newest > objects.bounds[binding].word


def _unbind(slots: ModuleType, objects: Objects, binding: int) -> Steps:
    """Binding._let_go and Subscriber.release."""
    yield ("gate_lock", binding)
    word = objects.bounds[binding].word
    if word:
        yield ("detach", binding)
        objects.bounds[binding].word = 0
        with suppress(Fault):
            yield from _run(objects, slots.release(objects.holder, slot_of(word)))
    yield ("gate_unlock", binding, False)


def _leases(slots: ModuleType, objects: Objects, leaves: int, what: Leases) -> Steps:
    try:
        word = yield from _take(slots, objects)
    except Fault:
        return
    if not word:
        return
    for leaf in range(leaves):
        yield ("read_lease", word, leaf)
    yield ("let_go", word)
    if objects.queued:
        yield from _release_later(objects, slot_of(word))
    else:
        with suppress(Fault):
            yield from _run(objects, slots.release(objects.holder, slot_of(word)))


def _take(slots: ModuleType, objects: Objects) -> Steps:
    floor = yield ("floor", objects.holder.rows)
    word = yield from _run(objects, slots.acquire(objects.holder))
    if word:
        yield ("acquired", word, floor)
        yield ("hold", word)
    return word


def _release_later(objects: Objects, slot: int) -> Steps:
    """Subscriber._release_later."""
    yield ("queue", slot)
    if (yield ("try_enter",)):
        yield from _leave(objects)


def _leave(objects: Objects) -> Steps:
    """Subscriber._leave: whoever lets the mutex go ends what was queued meanwhile."""
    yield ("leave",)
    while (yield ("queued",)) and (yield ("try_enter",)):
        slot = yield ("take_queued",)
        if slot is not None:
            objects.holder.counts[slot] -= 1
            if not objects.holder.counts[slot]:
                del objects.holder.counts[slot]
                yield ("unlock", slot)
        yield ("leave",)


def _writes(slots: ModuleType, objects: Objects, leaves: int, what: Writes) -> Steps:
    word = yield ("alias", what.binding)
    if word:
        yield ("write_alias", slot_of(word), 0)
