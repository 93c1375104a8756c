"""The error tree: every error that shmsync raises on purpose.

ShmSyncError
├── LayoutError            (ValueError)    the weights themselves
│   ├── UnsupportedLeaf                    a leaf that cannot live in shared memory
│   ├── LayoutMismatch                     keys, shapes or dtypes differ from the channel's
│   └── TiedLeavesDiffer                   two names of one stored leaf, two values
├── ChannelError           (RuntimeError)  the way to the shared segments
│   ├── ChannelClosed                      used after close()
│   ├── ChannelUnreachable                 another host, pid namespace or user
│   ├── ChannelCorrupt                     the shared bytes do not validate
│   ├── PublisherGone                      the owner process has ended
│   ├── NotAttached                        a notification to a worker that follows no such channel
│   └── NotThePublisher                    another process or a copy tried to publish
├── LimitError             (RuntimeError)  no room
│   ├── SlotsExhausted     (TimeoutError)  max_slots reached and all leased
│   ├── SubscribersExhausted               max_subscribers reached
│   └── OutOfSharedMemory  (MemoryError)   a cgroup, MemAvailable or RLIMIT_FSIZE forbids it
├── DeviceError            (RuntimeError)  the CUDA runtime refused something
├── BindingError           (RuntimeError)  a module that cannot follow the channel
│   └── BindingLost                        bound parameters are no longer the module's
├── NothingPublished       (RuntimeError)  weights were wanted at version 0
├── WaitTimeout            (TimeoutError)  wait() ran out of time
├── WorkerIdError          (ValueError)    no such worker
├── LagExceeded            (RuntimeError)  a worker is more than max_lag versions behind
│   └── LagTimeout         (TimeoutError)  ... and was so until time ran out
└── PushError              (RuntimeError)  some workers did not confirm a push
    └── PushTimeout        (TimeoutError)  ... because time ran out
"""

from __future__ import annotations

from collections.abc import Mapping


class ShmSyncError(Exception):
    """Root of everything that shmsync raises on purpose."""


class LayoutError(ShmSyncError, ValueError):
    """The weights cannot be stored, or do not fit the channel."""


class UnsupportedLeaf(LayoutError):
    """A leaf that cannot live in shared memory; the text names its key path and the reason."""

    def __init__(self, reasons: Mapping[str, str] | str) -> None:
        # RPC builds an error again from its text alone.
        self.reasons = {} if isinstance(reasons, str) else dict(reasons)
        super().__init__(
            reasons
            if isinstance(reasons, str)
            else "These leaves cannot be shared:\n"
            + "\n".join(f"  - `{key}`: {why}" for key, why in self.reasons.items())
        )

    def __reduce__(self) -> tuple[type, tuple[dict[str, str] | str]]:
        return type(self), (self.reasons or str(self),)


class LayoutMismatch(LayoutError):
    """Keys, shapes or dtypes differ from the channel's layout; nothing was written."""

    def __init__(
        self,
        what: str,
        *,
        unexpected: list[str] | None = None,
        missing: list[str] | None = None,
        differing: Mapping[str, str] | None = None,
    ) -> None:
        self.what = what
        self.unexpected = list(unexpected or ())
        self.missing = list(missing or ())
        self.differing = dict(differing or {})
        lines = [what]
        if self.unexpected:
            lines.append(f"  unexpected keys: {_listed(self.unexpected)}")
        if self.missing:
            lines.append(f"  missing keys: {_listed(self.missing)}")
        lines += [f"  - `{key}`: {text}" for key, text in self.differing.items()]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_mismatch, (type(self), self.what, self.unexpected, self.missing, self.differing)


class TiedLeavesDiffer(LayoutError):
    """Two names that share one stored leaf were given different values; nothing was written."""


class ChannelError(ShmSyncError, RuntimeError):
    """The way to the shared segments is closed or broken."""


class ChannelClosed(ChannelError):
    """The publisher, subscriber or updater was used after close()."""


class ChannelUnreachable(ChannelError):
    """The channel lives on another host, in another pid namespace, or belongs to another user."""


