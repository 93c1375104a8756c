"""All interleavings of a scope's threads, breadth first: the first violation found has a shortest schedule.

A state is a row of numbers: the shared machine, each process, each thread. Equal parts have equal numbers, so that a
step is worked out once for all states that differ only in what it does not touch.
"""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .invariants import check_end, check_process, check_shared
from .operations import Operations, Outcome
from .state import DEAD, Process, Shared, Violation, Worker
from .stuck import first_stuck
from .threads import END, Memory, Thread

# Operations of no interest to anybody else. The first are run together with the step after them, the others together
# with the step before. Those in *_ALONE only while the process has but one thread.
AHEAD = frozenset({"choose", "attempt", "give_back_begins", "floor"})
AHEAD_ALONE = AHEAD | {"enter", "gate_lock"}
BEHIND = frozenset({"outcome", "give_back_ends", "acquired", "hold", "let_go", "again"})
BEHIND_ALONE = BEHIND | {"leave", "gate_unlock", "gate_leave", "drop_private"}


@dataclass
class Model:
    """What is explored: the first state, and the operations. Process i has description i; the publisher is 0."""

    name: str
    operations: Operations
    shared: Shared
    processes: list[Process]
    threads: list[Thread]
    may_wait: bool = False


@dataclass
class Report:
    """What an exploration found."""

    name: str
    states: int = 0
    steps: int = 0
    seconds: float = 0.0
    violation: str = ""
    schedule: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        text = f"{self.name}: {self.states} states, {self.steps} steps, {self.seconds:.1f} s"
        if self.violation:
            text += f"\n  {self.violation}\n" + "\n".join(f"    {line}" for line in self.schedule)
        return text


class _Step(NamedTuple):
    """One outcome of a thread's step: the numbers that it changes, and its text for the schedule."""

    thread: int
    process: int
    shared: int
    text: str


class Numbers:
    """Numbers for equal values, in the order of their coming."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Hashable, int] = {}

    def of(self, value: Hashable) -> int:
        number = self._numbers.setdefault(value, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


State = tuple[int, ...]


class Explorer:
    """Explores one model. `limit`: give up after so many states."""

    def __init__(self, model: Model, limit: int = 20_000_000) -> None:
        self._model, self._limit = model, limit
        self._shared, self._processes = Numbers(), Numbers()
        self._strict = model.operations.strict
        self._first_thread = 1 + len(model.processes)
        alone = [sum(other.process == thread.process for other in model.threads) == 1 for thread in model.threads]
        self._ahead = [AHEAD_ALONE if single else AHEAD for single in alone]
        self._behind = [BEHIND_ALONE if single else BEHIND for single in alone]
        self._steps: list[dict[tuple[int, int, int], list[_Step] | Violation]] = [{} for _ in model.threads]
        self._ends: list[dict[tuple[int, int], list[tuple[str, int, int]]]] = [{} for _ in model.processes]
        self._sound: set[tuple[int, int, int]] = set()
        self._states: list[State] = []
        self._numbers: dict[State, int] = {}
        self._parents, self._edges = array("l"), (array("l"), array("l"))
        self._final: list[int] = []

    def run(self) -> Report:
        begin = time.perf_counter()
        report = Report(self._model.name)
        at = 0
        # Millions of small tuples, none in a cycle.
        collects = gc.isenabled()
        gc.disable()
        try:
            self._reach(self._first(), 0)
            while at < len(self._states):
                self._expand(at)
                at += 1
            stuck = first_stuck(len(self._states), *self._edges, self._final)
            if stuck is not None:
                at = stuck
                raise Violation("4: no way on from here lets everybody finish")
        except Violation as violation:
            report.violation = str(violation)
            report.schedule = self._schedule(at, report.violation)
        finally:
            for thread in self._model.threads:
                thread.close()
            if collects:
                gc.enable()
        report.states, report.steps = len(self._states), len(self._edges[0])
        report.seconds = time.perf_counter() - begin
        return report

    # --- states

    def _first(self) -> State:
        processes = list(self._model.processes)
        threads = []
        for thread in self._model.threads:
            number, _ = thread.start()
            threads.append(number)
        return (self._shared.of(self._model.shared), *map(self._processes.of, processes), *threads)

    def _reach(self, state: State, parent: int) -> int:
        number = self._numbers.setdefault(state, len(self._states))
        if number == len(self._states):
            if number > self._limit:
                raise Violation(f"more than {self._limit} states")
            self._states.append(state)
            self._parents.append(parent)
            self._check(state)
        return number

    def _check(self, state: State) -> None:
        shared = state[0]
        if (shared, -1, -1) not in self._sound:
            check_shared(self._shared.values[shared], self._strict)
            self._sound.add((shared, -1, -1))
        if not self._strict:
            return
        for description in range(len(self._model.processes)):
            key = (shared, description, state[1 + description])
            if key not in self._sound:
                check_process(description, self._processes.values[key[2]], self._shared.values[shared])
                self._sound.add(key)

    def _expand(self, at: int) -> None:
        state = self._states[at]
        sources, targets = self._edges
        for _, after in self._successors(state):
            targets.append(self._reach(after, at))
            sources.append(at)
        if self._is_final(state):
            self._final.append(at)

    def _is_final(self, state: State) -> bool:
        if any(number != END for number in state[self._first_thread :]):
            return False
        if self._strict:
            shared = self._shared.values[state[0]]
            for description in range(len(self._model.processes)):
                check_end(description, self._processes.values[state[1 + description]], shared)
        return True

    # --- steps

    def _successors(self, state: State) -> Iterator[tuple[str, State]]:
        shared = state[0]
        for number, thread in enumerate(self._model.threads):
            position, process = self._first_thread + number, 1 + thread.process
            if state[position] == END:
                continue
            key = (state[position], state[process], shared)
            steps = self._steps[number].get(key)
            if steps is None:
                steps = self._steps[number][key] = self._work_out(number, *key)
            if isinstance(steps, Violation):
                raise steps
            for step in steps:
                after = list(state)
                after[0], after[process], after[position] = step.shared, step.process, step.thread
                yield step.text, tuple(after)
        now = self._shared.values[shared]
        if now.kills or now.stops:
            for description in range(len(self._model.processes)):
                yield from self._ended(state, description)

    def _ended(self, state: State, description: int) -> Iterator[tuple[str, State]]:
        """A process is killed, or stopped for good."""
        key = (state[0], state[1 + description])
        ends = self._ends[description].get(key)
        if ends is None:
            ends = self._ends[description][key] = [
                (text, self._shared.of(shared), self._processes.of(process))
                for text, shared, process in _ends(description, *self._values(*key))
            ]
        for text, shared, process in ends:
            after = list(state)
            after[0], after[1 + description] = shared, process
            for number, thread in enumerate(self._model.threads):
                if thread.process == description:
                    after[self._first_thread + number] = END
            yield text, tuple(after)

    def _values(self, shared: int, process: int) -> tuple[Shared, Process]:
        return self._shared.values[shared], self._processes.values[process]

    def _work_out(self, number: int, thread: int, process: int, shared: int) -> list[_Step] | Violation:
        """All outcomes of a thread's next step, with the operations that are run together with it."""
        walk = _Walk(self, number)
        try:
            walk.go(thread, Outcome(None, *self._values(shared, process)), "", False)
        except Violation as violation:
            return Violation(f"{violation} (at {walk.text})")
        return walk.found

    # --- schedules

    def _schedule(self, at: int, violation: str) -> list[str]:
        path = [at]
        while path[-1] != 0:
            path.append(self._parents[path[-1]])
        path.reverse()
        lines = [self._text(before, after) for before, after in zip(path, path[1:], strict=False)]
        return lines

    def _text(self, before: int, after: int) -> str:
        for text, state in self._successors(self._states[before]):
            if state == self._states[after]:
                return text
        raise AssertionError("a state was reached by no step")


