"""`_C.cuda` finds the runtime that is loaded, names what failed, and leaves nothing behind when something does."""

from __future__ import annotations

import ctypes.util
import shutil
from pathlib import Path

import pytest

from tests.extension.support import LOAD, check_output
from tests.fakes.build import library
from tests.fakes.fake import FATBIN, environment
from tests.fakes.process import CUDA, Peer, run

pytest.importorskip("shmsync._C")

# ── Which runtime ─────────────────────────────────────────────────────────────────────────────────────────────────────

REASON = "\nprint(c.cuda.reason(), '|', c.cuda.where())\n"
LOADED = "\nimport ctypes\nkeep = ctypes.CDLL({path!r}, ctypes.{mode})\n"


def unavailable(**variables: str) -> str:
    """The reason, in a process where every call has to raise it."""
    code = """
reason = cuda.reason()
calls = [(cuda.device_count,), (cuda.malloc, 0, 8), (cuda.copy_batch, 0, [8], [8], [8], 0), (cuda.runtime_version,)]
calls += [(cuda.device_uuid, 0), (cuda.pointer_device, 8), (cuda.host_register, 8, 8, False), (cuda.stream_create, 0)]
for call in calls:
    error = raised(*call)
    assert str(error) == f"Expected a CUDA runtime that can be used, got none: {reason}", error
print(reason, "|", error.name, error.code)
"""
    return check_output(CUDA + code, **({"SHMSYNC_CUDART": ""} | variables))


def test_without_a_runtime_there_is_a_reason(tmp_path: Path) -> None:
    """Also where one could be loaded. Mutant: without RTLD_NOLOAD."""
    shutil.copy(library(), tmp_path / "libcudart.so.13")
    assert unavailable(LD_LIBRARY_PATH=str(tmp_path)) == "no CUDA runtime is loaded | unavailable -1"


def test_a_named_library_that_is_not_there_is_not_replaced() -> None:
    """Mutant: go on to the runtime that is loaded."""
    code = LOAD + LOADED.format(path=str(library()), mode="RTLD_GLOBAL") + REASON
    reason, _ = check_output(code, SHMSYNC_CUDART="/nowhere/libcudart.so").split(" | ")
    assert reason.startswith("the library of SHMSYNC_CUDART=/nowhere/libcudart.so can't be loaded: /nowhere/libcudart")
    assert unavailable(SHMSYNC_CUDART="/nowhere/libcudart.so") == f"{reason} | unavailable -1"


def test_a_library_that_is_no_runtime_is_refused() -> None:
    math = ctypes.util.find_library("m")
    said = unavailable(SHMSYNC_CUDART=math)
    assert said == f"the CUDA runtime (SHMSYNC_CUDART={math}) lacks cudaRuntimeGetVersion | unavailable -1"


def test_a_named_library_comes_first() -> None:
    code = LOAD + LOADED.format(path=str(library("FAKE_WITHOUT_PROPERTIES_V2")), mode="RTLD_GLOBAL") + REASON
    assert check_output(code, **environment()) == f"None | SHMSYNC_CUDART={library()}"


@pytest.mark.parametrize(("mode", "where"), [("RTLD_GLOBAL", "already loaded"), ("RTLD_LOCAL", "libcudart.so.13")])
def test_the_loaded_runtime_is_found(mode: str, where: str) -> None:
    code = LOAD + LOADED.format(path=str(library()), mode=mode) + REASON
    assert check_output(code, SHMSYNC_CUDART="") == f"None | {where}"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"fail": "cudaGetDeviceCount:*:35"}, "cudaGetDeviceCount failed: cudaErrorInsufficientDriver (CUDA driver"),
        ({"fail": "cudaRuntimeGetVersion:1:999"}, "cudaRuntimeGetVersion failed: cudaErrorUnknown (unknown error)"),
        ({"devices": ""}, "cudaGetDeviceCount failed: cudaErrorNoDevice (no CUDA-capable device is detected)"),
    ],
)
def test_a_runtime_without_devices_is_a_reason(settings: dict[str, str], said: str) -> None:
    reason, error = unavailable(**environment(**settings)).split(" | ")
    assert reason.startswith(said)
    assert error.split()[0] in said


