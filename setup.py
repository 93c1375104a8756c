"""Build the optional extension `shmsync._C`; everything else is in pyproject.toml.

An installation never fails for want of a compiler: without one, shmsync is pure Python and only slower.

SHMSYNC_NO_EXTENSION=1              don't build it
SHMSYNC_SANITIZE=address | thread   build it with that sanitizer, and fail if that is impossible
"""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup

ROOT = Path(__file__).resolve().parent
SANITIZERS = ("address", "thread")


def sanitizer() -> str:
    name = os.environ.get("SHMSYNC_SANITIZE", "")
    if name and name not in SANITIZERS:
        sys.exit(f"Expected SHMSYNC_SANITIZE to be one of {', '.join(SANITIZERS)}, got {name!r}")
    return name


def sources(*suffixes: str) -> list[str]:
    # setuptools wants paths relative to setup.py.
    return sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.suffix in suffixes)


def extension() -> Extension:
    # Imported here because an environment without pybind11 can still install the pure Python package.
    from pybind11.setup_helpers import Pybind11Extension

    # No -march: one build runs on every machine of its architecture.
    compile_args, link_args = ["-O3", "-Wall", "-Wextra"], []
    sanitize = sanitizer()
    if sanitize:
        link_args = [f"-fsanitize={sanitize}"]
        compile_args = ["-O1", "-g", "-fno-omit-frame-pointer", *link_args]
    return Pybind11Extension(
        "shmsync._C",
        sources(".cpp"),
        depends=sources(".h"),
        include_dirs=["csrc"],
        libraries=["dl"],  # dlopen, before glibc 2.34
        cxx_std=17,
        extra_compile_args=compile_args,
        extra_link_args=link_args,
        optional=not sanitize,
    )


def extensions() -> list[Extension]:
    if os.environ.get("SHMSYNC_NO_EXTENSION") == "1":
        return []
    try:
        return [extension()]
    except ImportError:
        if sanitizer():
            raise
        print("shmsync: pybind11 is not installed, so the optional extension is not built", file=sys.stderr)
        return []


setup(ext_modules=extensions())
