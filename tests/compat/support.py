"""What both APIs' tests share: few versions are enough here, since tests/torchrl has many, on the tested release."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

from shmsync import RPCWeightUpdater
from tests.helpers.releases import offered
from tests.helpers.streams import STAMPS, stream

FEW_VERSIONS, FEW_FRAMES = 15, 200


def short_stream(world: SimpleNamespace) -> SimpleNamespace:
    """What batches show under pushes without pause, until there is enough to judge by."""
    return stream(world, 40.0, versions=FEW_VERSIONS, frames=FEW_FRAMES)


# As the updater's class, for collectors whose steps say their version: everywhere but in inner processes before torchrl
# 0.11, which can't be reached.
Stamping = partial(RPCWeightUpdater, stamp_steps=True)


def stamps(*versions: int) -> list[int]:
    """What torchrl's own entry says of the steps of these versions, where it has one."""
    return list(versions) if "stamps" in offered() else []


def judge(found: SimpleNamespace) -> None:
    """No forward mixed versions, versions never went back, and each step had the stamp of its forward."""
    assert found.frames >= FEW_FRAMES
    assert len(found.versions) >= FEW_VERSIONS
    assert len(found.workers) == 2
    assert found.stamps >= set(STAMPS if "stamps" in offered() else STAMPS[2:] if "schemes" in offered() else ())
    assert (found.mixed, found.misstamped, found.backwards) == (0, 0, 0)


def warned_of_deprecation(world: SimpleNamespace) -> list[str]:
    """In the trainer, since it has imported torchrl."""
    return [text for text in world.warnings if text.startswith("DeprecationWarning")]
