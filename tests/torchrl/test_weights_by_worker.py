"""`SharedMemWeightSyncScheme.send` with a dict by worker id: each worker's own weights, to it and to nobody else."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shmsync
from shmsync import ShmSyncError
from tests.helpers.models import fill


def processes(workers: int = 3) -> tuple[Any, list[Any], list[nn.Module]]:
    """A scheme whose processes are this one: its receivers and their models, which have begun with 1.0."""
    scheme = shmsync.SharedMemWeightSyncScheme()
    scheme.init_on_sender(model=fill(nn.Linear(1, 1), 1.0), num_workers=workers)
    models = [nn.Linear(1, 1) for _ in range(workers)]
    receivers = [pickle.loads(pickle.dumps(scheme)) for _ in models]
    scheme.connect()
    for worker, (model, receiver) in enumerate(zip(models, receivers, strict=True)):
        receiver.init_on_receiver(model_id="policy", model=model, worker_idx=worker)
        receiver.connect(worker_idx=worker)
    return scheme, receivers, models


def values(receivers: list[Any], models: list[nn.Module]) -> list[float]:
    for receiver in receivers:
        receiver.receive()
    return [model.weight.item() for model in models]


def test_weights_by_worker_go_to_nobody_else() -> None:
    """Also if they are one object, and if only some of them are asked for. Mutants: publish one object to everybody;
    take no notice of the ids."""
    scheme, receivers, models = processes()
    two, three, four = (fill(nn.Linear(1, 1), value) for value in (2.0, 3.0, 4.0))
    for given, worker_ids, expected in (
        ({0: two}, None, [2, 1, 1]),
        ({0: three, 2: three}, None, [3, 1, 3]),
        ({0: two, 1: four, 2: four}, torch.tensor([1]), [3, 4, 3]),
        ({0: two, 1: three, 2: four}, 0, [2, 4, 3]),
        ({np.int64(0): four, 1: four, 2: four}, None, [4, 4, 4]),
    ):
        scheme.send(given, worker_ids)
        assert values(receivers, models) == expected
    assert scheme.version == 6  # one push each, after the first: the same object is copied once
    for one in (*receivers, scheme):
        one.shutdown()


def test_wrong_weights_by_worker_go_to_nobody() -> None:
    """The error names the worker, and nothing is written. Mutants: look at them one by one; name nobody; let ids be
    that have no weights."""
    scheme, receivers, models = processes()
    two = fill(nn.Linear(1, 1), 2.0)
    for given, worker_ids, error, text in (
        ({0: two, 1: nn.Linear(2, 1)}, None, shmsync.LayoutMismatch, "for worker 1: .*\n.*weight"),
        ({1: nn.Linear(2, 1)}, None, shmsync.LayoutMismatch, "for worker 1: .*\n.*weight"),
        ({0: None}, None, ShmSyncError, "for worker 0: "),
        ({0: two, True: two}, None, shmsync.WorkerIdError, "True"),
        ({0: two, 1: {"weight": two.weight}}, None, shmsync.LayoutMismatch, "for worker 1: .*\n.*missing keys: `bias`"),
        ({0: two, 1: {"weight": 3}}, None, ShmSyncError, "for worker 1: "),
        ({0: two, 2: two}, [0, 1], shmsync.WorkerIdError, "no weights for workers .1., only for .0, 2."),
        ({0: two, -1: nn.Linear(1, 1)}, None, shmsync.WorkerIdError, "-1"),
    ):
        with pytest.raises(error, match=text):
            scheme.send(given, worker_ids)
        assert (scheme.version, values(receivers, models)) == (1, [1.0] * 3)
    for one in (*receivers, scheme):
        one.shutdown()


def test_weights_by_worker_are_no_way_to_send_several_models() -> None:
    """Mutant: take the workers for names of leaves."""
    schemes = shmsync.SharedMemWeightSyncScheme.together("policy", "critic")
    for name, scheme in schemes.items():
        scheme.init_on_sender(model_id=name, model=nn.Linear(1, 1))
        scheme.connect()
    with pytest.raises(ShmSyncError, match="'critic' with worker_ids="):
        schemes["critic"].send({0: nn.Linear(1, 1), 1: nn.Linear(1, 1)})
    for scheme in schemes.values():
        scheme.shutdown()
    for how in (
        {"params_map": {0: nn.Linear(1, 1)}},
        {"device_map_fn": lambda worker, source: source, "num_workers": 1},
    ):
        (scheme,) = shmsync.SharedMemWeightSyncScheme.together("policy").values()
        with pytest.raises(ShmSyncError, match="'policy' with worker_ids="):
            scheme.init_on_sender(model_id="policy", **how)
        scheme.shutdown()


@pytest.mark.parametrize("wrong", [-1, 300, 7])
def test_wrong_workers_in_a_map_get_nothing_and_nobody_else_does(wrong: int) -> None:
    """Mutant: look at each when its turn comes."""
    scheme = shmsync.SharedMemWeightSyncScheme()
    weights = {0: nn.Linear(1, 1), wrong: nn.Linear(1, 1)}
    with pytest.raises(shmsync.WorkerIdError, match=str(wrong)):
        scheme.init_on_sender(params_map=weights, num_workers=2)
    assert scheme.version == 0
    scheme.shutdown()


class Named(shmsync.SharedMemWeightSyncScheme):
    """Made with an argument that its `__new__` needs."""

    def __new__(cls, name: str) -> Named:
        made = super().__new__(cls)
        made.name = name
        return made

    def __init__(self, name: str) -> None:
        super().__init__()

    def __getnewargs__(self) -> tuple[str]:
        return (self.name,)


def test_a_class_with_arguments_of_its_own_arrives() -> None:
    """As pickle makes any object. Mutant: call `__new__` without them."""
    scheme = Named("one")
    assert pickle.loads(pickle.dumps(scheme)).name == "one"
    scheme.shutdown()
