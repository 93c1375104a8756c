"""What both sides' tests need to know of a process that killed itself."""

from __future__ import annotations

import signal

from tests.helpers.processes import Peer


def killed(peer: Peer) -> bool:
    """Whether it has ended by SIGKILL; an error if it has ended, or answered, in any other way."""
    code = peer._process.exitcode
    assert code in (None, -signal.SIGKILL), f"it ended with {code}"
    if code is None and peer.done():
        # A pipe whose other end is gone is readable too.
        peer._process.join(10)
        code = peer._process.exitcode
        assert code == -signal.SIGKILL, f"it came to its end: {peer.result()!r}"
    return code is not None
