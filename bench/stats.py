"""Medians with their spread, and ratios of interleaved samples."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Lower quartile, median, upper quartile."""

    low: float
    median: float
    high: float

    def overlaps(self, other: Spread) -> bool:
        """Whether the two ranges between the quartiles have a value in common."""
        return self.low <= other.high and other.low <= self.high


def spread(samples: Sequence[float]) -> Spread:
    """Quartiles of at least one sample."""
    if len(samples) == 1:
        return Spread(samples[0], samples[0], samples[0])
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Spread(low, median, high)


def ratios(samples: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Each sample over the reference of the same round, so that what slowed both down cancels out.

    Where the numbers of rounds differ: over the reference's median.
    """
    if len(samples) == len(reference):
        return [sample / other for sample, other in zip(samples, reference, strict=True)]
    middle = statistics.median(reference)
    return [sample / middle for sample in samples]
