"""A thread of a simulated process: the shipping generators, made into an automaton.

A generator can't be copied, so each of its states is reached by running a fresh one through the same history; two
histories that leave the same picture (freeze.py) are one state. What several threads of a process share, a `Holder`'s
counts and the words of its `Bound`s, is written into the fresh objects before each step, and read back after it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from .freeze import freeze
from .state import Fault, Violation

Operation = tuple[Any, ...]
Program = Callable[["Objects"], Generator[Operation, Any, None]]
FAULT = "fault"
DONE = ("done",)
END = 0  # falsy: `any(threads)` says whether somebody still runs


class Memory(NamedTuple):
    """What the threads of one process share of the shipping classes."""

    counts: tuple[tuple[int, int], ...] = ()
    words: tuple[int, ...] = ()


class Objects:
    """The instances of the shipping classes that a process's generators work on.

    `queued`: its leases end as a `Lease`'s last tensor does, at any moment.
    """

    def __init__(self, slots: ModuleType, rows: tuple[int, ...], bindings: int, queued: bool = False) -> None:
        self.queued = queued
        self.holder = slots.Holder(rows)
        self.bounds = [slots.Bound() for _ in range(bindings)]
        self.names = {id(self.holder): "holder", id(self.bounds): "bounds", id(self): "objects"}
        self.names |= {id(bound): f"bound {number}" for number, bound in enumerate(self.bounds)}

    def load(self, memory: Memory) -> None:
        self.holder.counts.clear()
        self.holder.counts.update(memory.counts)
        for bound, word in zip(self.bounds, memory.words, strict=True):
            bound.word = word

    def save(self) -> Memory:
        return Memory(tuple(sorted(self.holder.counts.items())), tuple(bound.word for bound in self.bounds))


class _Run:
    """A fresh generator with objects of its own."""

    def __init__(self, objects: Objects, program: Program) -> None:
        self.objects = objects
        self._steps = program(objects)

    def step(self, memory: Memory, value: Any) -> tuple[Operation, Memory]:
        """Send the result of the last operation; the next operation, and the memory after the code in between."""
        self.objects.load(memory)
        try:
            operation = self._steps.throw(Fault()) if value == FAULT else self._steps.send(value)
        except StopIteration:
            operation = DONE
        except Exception as error:
            raise Violation(f"the program ends with {type(error).__name__}: {error}") from error
        return _plain(operation), self.objects.save()

    def picture(self) -> Hashable:
        return freeze(self._steps, self.objects.names)

    def abandon(self) -> None:
        """End the generator although it yields in its `finally`s, which close() does not allow."""
        try:
            while True:
                self._steps.throw(Fault())
        except Exception:
            return


class _State(NamedTuple):
    operation: Operation
    history: tuple[tuple[Memory, Any], ...]


class Thread:
    """The automaton of one thread; its states are numbers, END when it has run out."""

    def __init__(self, name: str, process: int, number: int, make: Callable[[], Objects], program: Program) -> None:
        self.name, self.process, self.number = name, process, number
        self._make, self._program = make, program
        self._states: list[_State] = [_State(DONE, ())]
        self._numbers: dict[Hashable, int] = {}
        self._edges: dict[tuple[int, Memory, Any], tuple[int, Memory]] = {}
        self._live: dict[int, _Run] = {}

    def start(self) -> int:
        """The first state, at the program's first operation."""
        run = _Run(self._make(), self._program)
        return self._arrive(run, (), run.objects.save(), None)[0]

    def operation(self, state: int) -> Operation:
        return self._states[state].operation

    def advance(self, state: int, memory: Memory, value: Any) -> tuple[int, Memory]:
        """The state after an operation's result (or FAULT) has been sent."""
        edge = (state, memory, value)
        known = self._edges.get(edge)
        if known is None:
            history = self._states[state].history
            run = self._live.pop(state, None) or self._replay(history)
            known = self._edges[edge] = self._arrive(run, history, memory, value)
        return known

    def close(self) -> None:
        while self._live:
            self._live.popitem()[1].abandon()

    def _replay(self, history: tuple[tuple[Memory, Any], ...]) -> _Run:
        run = _Run(self._make(), self._program)
        for memory, value in history:
            run.step(memory, value)
        return run

    def _arrive(self, run: _Run, history: tuple, memory: Memory, value: Any) -> tuple[int, Memory]:
        operation, after = run.step(memory, value)
        if operation == DONE:
            return END, after
        picture = operation, run.picture()
        number = self._numbers.setdefault(picture, len(self._states))
        if number == len(self._states):
            self._states.append(_State(operation, (*history, (memory, value))))
            self._live[number] = run
        else:
            run.abandon()
        return number, after


def _plain(operation: Operation) -> Operation:
    return tuple(tuple(part.tolist()) if isinstance(part, np.ndarray) else part for part in operation)
