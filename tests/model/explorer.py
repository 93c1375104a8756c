"""All interleavings of a scope's threads, breadth first: the first violation found has a shortest schedule.

A state is a row of numbers: the shared machine, each process, each thread. Equal parts have equal numbers, so that a
step is worked out once for all states that differ only in what it does not touch.
"""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .invariants import check_end, check_process, check_shared
from .state import Violation
from .steps import Model, Walk, ends
from .stuck import first_stuck
from .threads import END

State = tuple[int, ...]
_NOBODY = -1


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


class Explorer:
    """Explores one model, once."""

    def __init__(self, model: Model) -> None:
        self._model, self._strict = model, model.operations.strict
        self._first_thread = 1 + len(model.processes)
        self._shared, self._processes, self._states = Numbers(), Numbers(), Numbers()
        self._walks = [Walk(model, thread) for thread in model.threads]
        self._steps: list[dict[tuple[int, int, int], Any]] = [{} for _ in model.threads]
        self._ends: list[dict[tuple[int, int], list[tuple[str, int, int]]]] = [{} for _ in model.processes]
        self._sound: set[tuple[int, int, int]] = set()
        self._parents, self._sources, self._targets = array("q"), array("q"), array("q")
        self._final: list[int] = []

    def run(self) -> Report:
        """Look at every state, until one is wrong."""
        begin, collects = time.perf_counter(), gc.isenabled()
        gc.disable()  # millions of small tuples, none in a cycle
        try:
            report = self._explore()
        finally:
            for thread in self._model.threads:
                thread.close()
            if collects:
                gc.enable()
        report.states, report.steps = len(self._states.values), len(self._sources)
        report.seconds = time.perf_counter() - begin
        return report

    def _explore(self) -> Report:
        report = Report(self._model.name)
        at = 0
        try:
            self._reach(self._first(), 0)
            while at < len(self._states.values):
                self._expand(at)
                at += 1
            stuck = first_stuck(at, self._sources, self._targets, self._final)
            if stuck is not None:
                at = stuck
                raise Violation("4: no way on from here lets everybody finish")
        except Violation as violation:
            report.violation, report.schedule = str(violation), self._schedule(at)
        return report

    # --- states

    def _first(self) -> State:
        processes = [self._processes.of(process) for process in self._model.processes]
        return (self._shared.of(self._model.shared), *processes, *(thread.start() for thread in self._model.threads))

    def _reach(self, state: State, parent: int) -> int:
        number = self._states.of(state)
        if number == len(self._parents):
            self._parents.append(parent)
            self._check(state)
        return number

    def _check(self, state: State) -> None:
        shared = state[0]
        if (shared, _NOBODY, 0) not in self._sound:
            check_shared(self._shared.values[shared], self._strict)
            self._sound.add((shared, _NOBODY, 0))
        if not self._strict:
            return
        for description in range(len(self._model.processes)):
            key = (shared, description, state[1 + description])
            if key not in self._sound:
                check_process(description, self._processes.values[key[2]], self._shared.values[shared])
                self._sound.add(key)

    def _expand(self, at: int) -> None:
        state = self._states.values[at]
        for text, after in self._successors(state):
            try:
                self._targets.append(self._reach(after, at))
            except Violation as violation:
                raise Violation(f"{violation} (after {text})") from None
            self._sources.append(at)
        if self._all_done(state):
            self._final.append(at)
            self._check_end(state)

    def _check_end(self, state: State) -> None:
        for description in range(len(self._model.processes) if self._strict else 0):
            process = self._processes.values[state[1 + description]]
            check_end(description, process, self._shared.values[state[0]])

    # --- steps

    def _successors(self, state: State) -> Iterator[tuple[str, State]]:
        for number, thread in enumerate(self._model.threads):
            position, process = self._first_thread + number, 1 + thread.process
            if state[position] == END:
                continue
            for text, *after in self._thread_steps(number, state[position], state[process], state[0]):
                moved = list(state)
                moved[position], moved[process], moved[0] = after
                yield text, tuple(moved)
        now = self._shared.values[state[0]]
        if (now.kills or now.stops) and not self._all_done(state):
            for description in range(len(self._model.processes)):
                yield from self._ended(state, description)

    def _all_done(self, state: State) -> bool:
        return not any(state[self._first_thread :])

    def _thread_steps(self, number: int, *key: int) -> list[tuple[str, int, int, int]]:
        steps = self._steps[number].get(key)
        if steps is None:
            thread, process, shared = key
            found = self._walks[number].steps(thread, self._processes.values[process], self._shared.values[shared])
            if not isinstance(found, Violation):
                found = [(s.text, s.thread, self._processes.of(s.process), self._shared.of(s.shared)) for s in found]
            steps = self._steps[number][key] = found
        if isinstance(steps, Violation):
            raise steps
        return steps

    def _ended(self, state: State, description: int) -> Iterator[tuple[str, State]]:
        key = (state[0], state[1 + description])
        found = self._ends[description].get(key)
        if found is None:
            shared, process = self._shared.values[key[0]], self._processes.values[key[1]]
            found = [(t, self._shared.of(s), self._processes.of(p)) for t, s, p in ends(description, shared, process)]
            self._ends[description][key] = found
        for text, shared, process in found:
            after = list(state)
            after[0], after[1 + description] = shared, process
            for number, thread in enumerate(self._model.threads):
                if thread.process == description:
                    after[self._first_thread + number] = END
            yield text, tuple(after)

    # --- schedules

    def _schedule(self, at: int) -> list[str]:
        path = [at]
        while path[-1] != 0:
            path.append(self._parents[path[-1]])
        path.reverse()
        return [self._text(before, after) for before, after in zip(path, path[1:], strict=False)]

    def _text(self, before: int, after: int) -> str:
        states = self._states.values
        return next(text for text, state in self._successors(states[before]) if state == states[after])
