"""What a subscriber wishes for: the weights on which devices, and whether it needs them on the host too."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

from . import device, wire
from .bell import Bell

if TYPE_CHECKING:
    from .subscriber import Subscriber


class Wishing:
    """What was wished for last, and what else a wish depends on.

    ``absent``: a switch found its version on devices only, where it can't read it. ``leases``: so did a lease, and more
    of them are to be expected.
    """

    def __init__(self) -> None:
        self.absent = self.leases = False
        self.said: tuple[list[bytes], bool] = [], True
        self._warned = False

    def tell(self, subscriber: Subscriber) -> None:
        """Tell the publisher on which devices the subscriber's modules are, and whether it needs the host."""
        line, ctl = subscriber._line, subscriber._ctl
        if line is None or ctl is None:
            return
        memories = {memory for binding in subscriber._bindings for memory in binding.memories}
        devices = [memory for memory in sorted(memories) if memory >= 0 and _can_map(subscriber, memory)]
        if any(memory >= 0 for memory in memories) and (why := device.reason()):
            self.warn_of_copies(why)
        # A binding that is not on devices alone, or has not got there yet, reads on the host; so do leases.
        on_devices = bool(devices) and len(devices) == len(memories) and _is_mapped(subscriber, devices)
        host = self.absent or self.leases or not on_devices
        wished = [device.uuid_of(memory) for memory in devices[: wire.MOST_WISHES]], host
        if wished != self.said:
            self.said = wished
            line.wishes(*wished)
            Bell(ctl, wire.CTL_WISHES_OFFSET).call()

    def warn_of_copies(self, why: str) -> None:
        """Warn once that weights on devices can't be mapped."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"Process {os.getpid()} can't map weights on devices, and copies them from the host at each version: "
                f"{why}. `python -m shmsync doctor` tells what is missing",
                RuntimeWarning,
                stacklevel=2,
            )


def _can_map(subscriber: Subscriber, memory: int) -> bool:
    return subscriber._imports.possible(memory) if subscriber._imports is not None else device.reason() is None


def _is_mapped(subscriber: Subscriber, devices: list[int]) -> bool:
    return subscriber._imports is not None and all(subscriber._imports.has(memory) for memory in devices)
