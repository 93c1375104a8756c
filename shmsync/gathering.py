"""Bringing the tensors of one device together there: in one launch of a kernel of ours, if it was built, else by torch.

The kernel takes what has the layout of its leaf, as it is or with one of four casts. Everything else goes by torch's
`_foreach_copy_`: other casts, other strides, lazy tensors; and all of it where the kernel is not to be had.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from . import device
from .copying import kind_of
from .errors import DeviceError
from .layout import Layout

_log = logging.getLogger("shmsync")
_ROW_NBYTES = 32  # of the kernel's table
_FATBIN = Path(__file__).with_name("_gather.fatbin")
# By device; None: not to be had there. A kernel stays loaded to the end of the process.
_kernels: dict[int, int | None] = {}


def image() -> bytes | None:
    """The kernel for all kinds of devices, as setup.py has built it. None: it has not."""
    try:
        return _FATBIN.read_bytes()
    except FileNotFoundError:
        return None


def _kernel(index: int) -> int | None:
    """What says why it isn't there is logged once a device."""
    if index not in _kernels:
        _kernels[index] = None
        code = image()
        if code is not None:
            try:
                with device.attempt(index):
                    _kernels[index] = device.runtime.gather_kernel(index, code)
            except (DeviceError, ValueError, AttributeError) as error:
                _say(index, error)
    return _kernels[index]


def name(index: int) -> str:
    """What brings tensors together on a device. Contract: makes a context there."""
    return "our kernel" if _kernel(index) is not None else "torch's _foreach_copy_"


def _say(index: int, error: Exception) -> None:
    _log.warning("The gather kernel can't be used on %s: %s. torch copies instead", device.name_of(index), str(error))


class _Planned(NamedTuple):
    """Which of the given tensors go by the kernel, with its plan for them, and which through torch."""

    token: object
    numbers: list[int]
    plan: Any
    quick: list[int]
    rest: list[int]


class Gatherer:
    """Brings tensors of a device together in its memory, by way of one stream, wherever a slot or an area begins there.

    Contract: as `copying.copy_all`, in the order of the stream; not for two threads at once; keeps no source alive.
    What the kernel is told is planned once for a token (see `sources.Changes`), whatever slot it is for, and brought to
    the device when an address has changed.
    """

    def __init__(self, stream: device.Stream, layout: Layout) -> None:
        self._stream, self._layout = stream, layout
        self._table: device.Memory | None = None
        self._planned: _Planned | None = None
        self._refused = False
        self.launches = 0

    def prepare(
        self,
        numbers: list[int],
        sources: Sequence[Tensor],
        token: object = None,
        addresses: array[int] | None = None,
    ) -> None:
        """See to it that the device has the table for leaves of these numbers. ``addresses``: of the sources, if known.

        Contract: waits for what is queued on the stream, if the table changes; so it comes before the stream is made to
        wait for the trainer's.
        """
        index = self._stream.index
        kernel = None if self._refused else _kernel(index)
        planned = self._planned
        if token is None or planned is None or planned.token is not token or planned.numbers != numbers:
            planned = self._plan(numbers, sources, token, kernel is not None)
        if kernel is not None and planned.quick:
            if addresses is None or planned.rest:
                addresses = array("Q", [sources[i].data_ptr() for i in planned.quick])
            try:
                table = self._memory()
                with device.attempt(index):
                    planned.plan.upload(index, table.address, addresses, self._stream.handle)
            except DeviceError as error:
                planned = self._refuse(planned, error)
        self._planned = planned

    def run(self, base: int, views: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Queue the copies of what was prepared to the leaves behind `base`, of which `views` are all."""
        planned = self._planned
        assert planned is not None
        index, handle = self._stream.index, self._stream.handle
        kernel = _kernel(index)
        if planned.quick and kernel is not None and self._table is not None:
            try:
                with device.attempt(index):
                    planned.plan.launch(index, kernel, self._table.address, base, handle)
                self.launches += 1
            except DeviceError as error:
                planned = self._planned = self._refuse(planned, error)
        if planned.rest:
            into = [views[planned.numbers[i]] for i in planned.rest]
            device.torch_side.copy(index, handle, into, [sources[i] for i in planned.rest])

    def free(self) -> None:
        """Contract: nothing may be queued any more."""
        self._planned = None
        if self._table is not None:
            self._table.free()

    def _memory(self) -> device.Memory:
        """For the table of any plan, so that it is allocated once."""
        if self._table is None:
            self._table = device.Memory(self._stream.index, _ROW_NBYTES * len(self._layout))
        return self._table

    def _plan(self, numbers: list[int], sources: Sequence[Tensor], token: object, by_kernel: bool) -> _Planned:
        leaves = [self._layout.leaves[number] for number in numbers]
        kinds = [
            kind_of(leaf.dtype, leaf.stride, source) if by_kernel else None
            for leaf, source in zip(leaves, sources, strict=True)
        ]
        quick = [i for i, kind in enumerate(kinds) if kind is not None]
        rest = [i for i, kind in enumerate(kinds) if kind is None]
        offsets, nbytes = [leaves[i].offset for i in quick], [sources[i].nbytes for i in quick]
        plan = device.runtime.Gather(offsets, nbytes, [kinds[i] for i in quick]) if quick else None
        return _Planned(token, numbers, plan, quick, rest)

    def _refuse(self, planned: _Planned, error: DeviceError) -> _Planned:
        """No more tries in this channel."""
        self._refused = True
        _say(self._stream.index, error)
        return planned._replace(quick=[], rest=[*range(len(planned.numbers))])
