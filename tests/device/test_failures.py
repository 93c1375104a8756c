"""Every call of the runtime made to fail: an error that says so or a detour, the old version kept, nothing lost."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest

import shmsync
from shmsync import device
from shmsync.errors import DeviceError
from tests.device.support import Reader, fill, policy
from tests.fakes.torch_side import FakeTorch

CALLS = (
    *("cudaMalloc", "cudaFree", "cudaIpcGetMemHandle", "cudaHostRegister", "cudaHostUnregister"),
    *("cudaStreamCreateWithFlags", "cudaStreamWaitEvent", "cudaStreamSynchronize"),
    *("cudaEventCreateWithFlags", "cudaEventRecord", "cudaEventQuery", "cudaEventSynchronize"),
    *("cudaMemcpyBatchAsync", "cudaMemcpyAsync", "cudaSetDevice", "cudaGetDeviceProperties", "cuLaunchKernel"),
)
OUT_OF_MEMORY, UNKNOWN = 2, 999


@pytest.mark.parametrize("nth", [1, 2, 4, 7, 13])
@pytest.mark.parametrize("call", CALLS)
def test_one_failure(side: FakeTorch, call: str, nth: int) -> None:
    trainer = policy(side, 0)
    own = side.stream(0)
    assert own
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # copying instead of mapping
        with shmsync.Publisher(trainer) as channel:
            side.fake.fail(call, nth, OUT_OF_MEMORY if call == "cudaMalloc" else UNKNOWN)
            readers: list[Reader] = []
            _run(side, channel, trainer, readers)
            side.fake.fail_never()
            last = channel.version + 20
            while channel.version < last:
                fill(side, trainer, channel._store.writer.version + 1)
                channel.publish()
                for reader in readers:
                    assert reader.forward() == channel.version
            side.fake.drain()
            for reader in readers:
                assert not reader.wrong()
                reader.close()


def _run(side: FakeTorch, channel: shmsync.Publisher, trainer: object, readers: list[Reader]) -> None:
    """Publish and read; what fails leaves the version that there was."""
    for step in range(8):
        before = channel.version
        fill(side, trainer, channel._store.writer.version + 1)
        if not _works(lambda wait=step % 3 != 2: (channel.publish(wait=wait), channel.wait())):
            assert channel.version == before
        if len(readers) < 2 and channel.version:
            _works(lambda: readers.append(Reader(side, channel.handle, (0, device.HOST)[len(readers)])))
        for reader in readers:
            _works(reader.forward)


def _works(action: Callable[[], object]) -> bool:
    """Whether there is no error; it must be one that says what failed."""
    try:
        action()
    except DeviceError as error:
        text = str(error)
    else:
        return True
    assert " failed: cudaError" in text
    return False