def test_threads_that_ask_at_once_get_one_answer() -> None:
    run("""
        barrier, said = threading.Barrier(8), []
        def ask():
            barrier.wait()
            said.append((cuda.reason(), cuda.where(), cuda.device_count()))
        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert set(said) == {(None, "SHMSYNC_CUDART=" + os.environ["SHMSYNC_CUDART"], 1)}, said
    """)


# ── Devices ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("define", [(), ("FAKE_WITHOUT_PROPERTIES_V2",)])
def test_asking_about_devices_makes_no_context(define: tuple[str, ...]) -> None:
    """Mutant: make the device current for each call."""
    run(
        """
        assert cuda.device_count() == 2
        assert [cuda.device_uuid(0), cuda.device_uuid(1)] == [uuid(3), uuid(1)]
        assert [cuda.attribute(1, 41), cuda.attribute(1, 88)] == [1, 0]
        assert cuda.can_access_peer(0, 1) and not cuda.can_access_peer(1, 1)
        assert cuda.runtime_version() == 12090
        assert fake.count("contexts") == 0 and fake.current_device() == 0
        for call in ((cuda.device_uuid, 2), (cuda.attribute, -1, 41), (cuda.can_access_peer, 0, 2)):
            assert raised(*call).name == "cudaErrorInvalidDevice"
        """,
        devices="3,1",
        version=12090,
        path=library(*define),
    )


def test_a_context_is_made_only_where_it_is_needed() -> None:
    run(
        """
        a = cuda.malloc(0, 64)
        assert fake.count("contexts") == 1
        cuda.free(0, a)
        fake.reset()
        fake.set_current_device(1)
        cuda.malloc(1, 64)
        assert fake.count("contexts") == 1 and fake.current_device() == 1
        cuda.malloc(0, 64)
        assert fake.count("contexts") == 2 and fake.current_device() == 1
        """,
        devices="0,1",
    )


def test_the_current_device_is_not_made_current_again() -> None:
    run("""
        fake.fail_always("cudaSetDevice", 999)
        cuda.free(0, cuda.malloc(0, 64))
    """)


def test_work_that_is_not_done_is_no_error() -> None:
    """Mutant: leave cudaErrorNotReady for torch to find."""
    run("""
        a, s, e = cuda.malloc(0, 5000), cuda.stream_create(0), cuda.event_create(0)
        for value in range(20):
            fake.fill(0, s, a, 5000, value)
        cuda.event_record(0, e, s)
        assert cuda.event_query(0, e) is False
        assert fake.last_error() == 0
        while not cuda.event_query(0, e):
            pass
        assert text_of(a, 5000) == bytes([19]) * 5000
    """)


def test_peers() -> None:
    run(
        """
        cuda.enable_peer_access(0, 1)
        cuda.enable_peer_access(0, 1)
        assert fake.last_error() == 0
        assert raised(cuda.enable_peer_access, 0, 0).name == "cudaErrorInvalidDevice"
        """,
        devices="0,1",
    )
    run(
        """
        assert not cuda.can_access_peer(0, 1)
        assert raised(cuda.enable_peer_access, 0, 1).name == "cudaErrorPeerAccessUnsupported"
        """,
        devices="0,1",
        peers=False,
    )


def test_pointer_device() -> None:
    run(
        """
        a, h = cuda.malloc(1, 64), Host(4096)
        assert cuda.pointer_device(a) == cuda.pointer_device(a + 63) == 1
        assert cuda.pointer_device(a + 64) is cuda.pointer_device(h.at) is None
        cuda.host_register(h.at, 4096, True)
        assert cuda.pointer_device(h.at) is None
        """,
        devices="0,1",
    )


# ── Errors ────────────────────────────────────────────────────────────────────────────────────────────────────────────

