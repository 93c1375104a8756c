"""What a forward returns must not change with later versions: outputs that alias bound memory are cloned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensordict import is_tensor_collection
from torch import Tensor


class Aliases:
    """Recognises tensors over bound memory: a mapped slot (address range), or the module's own storages (addresses)."""

    def __init__(self, begin: int = 0, end: int = 0, storages: frozenset[int] = frozenset()) -> None:
        self._begin, self._end, self._storages = begin, end, storages

    def __contains__(self, tensor: Tensor) -> bool:
        try:
            if self._begin <= tensor.data_ptr() < self._end:
                return True
            return bool(self._storages) and tensor.untyped_storage().data_ptr() in self._storages
        except (RuntimeError, NotImplementedError):  # a tensor without a plain storage aliases nothing
            return False


def privatize(output: Any, aliases: Aliases) -> Any:
    """`output` with every tensor that aliases bound memory replaced by a clone; TensorDicts and dicts in place.

    Contract: returns the very same object where nothing aliases; clones stay in the autograd graph.
    """
    if isinstance(output, Tensor):
        return output.clone() if output in aliases else output
    if is_tensor_collection(output) or isinstance(output, dict):
        _privatize_entries(output, aliases)
    elif isinstance(output, Mapping):
        return output
    elif isinstance(output, (tuple, list)):
        new = [privatize(item, aliases) for item in output]
        if any(a is not b for a, b in zip(new, output, strict=True)):
            return type(output)(*new) if hasattr(output, "_fields") else type(output)(new)
    return output


def _privatize_entries(entries: Any, aliases: Aliases) -> None:
    replaced: dict[Any, Any] = {}
    for key, value in entries.items():
        if type(value) is Tensor:  # the usual case first: this runs at every forward
            if value in aliases:
                replaced[key] = value.clone()
        elif (new := privatize(value, aliases)) is not value:
            replaced[key] = new
    if not replaced:
        return
    locked = getattr(entries, "is_locked", False)
    if locked:
        entries.unlock_()
    for key, value in replaced.items():
        entries[key] = value
    if locked:
        entries.lock_()
