"""Why a worker does not answer: its process, or one inside it, has died, or is late."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ..handle import Handle
from .answers import runs

_LOOK_SECONDS = 50e-6
# So long a process may take to be gone after its connections are.
_DYING_SECONDS = 0.2

Following = Callable[[Iterable[int]], set[int]]


class Attached(NamedTuple):
    """Through which RRef a worker was attached, the process that it lives in, and those inside it that follow the
    channel in its place. ``lined``: it has a line of the roster itself; around inner ones only in channels of files."""

    rref: Any
    pid: int
    inner: tuple[int, ...]
    lined: bool = True


class Silence:
    """Looks at workers' processes by the roster of a channel, and by their pids where these are of this machine's.

    ``following``: which of some processes are on the roster, Publisher.following(). Contract: what is wrong is given
    back as an error, None = nothing, and not raised.
    """

    def __init__(self, handle: Handle, following: Following) -> None:
        self._following = following
        self._knows_pids = not handle.path  # with a path a pid may be another container's

    def died(self, attached: Attached | None, at_once: bool = True) -> BaseException | None:
        """If its process has died. What RPC says of that is that a pipe is broken, perhaps while it is still dying:
        then not ``at_once``."""
        if attached is None or not self._knows_pids:
            return None
        deadline = time.monotonic() + (0 if at_once else _DYING_SECONDS)
        while runs(attached.pid):
            if time.monotonic() >= deadline:
                return None
            time.sleep(_LOOK_SECONDS)
        return ConnectionError(
            f"its process, pid {attached.pid}, has died; start it anew (an RPCCollector can't: make another), or push "
            "to the others"
        )

    def died_around(self, attached: Attached) -> BaseException | None:
        """If the process around inner ones has died: they may go on for a while, and answer."""
        if not attached.inner:
            return None
        # While it is being taken down it may have its line still.
        if (died := self.died(attached)) is not None or not attached.lined or self.follows(attached.pid):
            return died
        return ConnectionError(
            f"its process, pid {attached.pid}, has ended or let go of the channel; make a new collector"
        )

    def ended_inside(self, attached: Attached | None) -> BaseException | None:
        """If inner processes, which have to follow the channel, do so no more."""
        if attached is None or not attached.inner:
            return None
        living = self._following(attached.inner)
        gone = [str(pid) for pid in attached.inner if pid not in living]
        if not gone:
            return None
        text = f"its inner processes, pids {', '.join(gone)}, have ended; make a new collector"
        return ConnectionError(f"{text}, or push to the others")

    def follows(self, pid: int) -> bool:
        """Whether a process has a line of the roster, as one that follows the channel, or is around who does."""
        return bool(self._following([pid]))


def late_inside(silent: Sequence[int], seconds: float) -> BaseException:
    """The error of a worker of whose inner processes these have not answered."""
    pids = ", ".join(map(str, silent))
    return TimeoutError(
        f"no answer of its inner processes, pids {pids}, within {seconds:.3g} s; are they stopped, or is there an "
        "error of theirs in the log?"
    )


def told(attached: Attached | None, by_rpc: bool, error: BaseException) -> BaseException:
    """The error of a message, with what is known of the process that has not answered it."""
    if by_rpc and not isinstance(error, TimeoutError):
        return ConnectionError(
            f"the weights can't be sent to it by RPC ({error}); if its process has died, make a new collector, or push "
            "to the others"
        )
    if attached is None or not isinstance(error, TimeoutError):
        return error
    return TimeoutError(f"{error} from its process, pid {attached.pid}; is it stopped, or in one long call?")