# One of everything on device 1, while device 0 is current; every call of the module with what it calls and says.
WORLD = """
other = {other!r}
a, b, s, e = cuda.malloc(1, 64), cuda.malloc(1, 64), cuda.stream_create(1), cuda.event_create(1)
h = Host(8192)
cuda.host_register(h.at, 4096, False)
o = cuda.ipc_open(1, other) if other else 0
h2 = h.at + 4096
E, X = "on device 1", hex
table, parts = cuda.malloc(1, 32), ([0], [8], ["bytes"])
plan, planned, kernel = cuda.Gather(*parts), cuda.Gather(*parts), cuda.gather_kernel(1, {image!r})
planned.upload(1, table, [a], s)
rows = [a, a + 8, a], [b, b + 8, b], [8, 9, 0]
calls = [
    ("cudaMalloc", (cuda.malloc, 1, 1 << 20), f"of 1048576 bytes {{E}}"),
    ("cudaFree", (cuda.free, 1, b), f"of {{X(b)}} {{E}}"),
    ("cudaIpcGetMemHandle", (cuda.ipc_export, 1, a), f"of {{X(a)}} {{E}}"),
    ("cudaIpcOpenMemHandle", (cuda.ipc_open, 1, bytes(64)), E),
    ("cudaIpcCloseMemHandle", (cuda.ipc_close, 1, o), f"of {{X(o)}} {{E}}"),
    ("cudaHostRegister", (cuda.host_register, h2, 4096, True), f"of 4096 read-only bytes at {{X(h2)}}"),
    ("cudaHostUnregister", (cuda.host_unregister, h.at), f"of {{X(h.at)}}"),
    ("cudaPointerGetAttributes", (cuda.pointer_device, a), f"of {{X(a)}}"),
    ("cudaStreamCreateWithFlags", (cuda.stream_create, 1), E),
    ("cudaStreamWaitEvent", (cuda.stream_wait_event, 1, s, e), f"of stream {{X(s)}} for event {{X(e)}} {{E}}"),
    ("cudaStreamSynchronize", (cuda.stream_synchronize, 1, s), f"of {{X(s)}} {{E}}"),
    ("cudaStreamDestroy", (cuda.stream_destroy, 1, s), f"of {{X(s)}} {{E}}"),
    ("cudaEventCreateWithFlags", (cuda.event_create, 1), E),
    ("cudaEventRecord", (cuda.event_record, 1, e, s), f"of event {{X(e)}} in stream {{X(s)}} {{E}}"),
    ("cudaEventQuery", (cuda.event_query, 1, e), f"of {{X(e)}} {{E}}"),
    ("cudaEventSynchronize", (cuda.event_synchronize, 1, e), f"of {{X(e)}} {{E}}"),
    ("cudaEventDestroy", (cuda.event_destroy, 1, e), f"of {{X(e)}} {{E}}"),
    ("cudaMemcpyAsync", (cuda.copy, 1, a, b, 64, s), f"of 64 bytes from {{X(b)}} to {{X(a)}} {{E}}"),
    ("cudaMemcpyAsync", (cuda.copy_batch, 1, [a], [b], [64], 0), f"of 64 bytes from {{X(b)}} to {{X(a)}} {{E}}"),
    ("cudaMemcpyBatchAsync", (cuda.copy_batch, 1, *rows, s), f"of 2 rows, 17 bytes, {{E}}"),
    ("cuModuleLoadData", (cuda.gather_kernel, 1, {image!r}), f"of 16 bytes {{E}}"),
    ("cuModuleGetFunction", (cuda.gather_kernel, 1, {image!r}), f"of shmsync_gather_1 {{E}}"),
    ("cudaStreamSynchronize", (plan.upload, 1, table, [a], s), f"of {{X(s)}} {{E}}"),
    ("cuLaunchKernel", (planned.launch, 1, kernel, table, a, s), f"of 1 blocks {{E}}"),
    ("cudaDeviceEnablePeerAccess", (cuda.enable_peer_access, 1, 0), f"to device 0 {{E}}"),
    ("cudaGetDeviceCount", (cuda.device_count,), ""),
    ("cudaGetDeviceProperties", (cuda.device_uuid, 1), "of device 1"),
    ("cudaDeviceGetAttribute", (cuda.attribute, 1, 41), f"of attribute 41 {{E}}"),
    ("cudaDeviceCanAccessPeer", (cuda.can_access_peer, 1, 0), f"to device 0 {{E}}"),
]
left_out = set(dir(cuda)) - {{call[0].__name__ for _, call, _ in calls}}
assert {{n for n in left_out if n[0] != "_"}} == {{"CudaError", "Gather", "reason", "where", "runtime_version"}}
"""


