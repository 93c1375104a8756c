"""The lease: a hold on one slot."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tensordict import TensorDict
from torch import Tensor

from . import slots
from .errors import ShmSyncError
from .layout import Layout

if TYPE_CHECKING:
    from .subscriber import Subscriber


class Lease:
    """A hold on one slot: while it lasts, the publisher leaves these bytes alone.

    ``weights``: a locked TensorDict over the shared slot, to be read and not written. ``version``: theirs.
    It ends with its block or ``close()``, or, if some of its tensors outlive that, with the last of them.
    Contract: copies nothing; blocks nobody; the kernel ends it if this process dies.
    """

    def __init__(self, subscriber: Subscriber, word: int) -> None:
        self.version = slots.version_of(word)
        mapped = subscriber._slot(slots.slot_of(word))
        # A buffer object of its own: tensors keep it alive, and its end is the lease's end.
        buffer, tensors = mapped.fresh_views(subscriber._layout())
        end = weakref.finalize(buffer, subscriber._release_later, slots.slot_of(word), mapped)
        end.atexit = False
        self._weights: TensorDict | None = _nested(subscriber._layout(), tensors)

    @property
    def weights(self) -> TensorDict:
        """The weights under their key paths. Raises ShmSyncError after the end of the lease."""
        if self._weights is None:
            raise ShmSyncError("The lease has ended; take another with subscriber.lease()")
        return self._weights

    def close(self) -> None:
        """End the lease, at once if nobody else holds one of its tensors."""
        self._weights = None

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _nested(layout: Layout, tensors: list[Tensor]) -> TensorDict:
    flat = {key: tensor for leaf, tensor in zip(layout, tensors, strict=True) for key in leaf.keys}
    tree: dict[str, Any] = {}
    for key, tensor in flat.items():
        *path, name = key.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                return TensorDict(flat).lock_()  # `a` and `a.b` are both leaves: no nesting shows that
        if name in node:
            return TensorDict(flat).lock_()
        node[name] = tensor
    return TensorDict(tree).lock_()
