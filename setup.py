"""Build the optional extension `shmsync._C`, and a kernel for GPUs beside it; everything else is in pyproject.toml.

An installation never fails for want of a compiler: without one, shmsync is pure Python and only slower. Without nvcc,
or if it fails, torch's own kernels are used.

SHMSYNC_NO_EXTENSION=1              don't build it
SHMSYNC_NO_NVCC=1                   don't build the kernel
SHMSYNC_NVCC=/path/to/nvcc          with that one, instead of the first in PATH or CUDA_HOME/bin
SHMSYNC_SANITIZE=address | thread   build it with that sanitizer, and fail if that is impossible
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
SANITIZERS = ("address", "thread")


KERNEL = "csrc/device/gather.cu"
# One of each generation: what was compiled for 8.0 runs on 8.6 and so on too. Those that nvcc knows are taken.
ARCHITECTURES = (70, 75, 80, 86, 89, 90, 100, 120)
# Of these, the oldest in PTX as well, for what is between them; and this, for what comes after them.
PORTABLE = 80
NVCC_SECONDS = 300


def nvcc() -> str | None:
    if os.environ.get("SHMSYNC_NO_NVCC") == "1":
        return None
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    return os.environ.get("SHMSYNC_NVCC") or shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")


def architectures(compiler: str) -> list[str]:
    """nvcc's options."""
    asked = subprocess.run([compiler, "--list-gpu-arch"], capture_output=True, text=True, check=True, timeout=60)
    known = [number for number in ARCHITECTURES if f"compute_{number}" in asked.stdout.split()]
    portable = {*known[:1], PORTABLE} & set(known)
    options = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in known]
    return options + [f"-gencode=arch=compute_{number},code=compute_{number}" for number in sorted(portable)]


def compile_kernel(compiler: str, into: Path) -> None:
    """Raises OSError or SubprocessError."""
    partial = into.with_suffix(".partial")
    # Nothing is compiled for the host, so that its compiler may be one that nvcc doesn't know.
    options = ["-fatbin", "-std=c++17", "-O3", "-allow-unsupported-compiler", f"-I{ROOT / 'csrc'}"]
    command = [compiler, *options, *architectures(compiler), str(ROOT / KERNEL), "-o", str(partial)]
    try:
        subprocess.run(command, check=True, timeout=NVCC_SECONDS, stdin=subprocess.DEVNULL)
        os.replace(partial, into)
    finally:
        partial.unlink(missing_ok=True)


class BuildExtension(build_ext):
    """The extension, and then the kernel, which lies beside it."""

    def run(self) -> None:
        super().run()
        into = self._kernel()
        into.unlink(missing_ok=True)  # one of other sources, perhaps
        compiler = nvcc() if self.extensions else None
        if compiler is None:
            return
        into.parent.mkdir(parents=True, exist_ok=True)
        try:
            compile_kernel(compiler, into)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"shmsync: the kernel for GPUs is not built: {error}", file=sys.stderr)

    def get_outputs(self) -> list[str]:
        return [*super().get_outputs(), *([str(self._kernel())] if self._kernel().exists() else [])]

    def _kernel(self) -> Path:
        return (ROOT if self.inplace else Path(self.build_lib)) / "shmsync" / "_gather.fatbin"


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
        depends=sources(".h", ".cu"),
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


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildExtension})