def run_in_world(code: str) -> None:
    with Peer(devices="1") as owner:
        handle = owner("cuda.ipc_export(0, cuda.malloc(0, 64))")
        run(WORLD.format(other=handle, image=FATBIN) + code, devices="0,1")


def test_an_error_names_what_was_attempted_and_changes_nothing() -> None:
    """Mutants: the last error is not cleared; the device is not set back after an error; another call's name."""
    run_in_world("""
for function, call, what in calls:
    fake.drain()
    before = fake.counts()
    fake.fail(function, 1, 46)
    error = raised(*call)
    attempt = f"{function} {what}".strip()
    expected = f"{attempt} failed: cudaErrorDevicesUnavailable (CUDA-capable device(s) is/are busy or unavailable)"
    assert (str(error), error.name, error.code) == (expected, "cudaErrorDevicesUnavailable", 46), error
    assert isinstance(error, RuntimeError) and fake.last_error() == 0 and fake.current_device() == 0
    fake.drain()
    assert fake.counts() == before, function
""")


def test_a_device_that_cant_be_made_current_or_left_changes_nothing() -> None:
    """Mutants: what was made is not given up if the way back fails; the code of the way back is not looked at."""
    run_in_world("""
no_device = {"cudaHostRegister", "cudaHostUnregister", "cudaPointerGetAttributes", "cudaGetDeviceCount"}
no_device |= {"cudaGetDeviceProperties", "cudaDeviceGetAttribute", "cudaDeviceCanAccessPeer"}
ends = {"cudaFree", "cudaIpcCloseMemHandle", "cudaStreamDestroy", "cudaEventDestroy", "cudaIpcOpenMemHandle"}
def attempt(call, nth):
    fake.drain()
    before = fake.counts()
    fake.fail("cudaSetDevice", nth, 46)
    error = raised(*call)
    assert str(error).startswith(f"cudaSetDevice to {2 - nth} for cu"), error
    assert " failed: cudaErrorDevicesUnavailable" in str(error) and fake.last_error() == 0
    fake.set_current_device(0)
    fake.drain()
    assert fake.counts() == before, call
for nth in (1, 2):
    for function, call, _ in calls:
        if function not in no_device | (ends if nth == 2 else set()):
            attempt(call, nth)
cuda.ipc_close(1, o)
attempt((cuda.ipc_open, 1, other), 2)
fake.fail("cudaGetDevice", 1, 3)
said = "cudaGetDevice before cudaMalloc of 8 bytes on device 1 failed: cudaErrorInitializationError"
assert str(raised(cuda.malloc, 1, 8)).startswith(said)
""")


def test_no_call_holds_the_gil() -> None:
    """Mutant: a call without its guard; then nothing lets the fake go, and the process hangs."""
    run_in_world("""
import time
def try_it(call):
    try:
        call[0](*call[1:])
    except cuda.CudaError:
        pass  # of ipc_open, which has no good handle
ends = [x for x in calls if x[0] in ("cudaFree", "cudaIpcCloseMemHandle", "cudaHostUnregister")]
ends += [x for x in calls if x[0].endswith("Destroy")]
for _, call, _ in [x for x in calls if x not in ends] + ends:
    thread = threading.Thread(target=try_it, args=[call])
    with fake.held():
        thread.start()
        time.sleep(0.003)
    thread.join()
""")


