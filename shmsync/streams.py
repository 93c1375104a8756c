"""The streams of a binding's forwards: what they have queued may still read or write device memory when they return."""

from __future__ import annotations

from collections.abc import Iterable

from . import device
from .errors import DeviceError


class ReaderStreams:
    """Which streams have used a binding's memory on which device since the last switch.

    Contract: `entered` on the thread of a forward, before it; the others with no forward inside. Not for two threads
    at once.
    """

    def __init__(self) -> None:
        self._used: dict[int, set[int]] = {}
        self._copied: dict[int, tuple[device.Event, set[int]]] = {}

    def add(self, devices: Iterable[int]) -> None:
        """Look after these too. What was queued there before is waited for: nobody knows on which streams."""
        for index in devices:
            if index not in self._used:
                device.torch_side.synchronize(index)
                self._used[index] = set()

    def entered(self) -> None:
        """A forward begins, on the current streams of this thread: after what was copied at the last switch."""
        for index, used in list(self._used.items()):
            stream = device.torch_side.stream(index)
            used.add(stream)
            if index in self._copied:
                event, waited = self._copied[index]
                if stream not in waited:
                    device.wait(index, stream, event)
                    waited.add(stream)

    def taken(self) -> list[device.Event]:
        """When these have come, no stream uses what was used until now. From here on a new account is kept."""
        events = []
        for index, used in self._used.items():
            try:
                events += [device.Event(index, stream) for stream in used]
            except DeviceError:  # somebody has destroyed a stream, with work that may still be going on
                device.synchronized(index)
            used.clear()
        return events

    def before_copying(self, events: Iterable[device.Event]) -> None:
        """What is copied on this thread's current streams from now on comes after `events`."""
        for event in events:
            try:
                device.wait(event.index, device.torch_side.stream(event.index), event)
            except DeviceError:
                device.synchronized(event.index)

    def copied(self) -> None:
        """What was copied on this thread's current streams comes before all forwards from now on."""
        for index, used in self._used.items():
            try:
                stream = device.torch_side.stream(index)
                used.add(stream)
                self._copied[index] = device.Event(index, stream), {stream}
            except DeviceError:
                # The parameters are pointed already, so that nothing may fail here.
                self._copied.pop(index, None)
                device.synchronized(index)
