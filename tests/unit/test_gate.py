"""The gate: forwards in numbers, switches only while none is inside, and nobody waits for long.

Mutants: hold newcomers for ever (nested threads deadlock); hold nobody (a busy worker never switches); leave only on
success (an exception blocks every later switch).
"""

import threading
import time
from collections.abc import Callable

import pytest

from shmsync.gate import PATIENCE_SECONDS, Gate

PATIENT = 30.0


class World:
    """A gate with a version; `offer()` is news, a switch takes it and notes whether anybody was inside."""

    def __init__(self, patience: float = PATIENCE_SECONDS) -> None:
        self.offered = self.version = self.inside = 0
        self.intrusions = 0
        self.error: BaseException | None = None
        self.gate = Gate(lambda: self.offered > self.version, self.switch, patience)
        self.count = threading.Lock()

    def offer(self) -> int:
        self.offered += 1
        return self.offered

    def switch(self) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self.intrusions += self.inside
        self.version = self.offered

    def run(self, body: Callable[[], object] = lambda: None) -> int:
        """One forward; the version that it used from its beginning to its end."""
        depth = self.gate.depth()
        self.gate.enter()
        with self.count:
            self.inside += 1
        try:
            before = self.version
            body()
            assert self.version == before, "switched in the middle of a forward"
            return before
        finally:
            with self.count:
                self.inside -= 1
            self.gate.leave(depth)


class InAForward:
    """A thread that stays inside a forward until told to leave."""

    def __init__(self, world: World) -> None:
        self.end, inside = threading.Event(), threading.Event()
        body = lambda: (inside.set(), self.end.wait(PATIENT))  # noqa: E731
        self.thread = threading.Thread(target=world.run, args=(body,))
        self.thread.start()
        assert inside.wait(PATIENT)

    def leave(self) -> None:
        self.end.set()
        self.thread.join(PATIENT)


def in_thread(action: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=action)
    thread.start()
    return thread


def test_a_forward_begins_on_the_newest_version() -> None:
    world = World()
    for version in (1, 2, 3):
        world.offer()
        assert world.run() == version


def test_no_news_no_switch() -> None:
    world = World()
    world.error = AssertionError("asked for nothing")
    world.run()
    world.gate.try_switch()


def test_a_switch_during_a_forward_waits_for_its_end() -> None:
    world = World(PATIENT)
    forward = InAForward(world)
    world.offer()
    switcher = in_thread(world.gate.try_switch)
    time.sleep(0.05)
    assert world.version == 0
    forward.leave()
    switcher.join(PATIENT)
    assert (world.version, world.intrusions) == (1, 0)


def test_a_nested_call_never_waits_and_stays_on_its_version() -> None:
    world = World(PATIENT)
    world.offer()

    def outer() -> None:
        world.offer()
        began = time.monotonic()
        assert world.run() == 1
        assert time.monotonic() - began < PATIENT / 2

    assert world.run(outer) == 1
    assert world.run() == 2


def test_only_the_outermost_entry_says_so() -> None:
    gate = World().gate
    assert [gate.enter(), gate.enter(), gate.enter()] == [True, False, False]
    for depth in (2, 1, 0):
        gate.leave(depth)
    assert gate.enter()
    gate.leave(0)


def test_a_newcomer_joins_the_version_of_those_inside_after_a_short_wait() -> None:
    """The one inside may be waiting for the newcomer."""
    world = World(0.1)
    world.offer()
    world.run()
    forward = InAForward(world)
    world.offer()
    assert world.run() == 1
    forward.leave()
    assert world.run() == 2


def test_a_newcomer_is_held_until_the_last_forward_has_ended() -> None:
    world = World(PATIENT)
    forward = InAForward(world)
    world.offer()
    used: list[int] = []
    newcomer = in_thread(lambda: used.append(world.run()))
    time.sleep(0.05)
    assert used == []
    forward.leave()
    newcomer.join(PATIENT)
    assert used == [1]


def test_a_forward_that_waits_for_another_threads_forward_ends() -> None:
    """Two rounds of patience would be enough; a gate that holds for ever would hang here."""
    world = World(0.1)

    def outer() -> None:
        world.offer()
        other = in_thread(world.run)
        other.join(PATIENT)
        assert not other.is_alive()

    assert world.run(outer) == 0
    assert world.run() == 1


def test_after_a_fruitless_wait_newcomers_run_freely_for_a_while() -> None:
    """Not every one of them pays the patience again: a hundred entries in one wait's time."""
    world = World(1.0)
    forward = InAForward(world)
    world.offer()
    began = time.monotonic()
    for _ in range(100):
        assert world.run() == 0
    assert time.monotonic() - began < 20.0, "a hundred waits of a second"
    forward.leave()
    assert world.run() == 1


def test_busy_threads_without_a_pause_still_get_their_switch() -> None:
    """Forwards overlap all the time, so that without holding newcomers back nobody is ever alone."""
    world = World(5.0)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            world.run(lambda: time.sleep(0.002))

    threads = [in_thread(work) for _ in range(3)]
    for _ in range(20):
        version = world.offer()
        deadline = time.monotonic() + PATIENT
        while world.version < version and time.monotonic() < deadline:
            time.sleep(0.001)
        assert world.version == version
    stop.set()
    for thread in threads:
        thread.join(PATIENT)
    assert world.intrusions == 0


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_forward_that_raises_has_left(error) -> None:
    world = World(PATIENT)

    def body() -> None:
        raise error

    with pytest.raises(error):
        world.run(body)
    world.offer()
    began = time.monotonic()
    assert world.run() == 1
    assert time.monotonic() - began < PATIENT / 2
    assert world.gate._inside == {}


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_switch_that_raises_lets_nobody_in_and_is_tried_again(error) -> None:
    world = World()
    world.offer()
    world.error = error()
    with pytest.raises(error):
        world.gate.enter()
    assert world.gate._inside == {}
    assert world.run() == 1


def test_a_switch_is_not_made_from_inside_a_forward() -> None:
    world = World()

    def body() -> None:
        world.offer()
        world.gate.try_switch()

    assert world.run(body) == 0
    assert world.run() == 1


def test_an_exclusive_action_waits_for_forwards_of_others_and_not_for_its_own() -> None:
    world = World()
    forward = InAForward(world)
    alone: list[int] = []
    unbinder = in_thread(lambda: world.gate.exclusive(lambda: alone.append(world.inside)))
    time.sleep(0.05)
    assert alone == []
    forward.leave()
    unbinder.join(PATIENT)
    assert alone == [0]
    world.run(lambda: world.gate.exclusive(lambda: alone.append(world.inside)))
    assert alone == [0, 1]
