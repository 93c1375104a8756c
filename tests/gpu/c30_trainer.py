"""A trainer in a process of its own, for test_c30: it pushes, counts the device's memory, and ends.

Prints a JSON object to stdout. The last thing that it writes to stderr by itself is MARK: what follows comes from the
end of the process.
"""

from __future__ import annotations

import functools
import json
import sys

import torch

import shmsync

from . import work
from .modules import Watched, fill
from .peers import Peer
from .steps import MIB, on_gpu, used

MARK = "the trainer ends"
LEAVES = 10
PUSHES = 50


def main() -> None:
    worker = Peer()
    # CUDA loads each kernel into device memory when it is first used, so everything is done once at a small size.
    session(worker, 1 * MIB, 5)
    # Each leaf is a segment of torch's allocator by itself, so that nothing is left of it once it is free.
    report = session(worker, 20 * MIB, PUSHES)
    # The second end: with a worker that still has the weights mapped.
    source = on_gpu(functools.partial(Watched, LEAVES, 1 * MIB // 4))
    channel = shmsync.Publisher(source)
    worker.call(work.attach, str(channel.handle), functools.partial(Watched, LEAVES, 1 * MIB // 4))
    report["mode at the end"] = push_until_mapped(channel, source, worker)
    print(json.dumps(report), flush=True)
    print(MARK, file=sys.stderr, flush=True)


def session(worker: Peer, leaf_nbytes: int, pushes: int) -> dict[str, object]:
    """A channel from its beginning to its end: the device's memory before, after each push, and after."""
    make = functools.partial(Watched, LEAVES, leaf_nbytes // 4)
    source = on_gpu(make)
    torch.cuda.empty_cache()  # of an earlier session
    before = used()
    channel = shmsync.Publisher(source)
    worker.call(work.attach, str(channel.handle), make)
    mode = push_until_mapped(channel, source, worker)
    after_push = [push(channel, source, worker) for _ in range(pushes)]
    device_nbytes = channel.stats()["device_nbytes"]
    worker.call(work.reset)
    channel.close()
    torch.cuda.empty_cache()
    return {
        "mode": mode,
        "before": before,
        "after push": after_push,
        "after": used(),
        "device_nbytes": device_nbytes,
        "slot": LEAVES * leaf_nbytes,
    }


def push(channel: shmsync.Publisher, source: Watched, worker: Peer) -> int:
    """Publish, let the worker use it, and count the bytes in use."""
    version = channel.version + 1
    channel.publish(fill(source, version))
    seen = worker.call(work.look)
    assert (seen.version, seen.low, seen.high) == (version, version, version), seen
    return used()


def push_until_mapped(channel: shmsync.Publisher, source: Watched, worker: Peer) -> str:
    """The first versions may come by copy; the mode after three at most."""
    for _ in range(3):
        push(channel, source, worker)
        mode = worker.call(work.look).mode
        if mode == "map":
            break
    return mode


if __name__ == "__main__":
    main()
