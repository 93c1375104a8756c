"""A run's results: series of samples, the machine, what was left out. Stored as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .stats import Spread, spread

FORMAT = 1
ROOFLINE = "roofline"


class Key(NamedTuple):
    """What tells one series from another. ``workers``: 0 where there are none; ``workload``: "-" where it has none."""

    group: str
    workload: str
    workers: int
    rival: str
    metric: str


@dataclass
class Series:
    """All rounds' samples of one metric of one rival. ``unit``: "s", "B", "1" (a share or a number) or "1/s"."""

    group: str
    workload: str
    workers: int
    rival: str
    metric: str
    unit: str
    samples: list[float] = field(default_factory=list)

    @property
    def key(self) -> Key:
        """Its name in the results."""
        return Key(self.group, self.workload, self.workers, self.rival, self.metric)

    @property
    def spread(self) -> Spread:
        """Median and quartiles."""
        return spread(self.samples)


class Results:
    """Series by key, and notes. ``about``: machine, versions, options."""

    def __init__(self, about: dict[str, Any] | None = None) -> None:
        self.about = about or {}
        self.notes: list[str] = []
        self.failures: list[str] = []
        self._series: dict[Key, Series] = {}

    def __iter__(self) -> Iterator[Series]:
        return iter(self._series.values())

    def add(self, key: Key, unit: str, sample: float) -> None:
        """One sample."""
        series = self._series.setdefault(key, Series(*key, unit))
        series.samples.append(float(sample))

    def find(self, key: Key) -> Series | None:
        """One series, or None if it was not measured."""
        return self._series.get(key)

    def where(self, **wanted: Any) -> list[Series]:
        """All series with these attributes, in the order of measuring."""
        return [s for s in self if all(getattr(s, name) == value for name, value in wanted.items())]

    def reference_of(self, series: Series) -> Series | None:
        """What a series is compared with: the fastest plain copy of the same bytes, of the same rounds if there is one.

        Frames per second have no roofline; they are compared with torchrl's own updater.
        """
        if series.group == "collector":
            return self.find(series.key._replace(rival="torchrl-updater"))
        rooflines = self.where(rival=ROOFLINE)
        for near in (
            lambda s: (s.group, s.workload, s.workers) == (series.group, series.workload, series.workers),
            lambda s: (s.group, s.workload) == (series.group, series.workload),
            lambda s: s.workload == series.workload,
        ):
            if found := [s for s in rooflines if near(s)]:
                return min(found, key=lambda s: s.spread.median)
        return None

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        content = {
            "format": FORMAT,
            "about": self.about,
            "notes": self.notes,
            "failures": self.failures,
            "series": [asdict(series) for series in self],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read what `save` wrote. Raises ValueError for anything else."""
        try:
            content = json.loads(path.read_text())
            if content["format"] != FORMAT:
                raise ValueError(f"Expected format {FORMAT}, got {content['format']} - in {path}")
            results = cls(content["about"])
            results.notes, results.failures = content["notes"], content["failures"]
            for fields in content["series"]:
                series = Series(**fields)
                results._series[series.key] = series
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"Expected the results of a run of this benchmark, got {error!r} - in {path}") from error
        return results
