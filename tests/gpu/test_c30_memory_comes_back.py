"""C30: device memory stays as it is over 50 pushes and comes back at the end, with every allocator of torch.

Mutants: a slot taken anew for each push; `cudaFree` left out of the publisher's close; slots that are tensors of torch,
sent through its own IPC (the producer then says at its end that it has been terminated too early).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.c30_trainer import MARK, PUSHES
from tests.gpu.steps import MIB

ROOT = Path(__file__).resolve().parents[2]
# What must not be in the output of processes that did all they were asked for.
BAD = ("Traceback", "Exception ignored", "RuntimeWarning", "CUDA error", "terminated", "leaked")


@pytest.mark.parametrize("allocator", ["", "expandable_segments:True"], ids=["plain", "expandable segments"])
def test_device_memory(crew, allocator: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.c30_trainer"],
        cwd=ROOT,
        env=os.environ | {"PYTORCH_CUDA_ALLOC_CONF": allocator},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["mode"], report["mode at the end"]) == ("map", "map")
    used = report["after push"]
    assert len(used) == PUSHES
    assert max(used[3:]) <= used[2], f"Expected no growth after the third push, got {max(used[3:]) - used[2]} bytes"
    assert report["device_nbytes"] <= 3 * (report["slot"] + 2 * MIB)
    left = report["after"] - report["before"]
    assert abs(left) <= 2 * MIB, f"Expected the device's memory as before the channel, got {left} bytes more"
    before, _, at_exit = done.stderr.partition(MARK)
    assert at_exit.strip() == "", "Expected nothing on stderr at the end"
    assert not [word for word in BAD if word in before], before
