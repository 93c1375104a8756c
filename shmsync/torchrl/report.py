"""What a push did, for the one who pushed."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class WorkerReport:
    """One worker's answer. ``in_use`` and ``seen``: versions, None = not confirmed; ``error``: what it raised.

    ``via``: how it gets the weights, "map" (it maps the channel) or "rpc" (`fallback="rpc"`); None = not attached yet.
    """

    in_use: int | None = None
    seen: int | None = None
    error: BaseException | None = None
    via: str | None = None

    @property
    def status(self) -> str:
        """Both versions, "not confirmed", or the error."""
        if self.error is not None:
            return f"{type(self.error).__name__}: {self.error}"
        if self.in_use is None:
            return "not confirmed"
        return f"in use: {self.in_use}, seen: {self.seen}" + (", by RPC" if self.via == "rpc" else "")


@dataclass
class PushReport:
    """One push: its version, ``nbytes`` and ``leaves`` written, ``seconds`` per phase ("copy", "notify"),

    ``notification_nbytes`` of all messages together, ``rpc_nbytes`` of the weights that went by RPC to workers that
    can't map the channel, and each addressed worker's answer.
    """

    version: int
    nbytes: int
    leaves: int
    seconds: dict[str, float] = field(default_factory=dict)
    notification_nbytes: int = 0
    rpc_nbytes: int = 0
    workers: dict[int, WorkerReport] = field(default_factory=dict)


@dataclass(frozen=True)
class Lag:
    """How many versions the workers are behind what is addressed to them: least, mean and most of all, and of each."""

    min: int
    mean: float
    max: int
    workers: dict[int, int]
