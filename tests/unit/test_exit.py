"""The end of the interpreter: no hang, no word on stderr, and no lease that ends before the process does.

Mutants: let the subscriber's finalizer run at the end; keep the publisher's mutex for ever; raise in daemon threads.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time

import pytest
import torch

from shmsync import Publisher


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def check_quiet(done: subprocess.CompletedProcess[str]) -> None:
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("action", ["close()", "publish()"])
@pytest.mark.parametrize("how", ["__del__", "a cycle's __del__", "atexit"])
def test_a_publisher_that_is_used_after_the_end(action: str, how: str) -> None:
    """An end like that of so many trainers: `def __del__(self): self.publisher.close()`."""
    done = run(
        f"""
        import atexit, sys
        how = {how!r}
        made = []
        def late():
            try:
                made[0].{action}
            except Exception as error:
                print(type(error).__name__)
        if how == "atexit":
            atexit.register(late)  # before torch and shmsync are there, and so after all of theirs
        import torch, shmsync
        publisher = shmsync.Publisher({{"x": torch.ones(4)}}); publisher.publish()
        made.append(publisher)
        class Trainer:
            def __del__(self, late=late):
                late()
        trainer = Trainer()
        if how == "atexit":
            Trainer.__del__ = lambda self: None
        elif how != "__del__":
            trainer.itself = trainer
        del publisher
        """
    )
    check_quiet(done)
    if how == "atexit":
        assert done.stdout == ("" if action == "close()" else "ChannelClosed\n")


def test_daemon_threads_that_publish_say_nothing() -> None:
    for _ in range(3):
        done = run(
            """
            import threading, time, torch, shmsync
            torch.set_num_threads(1)
            def main():
                weights = {f"p{i}": torch.ones(2000) for i in range(20)}
                publisher = shmsync.Publisher(weights)
                publisher.publish()
                def go_on(publisher=publisher, weights=weights):
                    while True:
                        publisher.publish(weights)
                threading.Thread(target=go_on, daemon=True).start()
                time.sleep(0.2)
            main()
            """
        )
        check_quiet(done)


def test_a_lease_lasts_as_long_as_the_process() -> None:
    """While a trainer goes on, in callbacks that run at the very end."""
    weights = {"x": torch.ones(20000)}
    code = """
    import atexit, sys, time
    def late():
        time.sleep(1)
        x = lease.weights["x"]
        print(float(x.min()) == float(x.max()) == value, binding.version == float(module.x.detach()[0]))
        print(bool(module()))
    atexit.register(late)  # before torch and shmsync are there, and so after all of theirs
    import torch, shmsync
    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.x = torch.nn.Parameter(torch.zeros(20000))
        def forward(self):
            return self.x.detach().min() == self.x.detach().max()
    torch.set_num_threads(1)
    module = Module()
    subscriber = shmsync.Subscriber(sys.argv[1])
    binding = subscriber.bind(module)
    lease = subscriber.lease()
    value = float(lease.weights["x"][0])
    """
    with Publisher(weights) as publisher:
        publisher.publish()
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), str(publisher.handle)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        end = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < end:
            weights["x"].fill_(publisher.version + 1)
            publisher.publish(weights)
            time.sleep(0.001)
        said, complained = process.communicate(timeout=10)
    assert (said.split(), complained) == (["True", "True", "True"], "")
