"""The listener: a worker's thread that sleeps on the channel's bell, and reacts and answers as to a notification.

A message needs a millisecond or two from process to process and back, the bell and an answer on the roster a tenth of
that. Only what went wrong needs a message: without an answer on the roster one is sent, and brings the error back.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from .bell import Bell
from .errors import ChannelClosed, ShmSyncError
from .subscriber import Subscriber

_log = logging.getLogger("shmsync")
# A ring may get lost where a processor reorders loads; and a thread should find out that nobody needs it any more.
_LOOK_SECONDS = 1.0
_END_SECONDS = 2.0


class Listener:
    """Calls a method, `react`, whenever the channel's bell rings, on a thread of its own, and answers on the roster.

    ``react`` returns the version in use and the newest version seen; if it raises, there is no answer.
    Contract: keeps neither of the two alive; the thread ends with either of them, with the channel, or when the
    subscriber is closed.
    """

    def __init__(self, subscriber: Subscriber, react: Callable[[], tuple[int, int]]) -> None:
        self._subscriber = weakref.ref(subscriber)
        self._react: weakref.WeakMethod[Any] = weakref.WeakMethod(react)
        # Weak, since it keeps the roster's mapping, and with it the line.
        self._bell: Callable[[], Bell | None] = weakref.ref(subscriber.bell) if subscriber.bell else lambda: None
        self._ending, self._failed = False, ""
        self._thread = threading.Thread(target=self._serve, name=f"shmsync-listener-{subscriber.name}", daemon=True)
        _running.add(self)
        self._thread.start()

    def end(self) -> None:
        """End the thread, and wait for that; it may be in the middle of a switch. A second call does nothing."""
        self._ending = True
        deadline = time.monotonic() + _END_SECONDS
        while self._thread.is_alive() and self._thread is not threading.current_thread():
            bell = self._bell()
            if bell is not None:
                bell.stir()
            del bell
            self._thread.join(0.005)
            if time.monotonic() > deadline:
                return

    def _serve(self) -> None:
        while True:
            heard = self._once()
            if heard is None:
                return
            bell, count = heard
            bell.wait(count, _LOOK_SECONDS)
            del heard, bell

    def _once(self) -> tuple[Bell, int] | None:
        """React to what is there now; what to wait for next, or None if it is over."""
        subscriber, react = self._subscriber(), self._react()
        if self._ending or subscriber is None or react is None:
            return None
        bell = subscriber.bell
        if bell is None:
            return None
        count = bell.count  # before the rows are looked at
        try:
            subscriber.answer(react()[1])
        except ChannelClosed:
            return None
        except Exception as error:
            self._warn(str(error))  # and not the error, whose traceback a log may keep, and with it the roster's line
        try:
            return (bell, count) if subscriber.publisher_alive() else None
        except ShmSyncError:  # closed meanwhile
            return None

    def _warn(self, text: str) -> None:
        """A worker gets a message now, whose answer tells the trainer; a process inside one has only this, and what
        its next forward raises."""
        level = logging.DEBUG if text == self._failed else logging.WARNING
        self._failed = text
        _log.log(level, "%s (pid %d): reacting to the bell failed: %s", self._thread.name, os.getpid(), text)


_running: weakref.WeakSet[Listener] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """A thread that comes out of torch's copying while the interpreter is taken down would abort the process."""
    for listener in list(_running):
        listener.end()
