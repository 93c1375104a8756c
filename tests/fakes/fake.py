"""The fake CUDA runtime from Python: what to have in the environment, and what can be done to it and asked of it."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.fakes.build import library

CASTS = {"float32_to_bfloat16": 0, "float32_to_float16": 1, "bfloat16_to_float32": 2, "float16_to_float32": 3}
# What it takes for the gather kernel, where there is no nvcc too: nothing but a fatbin's header.
FATBIN = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 0)
COUNTS = ("allocations", "bytes", "registrations", "events", "streams", "opens", "contexts", "queued")


def environment(
    *,
    devices: str | Iterable[int] = "0",
    seed: int = 0,
    version: int = 13000,
    fail: str = "",
    peers: bool = True,
    nbytes: int | None = None,
    path: Path | None = None,
) -> dict[str, str]:
    """What a process needs in its environment to have the fake for its CUDA runtime.

    devices: the numbers of the devices that it sees, in its order; one number is one device in every process.
    version: as cudaRuntimeGetVersion has it; cudaMemcpyBatchAsync counts as absent below 12080.
    fail: "function:nth:error" or "function:*:error" for every call, separated by commas. "cudaMalloc:2:2" lets the
    second cudaMalloc run out of memory.
    peers: whether devices can access each other. nbytes: how many each device has; None: any number.
    """
    numbers = devices if isinstance(devices, str) else ",".join(str(d) for d in devices)
    return {
        "SHMSYNC_CUDART": str(path or library()),
        "FAKE_CUDA_DEVICES": numbers,
        "FAKE_CUDA_SEED": str(seed),
        "FAKE_CUDA_VERSION": str(version),
        "FAKE_CUDA_FAIL": fail,
        "FAKE_CUDA_PEERS": str(int(peers)),
        "FAKE_CUDA_BYTES": "" if nbytes is None else str(nbytes),
    }


def uuid(number: int) -> bytes:
    """That of the device with that number in `devices`."""
    return b"fake GPU" + bytes([number]) * 8


class Seen:
    """What a reader's kernel found: the least and the greatest byte, once it is done."""

    def __init__(self) -> None:
        self.bytes = (ctypes.c_ubyte * 2)(1, 0)  # no result has the greater one first

    @property
    def done(self) -> bool:
        return self.bytes[0] <= self.bytes[1]

    @property
    def torn(self) -> bool:
        """Whether not all bytes were the same. Raises RuntimeError before it is done."""
        return len(set(self.value)) > 1

    @property
    def value(self) -> tuple[int, int]:
        if not self.done:
            raise RuntimeError("Expected a check that is done, got one that is queued")
        return self.bytes[0], self.bytes[1]


