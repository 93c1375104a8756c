"""Worker ids: what a user may write for them, and which workers that means."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .errors import WorkerIdError


def resolve(worker_ids: Any, num_workers: int, devices: Sequence[torch.device] = ()) -> list[int]:
    """Worker numbers, each once, in the order given. A device = every worker whose policy is there, by `devices`.

    Raises WorkerIdError, naming the id and the valid range.
    """
    if hasattr(worker_ids, "__index__") or isinstance(worker_ids, (str, bytes)) or not isinstance(worker_ids, Iterable):
        # Tensors and arrays have __index__ and __iter__, whatever their shape.
        worker_ids = [worker_ids] if getattr(worker_ids, "ndim", 0) == 0 else list(worker_ids)
    found = [worker for one in worker_ids for worker in _workers(one, num_workers, devices)]
    return list(dict.fromkeys(found))


def _workers(one: Any, num_workers: int, devices: Sequence[torch.device]) -> list[int]:
    valid = f"0 to {num_workers - 1}" if num_workers else "none yet: there are no workers"
    if isinstance(one, torch.device):
        workers = [i for i, device in enumerate(devices) if _same_device(device, one)]
        if not workers:
            raise WorkerIdError(
                f"No worker's policy is on {one}; they are on {[str(d) for d in devices]}. Nothing was sent"
            )
        return workers
    if isinstance(one, bool) or str(getattr(one, "dtype", "")).endswith("bool"):  # of numpy and torch too
        raise WorkerIdError(f"Expected a worker id ({valid}), got {one!r}. Nothing was sent")
    try:
        worker = operator.index(one)
    except TypeError:
        raise WorkerIdError(
            f"Expected a worker id ({valid}) or a torch.device, got {one!r}. Nothing was sent"
        ) from None
    if not 0 <= worker < num_workers:
        raise WorkerIdError(f"Expected a worker id ({valid}), got {worker}. Nothing was sent")
    return [worker]


def _same_device(a: torch.device, b: torch.device) -> bool:
    return a.type == b.type and (a.index or 0) == (b.index or 0)
