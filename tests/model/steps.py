"""One step of a thread or of fate: all its outcomes, worked out on the values themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from .invariants import check_process
from .operations import Operations
from .outcomes import Here, Outcome
from .state import DEAD, Process, Shared, Violation, Worker
from .threads import END, Memory, Thread

# Operations of no interest to anybody else. The first are run together with the step after them, the others together
# with the step before. Those in *_ALONE only while the process has but one thread.
_AHEAD = frozenset({"choose", "attempt", "give_back_begins", "floor"})
_AHEAD_ALONE = _AHEAD | {"enter", "gate_lock"}
_BEHIND = frozenset({"outcome", "give_back_ends", "acquired", "hold", "let_go", "again"})
_BEHIND_ALONE = _BEHIND | {"leave", "gate_unlock", "gate_leave", "drop_private"}


@dataclass
class Model:
    """What is explored: the first state, and the operations. Process i has description i; the publisher is 0."""

    name: str
    operations: Operations
    shared: Shared
    processes: list[Process]
    threads: list[Thread]
    may_wait: bool = False


class Step(NamedTuple):
    """One outcome: the thread's state, its process and what is shared afterwards; and a line for the schedule."""

    thread: int
    process: Process
    shared: Shared
    text: str


class Walk:
    """Works out a thread's next step, with the operations that are run together with it."""

    def __init__(self, model: Model, thread: Thread) -> None:
        alone = sum(other.process == thread.process for other in model.threads) == 1
        self._model, self._thread = model, thread
        self._ahead, self._behind = (_AHEAD_ALONE, _BEHIND_ALONE) if alone else (_AHEAD, _BEHIND)
        self._found: list[Step] = []
        self._text = ""

    def steps(self, state: int, process: Process, shared: Shared) -> list[Step] | Violation:
        """All outcomes, or what is wrong with one of them. None = the thread is blocked."""
        self._found = []
        try:
            self._go(state, Outcome(None, shared, process), "", False)
        except Violation as violation:
            return Violation(f"{violation} (at {self._text})")
        return self._found

    def _go(self, state: int, before: Outcome, text: str, stepped: bool) -> None:
        operation = self._thread.operation(state)
        name, operations = operation[0], self._model.operations
        may_fail = operations.may_fail(self._thread.process, name)
        if state == END or (stepped and (may_fail or name not in self._behind)):
            self._found.append(Step(state, before.process, before.shared, text.rstrip("; ")))
            return
        if name == "wait" and not self._model.may_wait:
            raise Violation("4: the publisher waits for a slot")
        stepped = stepped or may_fail or name not in self._ahead
        self._text = f"{text}{self._thread.name} {_call(operation)}"
        for outcome in operations.perform(Here(self._thread, before.shared, before.process), operation):
            told = f"{text}{self._thread.name} {_call(operation)}{f' -> {outcome.note}' if outcome.note else ''}"
            self._text = told
            after, moved = self._advance(state, outcome)
            if operations.strict:
                check_process(self._thread.process, moved.process, moved.shared)
            self._go(after, moved, told + "; ", stepped)

    def _advance(self, state: int, outcome: Outcome) -> tuple[int, Outcome]:
        process = outcome.process
        worker = isinstance(process, Worker)
        memory = Memory(process.counts, process.words) if worker else Memory()
        after, memory = self._thread.advance(state, memory, outcome.result)
        if worker:
            process = process._replace(counts=memory.counts, words=memory.words)
        return after, outcome._replace(process=process)


def ends(description: int, shared: Shared, process: Process) -> Iterator[tuple[str, Shared, Process]]:
    """A process is killed, or stopped for good."""
    if process is DEAD or process.stopped:
        return
    if shared.kills:
        after = shared.without_locks_of(description)._replace(kills=shared.kills - 1)
        yield f"process {description} is killed", after, DEAD
    if shared.stops:
        after = shared._replace(stops=shared.stops - 1)
        yield f"process {description} is stopped", after, process._replace(stopped=True)


def _call(operation: tuple[Any, ...]) -> str:
    return f"{operation[0]}({', '.join(map(str, operation[1:]))})"
