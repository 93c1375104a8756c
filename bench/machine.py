"""What the numbers were measured on."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .memory import table

PACKAGES = ("torch", "torchrl", "tensordict", "numpy", "ray")


def describe() -> dict[str, Any]:
    """Machine, versions and load, as the head of a results file."""
    cpu = _cpuinfo()
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {
            "cpu": cpu.get("model name", platform.processor() or platform.machine()),
            "cores": os.cpu_count(),
            "usable_cores": len(os.sched_getaffinity(0)),
            "cache": cpu.get("cache size", "?"),
            "simd": [flag for flag in ("avx2", "avx512f", "avx512_bf16") if flag in cpu.get("flags", "").split()],
            "memory_gib": round(table("/proc/meminfo")["MemTotal"] / 2**30, 1),
            "kernel": platform.release(),
            "libc": " ".join(platform.libc_ver()),
            "torch_threads": torch.get_num_threads(),
            "load_at_start": round(os.getloadavg()[0], 2),
        },
        "versions": {"python": platform.python_version(), **_versions(), "commit": _commit()},
        "has_extension": has_extension(),
    }


def has_extension() -> bool:
    """Whether shmsync runs with its compiled part."""
    import shmsync

    found = getattr(shmsync, "has_extension", False)
    return bool(found() if callable(found) else found)


def _cpuinfo() -> dict[str, str]:
    pairs = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _versions() -> dict[str, str]:
    import shmsync

    found = {"shmsync": shmsync.__version__}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _commit() -> str:
    root = Path(__file__).resolve().parents[1]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "?"
