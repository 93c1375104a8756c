"""What all processes of a soak share besides shmsync: counters in a file, and the newest trainer's handle."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

_COUNTS = np.dtype([(name, "<i8") for name in ("forwards", "pushes", "mixed", "back", "blocked", "moves")])


class Board:
    """Counters by place, kept over kills; each place is written by the one process that has it."""

    def __init__(self, folder: Path, places: int) -> None:
        self._folder = folder
        self.counts = self._file("counts", _COUNTS, places)
        self.stops = self._file("stops", np.dtype("<i8"), places)
        self.over = self._file("over", np.dtype("<i8"), 1)
        self.pauses = self._file("pauses", np.dtype("<i8"), 1)  # of the whole machine, as the supervisor noticed them

    def _file(self, name: str, dtype: np.dtype, count: int) -> np.ndarray:
        path = self._folder / name
        if not path.exists():
            path.write_bytes(bytes(dtype.itemsize * count))
        return np.memmap(path, dtype, "r+", shape=(count,))

    def lead(self, handle: str) -> None:
        """This is the trainer's channel from now on."""
        fresh = self._folder / f"handle-{os.getpid()}"
        fresh.write_text(handle)
        fresh.rename(self._folder / "handle")

    def leader(self) -> str | None:
        """The newest trainer's handle."""
        try:
            return (self._folder / "handle").read_text()
        except FileNotFoundError:
            return None
