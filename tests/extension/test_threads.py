"""The threads of `_C`: as many as asked for, at rest when idle, usable by several threads and after a fork."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from tests.extension.support import LOAD, SANITIZER, check_output, random_bytes

_C = pytest.importorskip("shmsync._C")

NBYTES = 4 << 20

# A process with one plan of 4 MiB, whose result `check()` looks at.
PRELUDE = f"""
import os, threading, time
import numpy as np
{LOAD}
source = np.random.default_rng(0).integers(0, 256, {NBYTES}, dtype=np.uint8)
destination = np.zeros_like(source)
plan = c.Plan([destination.ctypes.data], [source.ctypes.data], [source.nbytes])
def check():
    destination[:] = 0
    plan.run()
    assert (destination == source).all()
def helpers():
    names = {{t: open(f"/proc/self/task/{{t}}/comm").read().strip() for t in os.listdir("/proc/self/task")}}
    return [t for t, name in names.items() if name == "shmsync-copy"]
"""


def test_there_are_as_many_threads_as_asked_for() -> None:
    """Mutant: the calling thread is not counted."""
    code = "assert c.threads() == 1; check(); print(len(helpers())); c.set_threads(4); check(); print(len(helpers()))"
    assert check_output(PRELUDE + code).split() == ["0", "3"]


def test_the_environment_decides_over_the_program() -> None:
    code = "c.set_threads(4); assert c.threads() == 2; check(); print(len(helpers()))"
    assert check_output(PRELUDE + code, SHMSYNC_THREADS="2") == "1"


@pytest.mark.parametrize("count", [0, 1025])
def test_refuses_a_number_of_threads_that_cannot_be_meant(count: int) -> None:
    with pytest.raises(ValueError, match=f"Expected 1 to 1024 threads, got {count}"):
        _C.set_threads(count)


def test_idle_threads_use_no_processor() -> None:
    """Mutant: they spin until there is work."""
    code = """
c.set_threads(3)
for _ in range(20): check()
def ticks(): return sum(int(x) for t in helpers() for x in open(f"/proc/self/task/{t}/stat").read().split()[13:15])
time.sleep(0.05)
before = ticks()
time.sleep(1)
print(ticks() - before)
"""
    assert int(check_output(PRELUDE + code)) * 1000 / os.sysconf("SC_CLK_TCK") < 100  # ms of 2000


def test_signals_are_left_to_the_threads_that_python_knows() -> None:
    """Mutant: the helpers are started with the signal mask of the thread that starts them."""
    code = """
import signal
c.set_threads(3); check()
def masks():
    lines = [line for t in helpers() for line in open(f"/proc/self/task/{t}/status")]
    return [int(line.split()[1], 16) for line in lines if line.startswith("SigBlk")]
blocked = lambda number: [bool(m >> (number - 1) & 1) for m in masks()]
while any(blocked(signal.SIGSEGV)): time.sleep(0.01)  # a thread that has not run yet blocks every signal
assert all(blocked(number) == [True, True] for number in (signal.SIGINT, signal.SIGALRM, signal.SIGCHLD))
assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
"""
    check_output(PRELUDE + code)


def test_several_threads_run_plans_at_once() -> None:
    """Mutants: the sources of a run are kept where other runs find them; a run waits for the helpers of another."""
    before, nbytes = _C.threads(), 2 << 20
    _C.set_threads(3)
    sources = [random_bytes(nbytes, seed) for seed in range(4)]
    wrong: list[int] = []

    def work(i: int) -> None:
        own = np.zeros(nbytes, dtype=np.uint8)
        plan = _C.Plan([own.ctypes.data], None, [nbytes])
        for turn in range(20):
            source = sources[(i + turn) % 4]
            plan.run([source.ctypes.data])
            if not np.array_equal(own, source):
                wrong.append(i)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    _C.set_threads(before)
    assert wrong == []


@pytest.mark.skipif(SANITIZER == "thread", reason="ThreadSanitizer knows no threads in a forked child")
def test_a_forked_child_gets_threads_of_its_own() -> None:
    """A grandchild too; the parent keeps its own. Mutant: the child waits for the parent's threads."""
    code = """
import signal
c.set_threads(3); check(); assert len(helpers()) == 2
def fork(then):
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        try:
            then()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
def child():
    assert helpers() == []
    check(); assert len(helpers()) == 2
    fork(grandchild)
    check()
def grandchild():
    check(); assert len(helpers()) == 2
fork(child)
check(); assert len(helpers()) == 2
"""
    check_output("import warnings; warnings.simplefilter('ignore')" + PRELUDE + code)


@pytest.mark.skipif(SANITIZER == "thread", reason="ThreadSanitizer knows no threads in a forked child")
def test_a_fork_beside_a_running_copy_hangs_nobody() -> None:
    """Whatever the other threads hold at that moment. Mutant: the child keeps the parent's pool."""
    code = """
import signal
c.set_threads(3)
stop = threading.Event()
targets = [np.zeros_like(source) for _ in range(2)]
plans = [c.Plan([t.ctypes.data], [source.ctypes.data], [source.nbytes]) for t in targets]
def copy(plan):
    while not stop.is_set(): plan.run()
threads = [threading.Thread(target=copy, args=(plan,)) for plan in plans]
for thread in threads: thread.start()
for _ in range(25):
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        try:
            check(); check()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
stop.set()
for thread in threads: thread.join()
assert all((t == source).all() for t in targets)
"""
    check_output("import warnings; warnings.simplefilter('ignore')" + PRELUDE + code)


@pytest.mark.skipif(SANITIZER != "", reason="a sanitizer ends what has no memory left")
def test_threads_that_cannot_be_started_are_done_without() -> None:
    """Mutant: the failure goes through to the caller, or the copy waits for the missing thread."""
    code = """
import resource
c.set_threads(200)
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (24 << 20), resource.RLIM_INFINITY))
plan.run(); plan.run()
some = len(helpers())
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert (destination == source).all()
check()
print(some, len(helpers()))
"""
    some, later = map(int, check_output(PRELUDE + code).split())
    assert 0 <= some < 100
    assert later > some


_MASKS = """
def masks():
    return [os.sched_getaffinity(int(t)) for t in helpers()]
c.set_threads(2)
check()
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one processor, and nowhere else to go")
def test_sleeping_helpers_are_kept_off_the_callers_processor() -> None:
    """So that they are not woken there while another one is idle. Mutant: leave them where they are."""
    code = """
allowed = os.sched_getaffinity(0)
deadline = time.monotonic() + 30
while masks() == [allowed]:  # the first ones may not have been asleep yet
    assert time.monotonic() < deadline
    time.sleep(0.05)
    check()
(mask,) = masks()
print(mask < allowed, len(allowed - mask), os.sched_getaffinity(0) == allowed)
"""
    assert check_output(PRELUDE + _MASKS + code).split() == ["True", "1", "True"]


def test_a_caller_with_one_processor_shares_it() -> None:
    """As whoever pinned it wants it. Mutant: take any other processor."""
    code = (
        """
only = {min(os.sched_getaffinity(0))}
os.sched_setaffinity(0, only)
"""
        + _MASKS.strip()
        + """
for _ in range(5):
    time.sleep(0.05)
    check()
print(masks() == [only])
"""
    )
    assert check_output(PRELUDE + code).strip() == "True"
