"""A subscriber's operations of the slot protocol, on real words, locks and memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import slots
from .errors import ChannelCorrupt
from .mapped import MappedData

if TYPE_CHECKING:
    from .subscriber import Subscriber

_PATIENCE_SECONDS = 10.0


class Performer:
    """Performs one run of the protocol; ``point``: what its step of that name calls with the word."""

    def __init__(self, subscriber: Subscriber, data: MappedData, point: Callable[[int], None] | None) -> None:
        self._subscriber, self._data = subscriber, data
        self._deadline = 0.0
        self.enter = subscriber._enter
        self.leave = subscriber._leave
        self.try_shared = subscriber._locks.try_shared
        self.unlock = subscriber._locks.unlock
        self.load_slot_version = data.slot_version
        self.drop_private = subscriber._drop_private
        self.point = point

    def perform(self, operation: tuple[Any, ...]) -> Any:
        return getattr(self, operation[0])(*operation[1:])

    def load_row(self, row: int) -> int:
        self._subscriber._check_open()  # under the mutex: close() may have come first
        return self._data.rows[row]

    def again(self, word: int) -> None:
        """The row has moved on meanwhile. If it never does, the shared bytes are damaged."""
        if not self._deadline:
            self._deadline = time.monotonic() + _PATIENCE_SECONDS
        elif time.monotonic() > self._deadline:
            raise ChannelCorrupt(
                f"A row points to version {slots.version_of(word)} in slot {slots.slot_of(word)}, which could "
                f"not be leased for {_PATIENCE_SECONDS} s"
            )
        time.sleep(0)
