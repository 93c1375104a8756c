"""The gate: forwards go through it in numbers, a switch only while none is inside.

A forward that finds others running joins their version. A pending switch holds newcomers back, but never a nested
call, and only for a short while, since a forward may be waiting for another thread's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from .errors import WaitTimeout

PATIENCE_SECONDS = 0.1
# Unbinding in the middle of a forward would let the publisher write where it reads; but close() must end.
UNBIND_PATIENCE_SECONDS = 10.0
# After a fruitless wait newcomers run freely for this many times as long before they are held back again.
_REST = 10


class Gate:
    """Pairs forwards and keeps them apart from switches.

    ``has_news()`` is asked at every outermost entry and must be cheap; ``switch()`` is called with nobody inside.
    Contract: threads; an entry waits at most ``patience`` seconds for others; what `switch` raises reaches the caller.
    """

    def __init__(
        self, has_news: Callable[[], bool], switch: Callable[[], None], patience: float = PATIENCE_SECONDS
    ) -> None:
        self._has_news, self._switch, self._patience = has_news, switch, patience
        self._lock = threading.Lock()
        self._empty = threading.Condition(self._lock)
        self._inside: dict[int, int] = {}
        self._barred = 0
        self._hold_until = 0.0

    def enter(self, follow: bool = True) -> bool:
        """Begin a forward, on the newest version if nobody is inside and it shall `follow`. Whether it is an outermost
        one."""
        me = threading.get_ident()
        with self._lock:
            depth = self._inside.get(me, 0)
            if not depth:
                if self._barred:
                    self._empty.wait_for(lambda: not self._barred, self._patience)
                if follow and self._has_news():
                    self._switch_when_empty()
            self._inside[me] = depth + 1
        return not depth

    def depth(self) -> int:
        """How often this thread is inside."""
        return self._inside.get(threading.get_ident(), 0)

    def leave(self, depth: int) -> None:
        """End a forward: this thread is inside so often as before it, whether `enter` has come to its end or not.

        Contract: may be done twice.
        """
        me = threading.get_ident()
        with self._lock:
            if depth:
                self._inside[me] = depth
                return
            self._inside.pop(me, None)
            self._empty.notify_all()

    def try_switch(self) -> None:
        """Switch between two forwards, if there is news; not from inside one."""
        with self._lock:
            if threading.get_ident() not in self._inside and self._has_news():
                self._switch_when_empty()

    def exclusive(self, action: Callable[[], None], *, or_raise: bool = False) -> None:
        """Run `action` with no switch and, if they end in 10 s, no forward of another thread going on.

        Newcomers are held back meanwhile, each for a short while. ``or_raise``: WaitTimeout if they do not end.
        """
        with self._lock:
            me = threading.get_ident()
            self._barred += 1
            try:
                empty = self._empty.wait_for(lambda: not self._inside.keys() - {me}, UNBIND_PATIENCE_SECONDS)
                if or_raise and not empty:
                    raise WaitTimeout(f"Other threads' forwards have not ended within {UNBIND_PATIENCE_SECONDS} s")
                action()
            finally:
                self._barred -= 1
                self._empty.notify_all()

    def try_before_fork(self, seconds: float) -> bool:
        """No switch is going on, and none begins; False if that takes longer."""
        return self._lock.acquire(timeout=seconds)

    def after_fork_in_parent(self) -> None:
        """Go on."""
        self._lock.release()

    def after_fork_in_child(self) -> None:
        """Only the forking thread is left, and it may be inside."""
        me = threading.get_ident()
        self._inside, self._barred = {me: self._inside[me]} if me in self._inside else {}, 0
        self._lock = threading.Lock()
        self._empty = threading.Condition(self._lock)

    def disarm(self) -> None:
        """No switch from now on. Its owner is let go: the two refer to each other."""
        with self._lock:
            self._has_news, self._switch = bool, lambda: None

    def _switch_when_empty(self) -> None:
        """With news there: switch, after waiting for those that are inside."""
        if self._inside:
            now = time.monotonic()
            if now > self._hold_until + _REST * self._patience:
                self._hold_until = now + self._patience
            if now < self._hold_until:
                self._empty.wait_for(lambda: not self._inside, self._hold_until - now)
            if self._inside or not self._has_news():
                return
        self._switch()
        self._hold_until = 0.0
