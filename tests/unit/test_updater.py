"""An updater without a collector: what needs no worker."""

from __future__ import annotations

import copy
import pickle

import pytest
from torch import nn

from shmsync import RPCWeightUpdater, ShmSyncError


@pytest.mark.parametrize("copying", [pickle.dumps, copy.copy, copy.deepcopy], ids=lambda how: how.__name__)
def test_it_stays_where_it_is(copying) -> None:
    """A copy would be a second one of the same channel. Mutant: let pickle take its locks apart."""
    with RPCWeightUpdater(policy_weights=nn.Linear(2, 2), num_workers=1, collector_rrefs=[None]) as updater:
        with pytest.raises(ShmSyncError, match="trainer's process"):
            copying(updater)
        assert updater.version == 0


@pytest.mark.parametrize("storage", ["memfd", "file"])
def test_its_storage_is_its_publishers(folder, storage) -> None:
    updater = RPCWeightUpdater(policy_weights=nn.Linear(2, 2), num_workers=1, collector_rrefs=[None], storage=storage)
    updater._publish_first()
    assert updater.version == 1
    assert len(list(folder.iterdir())) == {"memfd": 0, "file": 2}[storage]
    updater.close()
    assert list(folder.iterdir()) == []


def test_it_says_where_it_stands() -> None:
    """By the name of a subclass too, and before it has a channel. Mutant: no `__repr__`."""

    class Ours(RPCWeightUpdater):
        pass

    with Ours(policy_weights=nn.Linear(2, 2), num_workers=2, collector_rrefs=[None, None]) as updater:
        assert repr(updater) == "Ours(num_workers=2, version=0, notify='rpc', closed=False)"
        updater._publish_first()
        assert repr(updater) == "Ours(num_workers=2, version=1, notify='rpc', closed=False)"
    assert repr(updater) == "Ours(num_workers=2, version=1, notify='rpc', closed=True)"
    assert "num_workers=0" in repr(RPCWeightUpdater())  # the collector comes later
