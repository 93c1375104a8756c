"""The README's Python is real: each block runs here, with something that knows their arguments for collectors."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrl import collectors
from torchrl.collectors import distributed

import shmsync
from tests.docs.markdown import ROOT, Block, blocks

PYTHON = [block for block in blocks((ROOT / "README.md").read_text()) if block.language == "python"]


def stand_in(kind: type) -> Callable[..., Any]:
    """In a collector's place: takes the keywords that it has, and the calls that it would get."""
    known = inspect.signature(kind.__init__).parameters

    class StandIn:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            assert set(options) <= set(known)
            self.updates: list[dict[str, Any]] = []

        def update_policy_weights_(self, *arguments: Any, **options: Any) -> None:
            inspect.signature(kind.update_policy_weights_).bind(self, *arguments, **options)

    return StandIn


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the blocks take for granted."""
    monkeypatch.setenv("SHMSYNC_DIR", str(tmp_path))
    policy = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    found: dict[str, Any] = {
        **{"shmsync": shmsync, "torch": torch, "policy": policy, "critic": nn.Linear(4, 1), "envs": []},
        **{"observation": torch.zeros(4), "RPCWeightSyncScheme": shmsync.RPCWeightSyncScheme},
        "RPCCollector": stand_in(distributed.RPCCollector),
        "MultiSyncCollector": stand_in(collectors.MultiSyncCollector),
    }
    found["send"] = lambda handle: found.update(handle=handle)
    return found


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: f"line {block.line}")
def test_a_block_runs(block: Block, names: dict[str, Any]) -> None:
    """Mutants: name a class or an argument that there is not."""
    try:
        exec(compile(block.text, f"README.md, line {block.line}", "exec"), names)
    finally:
        for value in list(names.values()):
            if isinstance(value, (shmsync.Subscriber, shmsync.Publisher)):
                value.close()


def test_there_are_blocks() -> None:
    assert len(PYTHON) >= 5


def test_the_sentence_with_the_figure_is_the_readmes() -> None:
    """Mutant: measure anew, and change the README's alone."""
    index, readme = (" ".join((ROOT / name).read_text().split()) for name in ("docs/index.md", "README.md"))
    (sentence,) = re.findall(r"a push of .*? ms where .*? ms", index)
    assert sentence in readme
