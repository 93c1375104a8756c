"""What comes back from workers: the answer to a message, or the error it brings, and the little that can be asked."""

from __future__ import annotations

import builtins
import contextlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch.distributed import rpc

from .. import errors, remote

_TIMED_OUT = re.compile(r"ran for more than set timeout \((\d+) ms\)")


def outcome(future: Any) -> Any:
    """Wait for a message's answer; an error is given back, not raised."""
    try:
        answer = future.wait()
    except Exception as error:
        late = _TIMED_OUT.search(str(error))
        return TimeoutError(f"no answer to a message within {int(late[1]) / 1000:.3g} s") if late else error
    return _rebuilt(*answer) if answer and isinstance(answer[0], str) else answer


def _rebuilt(kind: str, text: str) -> Exception:
    """The error that a worker reported, as the class it had there if that can be built from its text."""
    found = getattr(errors, kind, None) or getattr(builtins, kind, None)
    if isinstance(found, type) and issubclass(found, Exception):
        with contextlib.suppress(TypeError):
            return found(text)
    return RuntimeError(f"{kind}: {text}")


def runs(pid: int) -> bool:
    """Whether a process lives; one that nobody has waited for yet does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def newest_used(rrefs: Iterable[Any], timeout: float) -> int:
    """The newest version that the objects of these RRefs have followed, of any channel; who does not answer in time is
    not counted."""
    asked = []
    for rref in rrefs:
        with contextlib.suppress(Exception):  # a dead peer may be refused at once
            asked.append(rpc.rpc_async(rref.owner(), remote.last_version, args=(rref,), timeout=timeout))
    newest = 0
    for future in asked:
        with contextlib.suppress(Exception):
            newest = max(newest, future.wait())
    return newest
