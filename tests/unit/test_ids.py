"""Worker ids: what may be written for them, and which workers that means.

The rows that they lead to are in tests/cases/test_c29_worker_ids.py.
Mutants: take True for 1; count devices by their type only; keep an id that comes twice.
"""

import numpy as np
import pytest
import torch

from shmsync import WorkerIdError
from shmsync.ids import resolve

DEVICES = [torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cuda")]


@pytest.mark.parametrize(
    ("given", "workers"),
    [
        (0, [0]),
        ([2, 0], [2, 0]),
        ([1, 1, 1], [1]),
        ((3,), [3]),
        ([], []),
        (np.int64(2), [2]),
        (np.array([0, 3]), [0, 3]),
        (np.array(1), [1]),
        (torch.tensor(2), [2]),
        (torch.tensor([2, 1]), [2, 1]),
        (range(4), [0, 1, 2, 3]),
        (torch.device("cpu"), [0]),
        (torch.device("cuda:1"), [2]),
        (torch.device("cuda"), [1, 3]),
        (torch.device("cuda:0"), [1, 3]),
        ([torch.device("cpu"), 0, 2], [0, 2]),
    ],
    ids=str,
)
def test_what_names_workers(given, workers) -> None:
    assert resolve(given, 4, DEVICES) == workers


BAD = [4, -1, "0", b"1", 1.0, None, True, [False], [0, 4], [[0]], np.array([0.5]), torch.tensor(1.5), object()]


@pytest.mark.parametrize("given", BAD, ids=str)
def test_what_does_not_is_named_with_the_valid_range(given) -> None:
    with pytest.raises(WorkerIdError, match=r"0 to 3"):
        resolve(given, 4, DEVICES)


def test_a_device_no_worker_is_on_is_named_with_those_they_are_on() -> None:
    with pytest.raises(WorkerIdError, match=r"(?s)cuda:5.*cuda:1"):
        resolve(torch.device("cuda:5"), 4, DEVICES)


def test_without_workers_there_is_no_range() -> None:
    with pytest.raises(WorkerIdError, match="there are no workers"):
        resolve(0, 0)
    assert resolve([], 0) == []


@pytest.mark.parametrize(
    "ids",
    [torch.tensor([True, False, True]), torch.tensor(True), [torch.tensor(False)], np.array([True]), [np.bool_(True)]],
    ids=repr,
)
def test_truth_is_no_number(ids) -> None:
    """A mask is not meant as ids 0 and 1. Mutant: refuse Python's own only."""
    with pytest.raises(WorkerIdError, match="Expected a worker id"):
        resolve(ids, 3)