class Fake:
    """The fake of this process: with the path that `_C` has it by, the very instance that `_C` calls.

    Every method that queues a kernel raises RuntimeError with CUDA's code if the fake refuses it.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.library = ctypes.CDLL(str(path or library()))
        address, size = ctypes.c_void_p, ctypes.c_size_t
        arguments = {
            "fakeFill": [ctypes.c_int, address, address, size, ctypes.c_int],
            "fakeCheck": [ctypes.c_int, address, address, size, address],
            "fakeCopyCast": [ctypes.c_int, address, address, address, size, ctypes.c_int],
            "fakeSeed": [ctypes.c_ulonglong],
            "fakeRunSome": [size],
            "fakeFail": [ctypes.c_char_p, ctypes.c_long, ctypes.c_int],
            "fakeFailAlways": [ctypes.c_char_p, ctypes.c_int],
            "fakeLimit": [ctypes.c_int, size],
            "fakeSetAttribute": [ctypes.c_int, ctypes.c_int],
            "fakeCount": [ctypes.c_char_p],
            "fakeViolations": [ctypes.c_char_p, size],
        }
        for name, types in arguments.items():
            getattr(self.library, name).argtypes = types
        self.library.fakeCount.restype = ctypes.c_longlong
        self.library.fakeViolations.restype = size
        self._seen: list[Seen] = []  # where queued kernels write

    # ── What is to happen ─────────────────────────────────────────────────────────────────────────────────────────────

    def reset(self) -> None:
        """As at the start of the process; everything made by CUDA is gone."""
        self.library.fakeReset()
        self._seen.clear()

    def seed(self, seed: int) -> None:
        """The order of all that comes."""
        self.library.fakeSeed(seed)

    def fail(self, function: str, nth: int, error: int) -> None:
        """Let the nth call (1: the next) of a function fail."""
        self.library.fakeFail(function.encode(), nth, error)

    def fail_always(self, function: str, error: int) -> None:
        self.library.fakeFailAlways(function.encode(), error)

    def fail_never(self) -> None:
        self.library.fakeFailNever()

    def limit(self, device: int, nbytes: int) -> None:
        """How many bytes a device has from now on, for this process alone."""
        self.library.fakeLimit(device, nbytes)

    def set_attribute(self, attribute: int, value: int) -> None:
        self.library.fakeSetAttribute(attribute, value)

    def set_current_device(self, device: int) -> None:
        """Of this thread, without the context that cudaSetDevice makes."""
        self.library.fakeSetCurrentDevice(device)

    def capturing(self, on: bool) -> None:
        """Let some thread capture a graph: no other may make calls then, unless in the mode that says it knows."""
        self.library.fakeCapturing(int(on))

    def capture_mode(self) -> int:
        """Of this thread; 0 is the usual one."""
        return self.library.fakeCaptureMode()

    def run_some(self, pieces: int) -> None:
        """Do that many pieces of what is queued."""
        self.library.fakeRunSome(pieces)

    def drain(self) -> None:
        """Do all that is queued."""
        self.library.fakeDrain()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let every call of other threads block until the end of the block, and so each that is not without the GIL."""
        self.library.fakeHold()
        try:
            yield
        finally:
            self.library.fakeLetGo()

    # ── Kernels: queued, done piece by piece ──────────────────────────────────────────────────────────────────────────

    def fill(self, device: int, stream: int, address: int, nbytes: int, value: int) -> None:
        """A trainer's kernel: sets bytes."""
        _check(self.library.fakeFill(device, stream, address, nbytes, value))

    def check(self, device: int, stream: int, address: int, nbytes: int) -> Seen:
        """A reader's kernel: looks at bytes."""
        seen = Seen()
        _check(self.library.fakeCheck(device, stream, address, nbytes, ctypes.addressof(seen.bytes)))
        self._seen = [s for s in self._seen if not s.done] + [seen]
        return seen

    def copy_cast(self, device: int, stream: int, destination: int, source: int, count: int, kind: int | str) -> None:  # noqa: PLR0917
        """Cast `count` numbers; kind: as in CASTS."""
        number = CASTS[kind] if isinstance(kind, str) else kind
        _check(self.library.fakeCopyCast(device, stream, destination, source, count, number))

    # ── What has happened ─────────────────────────────────────────────────────────────────────────────────────────────

    def count(self, what: str) -> int:
        """One of COUNTS, of what is alive in this process."""
        count = self.library.fakeCount(what.encode())
        if count < 0:
            raise ValueError(f"Expected one of {', '.join(COUNTS)}, got {what!r}")
        return count

    def counts(self) -> dict[str, int]:
        return {what: self.count(what) for what in COUNTS}

    def violations(self) -> list[str]:
        """What was done that real CUDA doesn't define, since the last reset."""
        size = self.library.fakeViolations(None, 0)
        buffer = ctypes.create_string_buffer(size)
        self.library.fakeViolations(buffer, size)
        return buffer.value.decode().splitlines()

    def last_error(self) -> int:
        """What cudaGetLastError would return, without clearing it."""
        return self.library.fakeLastError()

    def current_device(self) -> int:
        return self.library.fakeCurrentDevice()


def _check(code: int) -> None:
    if code != 0:
        raise RuntimeError(f"Expected the fake to queue a kernel, got CUDA's error {code}")