def test_an_error_survives_pickling() -> None:
    run("""
        import pickle, sys, types
        sys.modules["shmsync"] = types.ModuleType("shmsync")  # or it is imported, which takes seconds
        error = pickle.loads(pickle.dumps(raised(cuda.malloc, 7, 8)))
        assert (type(error), error.name, error.code) == (cuda.CudaError, "cudaErrorInvalidDevice", 101)
    """)


def test_refuses_arguments_of_another_form() -> None:
    run("""
        import re
        import numpy as np
        def refused(kind, text, call, *arguments):
            try:
                call(*arguments)
            except kind as error:
                assert re.search(text, str(error)), error
            else:
                raise AssertionError(text)
        refused(ValueError, "Expected a handle of 64 bytes, got 3", cuda.ipc_open, 0, b"abc")
        refused(ValueError, "Expected to allocate at least 1 byte, got 0", cuda.malloc, 0, 0)
        batch, strided = cuda.copy_batch, np.ones(4, dtype=np.uint64)[::2]
        refused(ValueError, "Expected 2 sources, one for each destination, got 1", batch, 0, [1, 2], [1], [1, 1], 0)
        refused(ValueError, "Expected 1 sizes, one for each destination, got 0", batch, 0, [1], [1], [], 0)
        refused(ValueError, "Expected a contiguous buffer of uint64", batch, 0, [1], bytes(8), [1], 0)
        refused(ValueError, "Expected a contiguous buffer of uint64", batch, 0, [1, 1], [1, 1], strided, 0)
        refused(TypeError, "Expected sizes as a buffer or sequence of numbers, got .*int", batch, 0, [1], [1], 1, 0)
        refused(TypeError, "Expected sources as a buffer or sequence", batch, 0, [1], [-1], [1], 0)
        refused(TypeError, "", cuda.free, 0, -1)
        refused(TypeError, "", cuda.malloc, 1.5, 8)
        assert fake.count("contexts") == 0
    """)


# ── Copies ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("version", [12040, 12080, 12090, 13000])
def test_a_batch_copies_its_rows_in_every_version(version: int) -> None:
    """Mutants: one form for all versions; rows of 0 bytes are handed on; the default stream gets a batch."""
    run(
        """
        import numpy as np
        make = [list, tuple, lambda n: array("Q", n), lambda n: np.array(n, dtype=np.uint64)]
        a, b, s = cuda.malloc(0, 4096), cuda.malloc(0, 4096), cuda.stream_create(0)
        for stream in (s, 0, 1, 2):
            for form in make:
                ctypes.memmove(a, os.urandom(4096), 4096)
                sizes = [0, 1, 700, 0, 33, 0]
                offsets = [0, 0, 5, 900, 1000, 0]
                to, of = ([x + o if n else 0 for o, n in zip(offsets, sizes)] for x in (b, a))
                before = text_of(b, 4096)
                cuda.copy_batch(0, form(to), form(of), form(sizes), stream)
                cuda.stream_synchronize(0, stream)
                after = bytearray(before)
                for o, n in zip(offsets, sizes):
                    after[o : o + n] = text_of(a + o, n)
                assert text_of(b, 4096) == bytes(after)
            cuda.copy_batch(0, [], [], [], stream)
            cuda.copy_batch(0, [0], [0], [0], stream)
        assert fake.violations() == []
        fake.fail_always("cudaMemcpyBatchAsync", 999)
        cuda.copy_batch(0, [a], [b], [8], 0)
        if cuda.runtime_version() < 12080:
            cuda.copy_batch(0, [a], [b], [8], s)
        else:
            assert raised(cuda.copy_batch, 0, [a], [b], [8], s).code == 999
        """,
        version=version,
    )


