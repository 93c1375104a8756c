"""Shared weights between plain processes: multiprocessing (spawn), no torchrl, no RPC.

A trainer publishes; four workers bind their own copy of the model and run it without pause. Each forward checks that it
has seen one version only: all weights of a version are the same number.

    python examples/plain_processes.py
"""

import multiprocessing as mp
import time

import torch
from torch import nn

import shmsync

WORKERS, PUSHES, WIDTH, LAYERS = 4, 100, 512, 10


class Probe(nn.Module):
    """A stack of layers whose forward says the smallest and the largest weight that it met on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self) -> tuple[float, float]:
        extremes = [(layer.weight.min().item(), layer.weight.max().item()) for layer in self.layers]
        return min(low for low, _ in extremes), max(high for _, high in extremes)


def work(handle: str, worker_id: int, results: "mp.Queue[tuple[int, int, int, int]]") -> None:
    torch.set_num_threads(1)
    model = Probe()
    forwards = mixed = 0
    versions = set()
    with shmsync.Subscriber(handle, worker_id=worker_id, name=f"worker-{worker_id}") as subscriber:
        binding = subscriber.bind(model)
        subscriber.wait(1, timeout=60)
        while binding.version < PUSHES:
            low, high = model()
            forwards += 1
            mixed += low != high
            versions.add(binding.version)
    results.put((worker_id, forwards, len(versions), mixed))


def main() -> None:
    torch.set_num_threads(1)  # more threads than cores would only wait for each other
    trainer = Probe()
    spawn = mp.get_context("spawn")
    results: mp.Queue[tuple[int, int, int, int]] = spawn.Queue()
    with shmsync.Publisher(trainer) as publisher:
        workers = [spawn.Process(target=work, args=(str(publisher.handle), i, results)) for i in range(WORKERS)]
        for worker in workers:
            worker.start()
        while len(publisher.subscribers()) < WORKERS:
            time.sleep(0.05)
        seconds = []
        for version in range(1, PUSHES + 1):
            with torch.no_grad():
                for parameter in trainer.parameters():
                    parameter.fill_(version)
            seconds.append(publisher.publish().seconds)
            time.sleep(0.01)
        rows = sorted(results.get(timeout=120) for _ in workers)
        for worker in workers:
            worker.join()
        stats = publisher.stats()
    seconds.sort()
    print(f"{stats['slot_nbytes'] / 1e6:.0f} MB per version, {PUSHES} versions, {stats['slots']} slots of memory")
    print(f"one push: {1e3 * seconds[len(seconds) // 2]:.2f} ms (median), whatever the number of workers")
    for worker_id, forwards, versions, mixed in rows:
        print(f"worker {worker_id}: {forwards} forwards over {versions} versions, {mixed} saw two versions")
    if any(mixed for *_, mixed in rows):
        raise SystemExit("a forward saw two versions")


if __name__ == "__main__":
    main()