class ChannelCorrupt(ChannelError):
    """The shared bytes do not validate: not a shmsync segment, another format, or damaged."""


class PublisherGone(ChannelError):
    """The process that owned the channel has ended; weights already mapped stay readable."""


class NotAttached(ChannelError):
    """A notification came to a worker that has not attached, or has been started anew."""


class NotThePublisher(ChannelError):
    """Only the process that made a publisher may publish through it."""


class LimitError(ShmSyncError, RuntimeError):
    """There is no room left; the text names the limit."""


class SlotsExhausted(LimitError, TimeoutError):
    """All `max_slots` slots stayed leased for the whole timeout; the text names who holds what."""


class SubscribersExhausted(LimitError):
    """All `max_subscribers` roster lines are taken."""


class OutOfSharedMemory(LimitError, MemoryError):
    """Another slot would exceed a cgroup's limit, MemAvailable or RLIMIT_FSIZE."""


class DeviceError(ShmSyncError, RuntimeError):
    """The CUDA runtime refused something; the text says what was attempted, ``name`` is the runtime's for the error."""

    def __init__(self, text: str, name: str = "") -> None:
        self.name = name
        super().__init__(text)

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (str(self), self.name)


class BindingError(ShmSyncError, RuntimeError):
    """A module cannot be bound in the way that was asked for."""


class BindingLost(BindingError):
    """The bound parameters are no longer the module's own, so an update would not reach it."""


class NothingPublished(ShmSyncError, RuntimeError):
    """Weights were asked for, but the channel is still at version 0."""


class WaitTimeout(ShmSyncError, TimeoutError):
    """A wait ran out of time."""


class WorkerIdError(ShmSyncError, ValueError):
    """No such worker; the text names the id and the valid range. Nothing was sent."""


class LagExceeded(ShmSyncError, RuntimeError):
    """A worker is more than ``max_lag`` versions behind; the text names its process and the versions."""


class LagTimeout(LagExceeded, TimeoutError):
    """As :class:`LagExceeded`, where it has been waited for to catch up."""


def _lasts(error: BaseException) -> bool:
    """Whether another push to the same worker would meet it again."""
    lasting = isinstance(error, (ConnectionError, LayoutError, ChannelError, BindingError, LimitError))
    return lasting or type(error) is ShmSyncError


class PushError(ShmSyncError, RuntimeError):
    """The weights are published, but some workers did not confirm them, or are too far behind.

    ``version`` is the published version, ``errors`` maps each failing worker id to what it raised.
    """

    def __init__(self, version: int, errors: Mapping[int, BaseException]) -> None:
        self.version = version
        self.errors = dict(errors)
        parts = [f"worker {w}: {type(e).__name__}: {e}" for w, e in sorted(self.errors.items())]
        unconfirmed = [w for w, e in sorted(self.errors.items()) if not isinstance(e, LagExceeded)]
        what = "did not confirm it" if unconfirmed else "are too far behind"
        again = [w for w in unconfirmed if not _lasts(self.errors[w])]
        retry = f"; push_weights(worker_ids={again}) publishes again, to these alone" if again else ""
        super().__init__(
            f"Version {version} is published, but {len(parts)} worker(s) {what}:\n  "
            + "\n  ".join(parts)
            + f"\nAny others that were asked have it{retry}."
        )

    def __reduce__(self) -> tuple[type, tuple[int, dict[int, BaseException]]]:
        return type(self), (self.version, self.errors)


class PushTimeout(PushError, TimeoutError):
    """As :class:`PushError`, where at least one worker gave no answer within ``timeout`` seconds."""


def _listed(keys: list[str], limit: int = 20) -> str:
    text = ", ".join(f"`{key}`" for key in keys[:limit])
    return text if len(keys) <= limit else f"{text} and {len(keys) - limit} more"


def _rebuild_mismatch(
    kind: type[LayoutMismatch], what: str, unexpected: list[str], missing: list[str], differing: dict[str, str]
) -> LayoutMismatch:
    return kind(what, unexpected=unexpected, missing=missing, differing=differing)
