"""Train CartPole-v1 with torchrl's RPCCollector, two workers, and weights pushed through shmsync.

    python examples/cartpole.py                                     # about half a minute on two cores
    python examples/cartpole.py --updater torchrl                   # the same run through torchrl's own updater
    python examples/cartpole.py --hidden 1024                       # a policy of 4 MB: now the pushes differ

The switch from torchrl's updater to shmsync's is the import in `make_updater()`. The run ends with a table and a
learning curve, and with exit code 1 if the target was not reached in time. Runs are seeded but not bit-reproducible:
which worker delivers first is up to the machine.
"""

from __future__ import annotations

import argparse
import multiprocessing
import signal
import socket
import statistics
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import torch
from ppo import Learner, evaluate, finished_returns, make_actor, make_env
from report import EPISODES, Push, Run, Step, conclude, progress, save_curve
from torch.distributed import rpc
from torchrl.collectors import Collector
from torchrl.collectors.distributed import RPCCollector

WORKERS = 2
FRAMES_PER_WORKER = 1024  # 8 environments x 128 steps
EVALUATION_EPISODES = 16
MAX_FRAMES = 100_000_000  # the limit is --max-seconds; with total_frames=-1 an RPCCollector yields nothing

# torch.distributed warns about its own process group when RPC starts; nothing here could use another.
warnings.filterwarnings("ignore", message="You are using a Backend", category=UserWarning)


def make_updater(args: argparse.Namespace) -> Callable[[], Any]:
    """What goes into `weight_updater=`: with shmsync the class, and nothing else."""
    if args.updater == "torchrl":
        return late_torchrl_updater
    from shmsync import RPCWeightUpdater

    if args.notify == "rpc":
        return RPCWeightUpdater
    return partial(RPCWeightUpdater, notify=args.notify)


def late_torchrl_updater() -> Any:
    """torchrl's own updater. Its arguments are known when its workers run: `make_collector()` fills them in."""
    from torchrl.collectors.distributed import RPCWeightUpdater

    return RPCWeightUpdater(None, Collector, None, None, WORKERS)


def make_collector(args: argparse.Namespace, actor: torch.nn.Module) -> RPCCollector:
    """Start the workers and wait for them; the policy that they begin with is the trainer's."""
    collector = RPCCollector(
        [partial(make_env, seed=1000 * args.seed + worker) for worker in range(WORKERS)],
        actor,
        frames_per_batch=FRAMES_PER_WORKER * (1 if args.is_async else WORKERS),
        total_frames=MAX_FRAMES,
        sync=not args.is_async,
        launcher="mp",
        tcp_port=free_port(),
        weight_updater=make_updater(args),
    )
    if args.updater == "torchrl":
        collector.weight_updater.collector_rrefs = collector.collector_rrefs
        collector.weight_updater.policy_weights = collector.policy_weights
    return collector


def free_port() -> int:
    """A TCP port that nobody uses now, so that two runs on one machine don't meet."""
    with socket.socket() as sock:
        sock.bind(("localhost", 0))
        return sock.getsockname()[1]


@contextmanager
def running_collector(args: argparse.Namespace, actor: torch.nn.Module) -> Iterator[RPCCollector]:
    """A collector whose workers are gone when the block ends, however it ends."""
    try:
        with ctrl_c_kept_from_workers():
            collector = make_collector(args, actor)
        yield collector
        if args.updater == "shmsync":
            collector.weight_updater.close()
        collector.shutdown()
    finally:
        end_workers()


@contextmanager
def ctrl_c_kept_from_workers() -> Iterator[None]:
    """Processes started in this block never get the Ctrl-C that a terminal sends to all of a group.

    Ending them is left to this process: if they died on their own while they start, it would wait for them in vain.
    """
    resource_tracker.ensure_running()  # multiprocessing would start it with the first worker, and unblock Ctrl-C
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def end_workers() -> None:
    """End what an orderly shutdown left: after an error torchrl's workers would wait for their trainer for minutes."""
    left = multiprocessing.active_children()
    for worker in left:
        worker.terminate()
    for worker in left:
        worker.join(5)
        if worker.is_alive():
            worker.kill()
    if left:
        rpc.shutdown(graceful=False)


def note_signals() -> list[int]:
    """A list that grows: the first Ctrl-C or SIGTERM asks for an end after the present batch, a second one enforces it.

    An exception in the middle of a batch would make torchrl's collector forget that a worker is still busy with it.
    """
    received: list[int] = []

    def note(number: int, _frame: Any) -> None:
        received.append(number)
        signal.signal(number, signal.default_int_handler)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)
    return received


def train(args: argparse.Namespace, actor: torch.nn.Module, run: Run) -> None:
    """Collect, learn, push, until the target, the time limit or a signal. Fills in `run`."""
    learner = Learner(actor, args.hidden)
    last_returns: deque[float] = deque(maxlen=EPISODES)
    with progress(args.target) as show, running_collector(args, actor) as collector:
        for batch in collector:
            frames = run.frames + batch.numel()
            last_returns.extend(finished_returns(batch))
            learner.learn(batch)
            push = push_weights(collector, version=len(run.steps) + 1)
            mean_return = statistics.fmean(last_returns) if last_returns else 0.0
            run.steps.append(Step(frames, run.elapsed(), mean_return, push))
            show(run.steps[-1])
            run.reached = len(last_returns) == EPISODES and mean_return >= args.target
            if run.reached or run.signals or run.elapsed() > args.max_seconds:
                break


def push_weights(collector: RPCCollector, version: int) -> Push:
    """Give all workers the policy's present weights, as any torchrl user does, and note what it took."""
    start = time.perf_counter()
    collector.update_policy_weights_()
    seconds = time.perf_counter() - start
    updater = collector.weight_updater
    done = getattr(updater, "last_push", None)  # torchrl's updater doesn't tell
    if done is None:
        return Push(version, seconds)
    return Push(done.version, seconds, updater.lag().max, done.nbytes, done.notification_nbytes, done.seconds)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updater", choices=["shmsync", "torchrl"], default="shmsync", help="who pushes the weights")
    parser.add_argument(
        "--notify", choices=["rpc", "memory"], default="rpc", help="shmsync: send a small message after a push, or none"
    )
    parser.add_argument("--async", dest="is_async", action="store_true", help="learn while the workers collect")
    parser.add_argument("--hidden", type=int, default=64, help="width of the policy (default: %(default)s)")
    parser.add_argument("--target", type=float, default=450.0, help="mean return to reach (default: %(default)s)")
    parser.add_argument("--max-seconds", type=float, default=300.0, help="give up after this (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="where the PNG goes (default: %(default)s)")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    actor = make_actor(args.hidden)
    run = Run(args, WORKERS, policy_nbytes=sum(p.nbytes for p in actor.parameters()), signals=note_signals())
    train(args, actor, run)
    if run.signals:
        print("interrupted; the workers have been stopped", file=sys.stderr)
        return 128 + run.signals[0]
    run.evaluation = evaluate(actor, EVALUATION_EPISODES, seed=1000 * args.seed + WORKERS)
    conclude(run, save_curve(run))
    return 0 if run.reached else 1


if __name__ == "__main__":
    sys.exit(main())