def _ends(description: int, shared: Shared, process: Process) -> Iterator[tuple[str, Shared, Process]]:
    if process is DEAD or process.stopped:
        return
    if shared.kills:
        after = shared.without_locks_of(description)._replace(kills=shared.kills - 1)
        yield f"process {description} is killed", after, DEAD
    if shared.stops:
        after = shared._replace(stops=shared.stops - 1)
        yield f"process {description} is stopped", after, process._replace(stopped=True)


class _Walk:
    """The operations of one step of a thread, and their outcomes."""

    def __init__(self, explorer: Explorer, number: int) -> None:
        self._explorer, self._model = explorer, explorer._model
        self._thread = self._model.threads[number]
        self._ahead, self._behind = explorer._ahead[number], explorer._behind[number]
        self.found: list[_Step] = []
        self.text = ""

    def go(self, state: int, before: Outcome, text: str, stepped: bool) -> None:
        operation = self._thread.operation(state)
        name = operation[0]
        operations = self._model.operations
        if state == END or (stepped and (name not in self._behind or operations.may_fail(self._thread, name))):
            self._arrive(state, before, text)
            return
        if name == "wait" and not self._model.may_wait:
            raise Violation("4: the publisher waits for a slot")
        self.text = f"{text}{self._thread.name} {_call(operation)}"
        ahead = name in self._ahead and not operations.may_fail(self._thread, name)
        for outcome in operations.perform(self._thread, operation, before.shared, before.process):
            told = f"{text}{self._thread.name} {_call(operation)}{f' -> {outcome.note}' if outcome.note else ''}"
            self.text = told
            after, moved = self._advance(state, outcome)
            if operations.strict:
                check_process(self._thread.process, moved.process, moved.shared)
            self.go(after, moved, told + "; ", stepped or not ahead)

    def _advance(self, state: int, outcome: Outcome) -> tuple[int, Outcome]:
        process = outcome.process
        worker = isinstance(process, Worker)
        memory = Memory(process.counts, process.words) if worker else Memory()
        after, memory = self._thread.advance(state, memory, outcome.result)
        if worker:
            process = process._replace(counts=memory.counts, words=memory.words)
        return after, outcome._replace(process=process)

    def _arrive(self, state: int, after: Outcome, text: str) -> None:
        explorer = self._explorer
        shared, process = explorer._shared.of(after.shared), explorer._processes.of(after.process)
        self.found.append(_Step(state, process, shared, text.rstrip("; ")))


def _call(operation: tuple[Any, ...]) -> str:
    return f"{operation[0]}({', '.join(map(str, operation[1:]))})"


Build = Callable[[], Model]
