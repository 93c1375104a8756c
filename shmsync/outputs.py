"""What a forward returns must not change with later versions: outputs that alias bound memory are cloned."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from tensordict import LazyStackedTensorDict, TensorDict, is_tensor_collection
from torch import Tensor, strided
from torch.distributions import Distribution


class Aliases:
    """Recognises tensors over bound memory: a mapped slot (address range), or the module's own storages (their bytes by
    their addresses). A policy that is spread over several memories has more than one address range."""

    def __init__(
        self,
        begin: int = 0,
        end: int = 0,
        storages: Mapping[int, int] = MappingProxyType({}),
        more: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.begin, self.end, self.storages, self.more = begin, end, storages, more

    def has(self, address: int, nbytes: int) -> bool:
        """Whether an array there is over bound memory."""
        if any(begin <= address < end for begin, end in ((self.begin, self.end), *self.more)):
            return True
        return any(begin < address + nbytes and address < begin + size for begin, size in self.storages.items())

    def __contains__(self, tensor: Tensor) -> bool:
        try:
            if self.begin <= tensor.data_ptr() < self.end:
                return True
            if any(begin <= tensor.data_ptr() < end for begin, end in self.more):
                return True
            return bool(self.storages) and tensor.untyped_storage().data_ptr() in self.storages
        except (RuntimeError, NotImplementedError):  # a tensor without a plain storage aliases nothing
            return False


def privatize(output: Any, aliases: Aliases) -> Any:
    """`output` with every tensor that aliases bound memory replaced by a clone; TensorDicts and dicts in place.

    Contract: returns the very same object where nothing aliases; clones stay in the autograd graph.
    """
    if type(output) is TensorDict:
        _privatize_entries(output, aliases, output)
        return output
    return _privatize(output, aliases, None)


def _privatize(output: Any, aliases: Aliases, root: Any) -> Any:
    """`root`: the outermost TensorDict on the way, whose lock holds for all below it."""
    if isinstance(output, Tensor):
        return output.clone() if output in aliases else output
    if isinstance(output, (tuple, list)):
        new = [_privatize(item, aliases, root) for item in output]
        if any(a is not b for a, b in zip(new, output, strict=True)):
            return type(output)(*new) if hasattr(output, "_fields") else type(output)(new)
    elif isinstance(output, LazyStackedTensorDict):
        for part in output.tensordicts:  # its items are stacked anew at each look, the parts are what is kept
            _privatize(part, aliases, output if root is None else root)
    elif is_tensor_collection(output):
        _privatize_entries(output, aliases, output if root is None else root)
    elif isinstance(output, MutableMapping):
        _privatize_entries(output, aliases, root)
    else:
        return _privatize_other(output, aliases, root)
    return output


def _privatize_other(output: Any, aliases: Aliases, root: Any) -> Any:
    if isinstance(output, np.ndarray):
        return output.copy() if aliases.has(output.ctypes.data, output.nbytes) else output
    if isinstance(output, deque):
        for number, item in enumerate(output):
            output[number] = _privatize(item, aliases, root)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        _privatize_fields(output, aliases, root)
    elif isinstance(output, Distribution):
        _privatize_attributes(output, aliases, root)
    return output


def _privatize_entries(entries: Any, aliases: Aliases, root: Any) -> None:
    # This runs at every forward, mostly over tensors that alias nothing: no call for those but the one for the address.
    begin, end, look_closer = aliases.begin, aliases.end, bool(aliases.storages or aliases.more)
    replaced: dict[Any, Any] = {}
    for key, value in entries.items():
        if type(value) is Tensor and value.layout is strided:
            if begin <= value.data_ptr() < end or (look_closer and value in aliases):
                replaced[key] = value.clone()
        elif (new := _privatize(value, aliases, root)) is not value:
            replaced[key] = new
    if replaced:
        _replace(entries, replaced, root)


def _privatize_fields(output: Any, aliases: Aliases, root: Any) -> None:
    for field in dataclasses.fields(output):
        value = getattr(output, field.name, None)
        if (new := _privatize(value, aliases, root)) is not value:
            object.__setattr__(output, field.name, new)  # frozen ones too


def _privatize_attributes(output: Any, aliases: Aliases, root: Any) -> None:
    """A distribution has its parameters, and other distributions, as attributes."""
    for name, value in vars(output).items():
        if (new := _privatize(value, aliases, root)) is not value:
            vars(output)[name] = new


def _replace(entries: Any, replaced: dict[Any, Any], root: Any) -> None:
    locked = root is not None and root.is_locked
    if locked:
        root.unlock_()
    for key, value in replaced.items():
        entries[key] = value
    if locked:
        root.lock_()