@pytest.mark.parametrize("version", [12040, 12080, 13000])
def test_a_batch_names_its_bad_row_where_the_runtime_does(version: int) -> None:
    run(
        """
        a, b, s = cuda.malloc(0, 64), cuda.malloc(0, 64), cuda.stream_create(0)
        said = str(raised(cuda.copy_batch, 0, [a, a, a + 8], [b, b, b + 60], [0, 4, 8], s))
        row, end = f"of 8 bytes from {hex(b + 60)} to {hex(a + 8)}", "on device 0 failed: cudaErrorInvalidValue"
        batch = "cudaMemcpyBatchAsync of 2 rows, 12 bytes,"
        expected = {
            12040: f"cudaMemcpyAsync {row} {end}",
            12080: f"{batch} at the copy {row}, {end}",
            13000: f"{batch} {end}",
        }
        assert said.startswith(expected[cuda.runtime_version()]), said
        """,
        version=version,
    )


# A trainer fills, we copy, a reader looks: three streams and what makes each wait.
PIPELINE = """
def pipeline(seed, left_out=""):
    fake.seed(seed)
    trained, copied = cuda.event_create(0), cuda.event_create(0)
    fake.fill(0, trainer, a, 600, 1)
    cuda.event_record(0, trained, trainer)
    if left_out != "copy waits":
        cuda.stream_wait_event(0, ours, trained)
    cuda.copy_batch(0, [b, b + 100, b + 400], [a, a + 100, a + 400], [100, 300, 200], ours)
    cuda.event_record(0, copied, ours)
    if left_out != "trainer waits":
        cuda.stream_wait_event(0, trainer, copied)
    fake.fill(0, trainer, a, 600, 2)
    if left_out == "":
        while not cuda.event_query(0, copied):
            pass
    elif left_out != "reader waits":
        cuda.event_synchronize(0, copied)
    seen = fake.check(0, reader, b, 600)
    for stream in (trainer, ours, reader):
        cuda.stream_synchronize(0, stream)
    cuda.event_destroy(0, trained)
    cuda.event_destroy(0, copied)
    ctypes.memset(b, 0xCC, 600)
    return seen.value == (1, 1)
a, b = cuda.malloc(0, 600), cuda.malloc(0, 600)
trainer, ours, reader = (cuda.stream_create(0) for _ in range(3))
"""


def test_a_copy_that_waits_is_whole_and_one_that_does_not_is_torn() -> None:
    run(
        PIPELINE
        + """
assert all(pipeline(seed) for seed in range(100))
for left_out in ("copy waits", "trainer waits", "reader waits"):
    wrong = sum(not pipeline(seed, left_out) for seed in range(100))
    assert wrong > 10, (left_out, wrong)
assert fake.violations() == [] and fake.count("queued") == fake.count("events") == 0
"""
    )


def test_what_is_made_can_be_given_back() -> None:
    run(
        """
        zero = fake.counts() | {"contexts": 2}
        h = Host(4096)
        for index in (0, 1):
            a, s, e = cuda.malloc(index, 100), cuda.stream_create(index), cuda.event_create(index)
            cuda.host_register(h.at, 4096, index == 0)
            cuda.copy(index, a, h.at, 100, s)
            cuda.event_record(index, e, s)
            cuda.event_synchronize(index, e)
            assert text_of(a, 100) == bytes(100)
            cuda.event_destroy(index, e)
            cuda.stream_destroy(index, s)
            cuda.host_unregister(h.at)
            cuda.free(index, a)
        assert fake.counts() == zero and fake.violations() == []
        """,
        devices="0,1",
    )


def test_a_graph_that_another_thread_captures_is_left_alone() -> None:
    """Mutant: without NotCapturing."""
    said = run("""
        stream, event = cuda.stream_create(0), cuda.event_create(0)
        fake.capturing(True)
        cuda.event_record(0, event, stream)
        cuda.event_synchronize(0, event)
        assert cuda.event_query(0, event)
        cuda.free(0, cuda.malloc(0, 64))
        print(fake.capture_mode())
    """)
    assert said == "0"
