"""The listener: a worker's thread that sleeps on the channel's bell, and reacts and answers as to a notification.

A message needs a millisecond or two from process to process and back, the bell and an answer on the roster a tenth of
that. Only what went wrong needs a message: without an answer on the roster one is sent, and brings the error back.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

from .bell import Bell
from .subscriber import Subscriber

_log = logging.getLogger("shmsync")
# A ring may get lost where a processor reorders loads; and a thread should find out that nobody needs it any more.
_LOOK_SECONDS = 1.0


def listen(subscriber: Subscriber, react: Callable[[], tuple[int, int]]) -> threading.Thread:
    """Call a method, `react`, whenever the channel's bell rings, on a thread of its own, and answer on the roster.

    ``react`` returns the version in use and the newest version seen; if it raises, there is no answer.
    Contract: keeps neither of the two alive; the thread ends with either of them, or when the subscriber is closed.
    """
    thread = threading.Thread(
        target=_serve,
        args=(weakref.ref(subscriber), weakref.WeakMethod(react)),
        name=f"shmsync-listener-{subscriber.name}",
        daemon=True,
    )
    thread.start()
    return thread


def _serve(subscriber_ref: weakref.ref[Subscriber], react_ref: weakref.WeakMethod[Any]) -> None:
    while True:
        heard = _once(subscriber_ref(), react_ref())
        if heard is None:
            return
        bell, count = heard
        bell.wait(count, _LOOK_SECONDS)
        del heard, bell  # it keeps the roster's mapping, and with it the line


def _once(subscriber: Subscriber | None, react: Callable[[], tuple[int, int]] | None) -> tuple[Bell, int] | None:
    """React to what is there now; what to wait for next, or None if it is over."""
    if subscriber is None or react is None:
        return None
    bell = subscriber.bell
    if bell is None:
        return None
    count = bell.count  # before the rows are looked at
    try:
        subscriber.answer(react()[1])
    except Exception as error:
        # The answer to the message that comes now, or the next forward, tells who can do something about it.
        _log.debug("%s: reacting to the bell failed: %s", threading.current_thread().name, error)
    return bell, count
