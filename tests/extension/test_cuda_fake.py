"""The fake CUDA runtime does what the real one would, in some order, and notices what real CUDA leaves undefined."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.extension.support import ROOT
from tests.fakes import build
from tests.fakes.process import Peer, run

pytest.importorskip("shmsync._C")

# ── Building it ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_any_number_of_processes_may_build_it(tmp_path: Path) -> None:
    """Mutant: the compiler writes to the final name; then another process loads half a library."""
    slow = tmp_path / "c++"
    slow.write_text(
        "#!/bin/sh\nfor last; do :; done\n"
        f"head -c 5000 {build.library()} >$last; sleep 0.3; tail -c +5001 {build.library()} >>$last\n"
    )
    slow.chmod(0o700)
    code = "import ctypes; from tests.fakes.build import library; ctypes.CDLL(str(library())).fakeReset()"
    environment = os.environ | {"TMPDIR": str(tmp_path), "CXX": str(slow)}
    command = [sys.executable, "-c", f"import sys, time; time.sleep(float(sys.argv[1])); {code}"]
    builders = [subprocess.Popen([*command, str(0.15 * i)], cwd=ROOT, env=environment) for i in range(4)]
    assert [builder.wait(timeout=60) for builder in builders] == [0] * 4
    (cache,) = tmp_path.glob("shmsync-fakes-*")
    assert [path.suffix for path in cache.iterdir()] == [".so"]


def test_without_a_compiler_there_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(RuntimeError, match="Expected the fake CUDA runtime to compile"):
        build.library()
    (cache,) = tmp_path.iterdir()
    assert list(cache.iterdir()) == []
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="Expected a C\\+\\+ compiler"):
        build.library()


def test_a_cache_that_others_can_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path))
    cache = tmp_path / f"shmsync-fakes-{os.getuid()}"
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(RuntimeError, match="no other can write to"):
        build.library()


# ── Streams and events ────────────────────────────────────────────────────────────────────────────────────────────────


def test_nothing_runs_at_enqueue_and_a_stream_keeps_its_order() -> None:
    run("""
        a, s = cuda.malloc(0, 300), cuda.stream_create(0)
        assert text_of(a, 300) == b"\\xcc" * 300
        for value in (1, 2):
            fake.fill(0, s, a, 300, value)
        assert text_of(a, 300) == b"\\xcc" * 300 and fake.count("queued") == 2
        fake.run_some(1)
        assert 0 < text_of(a, 300).count(1) < 300
        seen = fake.check(0, s, a, 300)
        assert not seen.done
        fake.drain()
        assert seen.value == (2, 2) and fake.count("queued") == 0
        fake.fill(0, s, a, 300, 3)
        cuda.stream_destroy(0, s)
        assert fake.count("streams") == 0
        assert raised(cuda.stream_synchronize, 0, s).name == "cudaErrorInvalidResourceHandle"
        fake.drain()
        assert text_of(a, 300) == bytes([3]) * 300
    """)


def test_one_seed_is_one_order() -> None:
    run("""
        a = cuda.malloc(0, 300)
        streams = [cuda.stream_create(0) for _ in range(3)]
        def order(seed):
            fake.seed(seed)
            for value, stream in enumerate(streams):
                fake.fill(0, stream, a, 300, value)
            fake.drain()
            return text_of(a, 300)
        assert [order(seed) for seed in range(20)] == [order(seed) for seed in range(20)]
        assert len({order(seed) for seed in range(20)}) > 10
    """)


def test_events() -> None:
    """A wait is for the latest record at the time of the call, and for nothing if there is none."""
    run(
        """
        a, s, t, e = cuda.malloc(0, 3000), cuda.stream_create(0), cuda.stream_create(0), cuda.event_create(0)
        assert cuda.event_query(0, e)
        cuda.event_synchronize(0, e)
        early = [0, 0]
        for seed in range(50):
            fake.seed(seed)
            other = cuda.event_create(0)
            cuda.stream_wait_event(0, t, other)
            fake.fill(0, s, a, 3000, 1)
            cuda.event_record(0, other, s)
            early[0] += not cuda.event_query(0, other)
            cuda.stream_synchronize(0, t)  # does not wait for s
            cuda.stream_wait_event(0, t, other)
            fake.fill(0, s, a, 3000, 2)
            cuda.event_record(0, other, s)
            cuda.event_destroy(0, other)  # what waits for it still does
            cuda.stream_synchronize(0, t)
            assert a and set(text_of(a, 3000)) <= {1, 2}
            early[1] += fake.count("queued") > 0
            fake.drain()
        assert min(early) > 20, early
        assert fake.count("events") == 1
        f = cuda.event_create(1)
        assert raised(cuda.event_record, 0, f, s).name == "cudaErrorInvalidResourceHandle"
        assert raised(cuda.event_query, 0, s).name == "cudaErrorInvalidResourceHandle"
        """,
        devices="0,1",
    )


def test_the_default_stream_waits_for_blocking_streams_and_they_for_it() -> None:
    run("""
        a, ours = cuda.malloc(0, 600), cuda.stream_create(0)
        made = ctypes.c_void_p()
        assert fake.library.cudaStreamCreateWithFlags(ctypes.byref(made), 0) == 0
        def whole(seed, writer, reader):
            fake.seed(seed)
            fake.fill(0, writer, a, 600, 0)
            fake.drain()
            fake.fill(0, writer, a, 600, 1)
            seen = fake.check(0, reader, a, 600)
            fake.drain()
            return seen.value == (1, 1)
        for pair in ((0, made.value), (made.value, 0), (1, 2), (2, 0)):
            assert all(whole(seed, *pair) for seed in range(30)), pair
        for pair in ((0, ours), (ours, 0), (ours, made.value)):
            assert sum(not whole(seed, *pair) for seed in range(30)) > 10, pair
    """)


# ── Memory ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_pageable_memory_is_copied_during_the_call_and_registered_memory_later() -> None:
    run("""
        n = 4096
        a, s = cuda.malloc(0, n), cuda.stream_create(0)
        pageable, registered = Host(n), Host(n)
        cuda.host_register(registered.at, n, False)
        late = 0
        for seed in range(30):
            fake.seed(seed)
            value = seed % 7 + 1
            fake.fill(0, s, a, n, value)
            cuda.copy(0, registered.at, a, n, s)
            late += set(text_of(registered.at, n)) != {value}
            cuda.copy(0, pageable.at, a, n, s)
            assert set(text_of(pageable.at, n)) == set(text_of(registered.at, n)) == {value}
        assert late > 20
        cuda.host_unregister(registered.at)
        assert fake.violations() == []
    """)


def test_registration() -> None:
    run("""
        n = mmap.PAGESIZE
        h = Host(2 * n)
        cuda.host_register(h.at, n, False)
        assert raised(cuda.host_register, h.at + n - 8, 16, False).name == "cudaErrorHostMemoryAlreadyRegistered"
        assert raised(cuda.host_unregister, h.at + n).name == "cudaErrorHostMemoryNotRegistered"
        a, s = cuda.malloc(0, 2 * n), cuda.stream_create(0)
        assert raised(cuda.copy, 0, a, h.at, 2 * n, s).name == "cudaErrorInvalidValue"  # partly registered
        file = os.memfd_create("read-only")
        os.truncate(file, n)
        import numpy as np
        readable = mmap.mmap(file, n, prot=mmap.PROT_READ)
        r = np.frombuffer(readable, dtype=np.uint8).ctypes.data
        assert raised(cuda.host_register, r, n, False).name == "cudaErrorInvalidValue"
        fake.set_attribute(113, 0)
        assert raised(cuda.host_register, r, n, True).name == "cudaErrorNotSupported"
        fake.set_attribute(113, 1)
        cuda.host_register(r, n, True)
        cuda.copy(0, a, r, n, s)
        assert raised(cuda.copy, 0, r, a, n, s).name == "cudaErrorInvalidValue"
        assert fake.violations() == ["written to read-only memory"]
        cuda.stream_synchronize(0, s)
        assert text_of(a, n) == bytes(n) and fake.count("registrations") == 2
    """)


def test_memory_that_is_freed_or_never_was_is_refused() -> None:
    run("""
        a, b, s = cuda.malloc(0, 4096), cuda.malloc(0, 4096), cuda.stream_create(0)
        fake.fill(0, s, a, 4096, 1)
        cuda.free(0, a)  # waits for the device
        assert fake.violations() == [] and fake.count("queued") == 0
        for wrong in (a, b + 1, 8, 1 << 60):
            assert raised(cuda.copy, 0, b, wrong, 4096, s).name == "cudaErrorInvalidValue", hex(wrong)
            assert raised(cuda.copy, 0, wrong, b, 4096, s).name == "cudaErrorInvalidValue", hex(wrong)
        for wrong in (a, b + 8, 8):
            assert raised(cuda.free, 0, wrong).name == "cudaErrorInvalidValue"
        assert raised(cuda.ipc_close, 0, b).name == raised(cuda.ipc_export, 0, a).name == "cudaErrorInvalidValue"
        assert cuda.pointer_device(a) is None
        try:
            fake.fill(0, s, id(s), 8, 1)
        except RuntimeError as error:
            assert "got CUDA's error 1" in str(error)
        else:
            raise AssertionError("a kernel wrote to pageable memory")
    """)


def test_a_device_runs_out_of_memory() -> None:
    run(
        """
        a = cuda.malloc(0, 600)
        assert raised(cuda.malloc, 0, 401).name == "cudaErrorMemoryAllocation"
        cuda.malloc(1, 1000)
        fake.limit(0, 2000)
        cuda.malloc(0, 1400)
        assert fake.count("bytes") == 3000 and fake.count("allocations") == 3
        cuda.free(0, a)
        cuda.malloc(0, 600)
        """,
        devices="0,1",
        nbytes=1000,
    )


def test_casts_round_as_they_should() -> None:
    run("""
        import numpy as np
        rng = np.random.default_rng(0)
        bits = np.concatenate([
            rng.integers(0, 1 << 32, 20_000),
            np.arange(0x33000000, 0x38900000, 0x777),
            np.arange(0x477FE000, 0x47800100),
            [0, 1, 0x80000000, 0x7F800000, 0xFF800000, 0x3F808000, 0x3F818000, 0x38800000, 0x387FFFFF, 0x33000001],
        ]).astype(np.uint32)
        numbers = bits.view(np.float32)
        numbers = numbers[~np.isnan(numbers)]
        bits = numbers.view(np.uint32).astype(np.uint64)
        s = cuda.stream_create(0)
        def cast(kind, source, size):
            a, b = cuda.malloc(0, source.nbytes), cuda.malloc(0, len(source) * size)
            ctypes.memmove(a, source.ctypes.data, source.nbytes)
            fake.copy_cast(0, s, b, a, len(source), kind)
            cuda.stream_synchronize(0, s)
            return np.frombuffer(text_of(b, len(source) * size), dtype=f"u{size}")
        with np.errstate(over="ignore"):
            half = numbers.astype(np.float16)
        np.testing.assert_array_equal(cast("float32_to_float16", numbers, 2), half.view(np.uint16))
        brain = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        np.testing.assert_array_equal(cast("float32_to_bfloat16", numbers, 2), brain)
        every = np.arange(1 << 16, dtype=np.uint16)
        wide = cast("float16_to_float32", every, 4).view(np.float32)
        np.testing.assert_array_equal(wide, every.view(np.float16).astype(np.float32))
        np.testing.assert_array_equal(cast("bfloat16_to_float32", every, 4), every.astype(np.uint32) << 16)
        assert (cast("float32_to_bfloat16", np.full(3, np.nan, np.float32), 2) == 0x7FFF).all()
    """)


# ── Between processes ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_memory_of_a_device_is_shared_under_either_index() -> None:
    with Peer(devices="3,1") as owner, Peer(devices="1,3") as reader:
        assert owner("cuda.device_uuid(0)") == reader("cuda.device_uuid(1)") != reader("cuda.device_uuid(0)")
        owner("a = cuda.malloc(0, 5000); s = cuda.stream_create(0)")
        reader(f"o = cuda.ipc_open(1, {owner('cuda.ipc_export(0, a)')})")
        assert reader("cuda.pointer_device(o)") == 1
        owner("fake.fill(0, s, a, 5000, 9); cuda.stream_synchronize(0, s)")
        reader("b = cuda.malloc(1, 5000); s = cuda.stream_create(1); cuda.copy(1, b, o, 5000, s)")
        reader("cuda.stream_synchronize(1, s)")
        assert reader("text_of(b, 5000) == bytes([9]) * 5000")
        assert reader("fake.count('opens')") == 1
        reader("cuda.ipc_close(1, o)")
        owner("cuda.free(0, a)")
        assert owner("fake.violations()") == reader("fake.violations()") == []
        assert reader("fake.count('opens')") == owner("fake.count('allocations')") == 0
        assert reader("raised(cuda.copy, 1, b, o, 8, s).name") == "cudaErrorInvalidValue"


def test_either_process_may_die() -> None:
    with Peer() as owner, Peer() as reader, Peer() as later:
        handle = owner("cuda.ipc_export(0, a := cuda.malloc(0, 100))")
        for process in (reader, later):
            process(f"o = cuda.ipc_open(0, {handle})")
        reader.kill()
        later("cuda.ipc_close(0, o)")
        owner("cuda.free(0, a)")
        assert owner("fake.violations()") == []
        handle = owner("cuda.ipc_export(0, a := cuda.malloc(0, 100))")
        later(f"o = cuda.ipc_open(0, {handle})")
        owner.kill()
        assert later("text_of(o, 100) == b'\\xcc' * 100")
        later("cuda.ipc_close(0, o)")
        assert later(f"raised(cuda.ipc_open, 0, {handle}).name") == "cudaErrorMapBufferObjectFailed"
        assert later("fake.violations()") == []


def test_handles_that_cant_be_opened() -> None:
    with Peer(devices="0,1") as owner, Peer(devices="0") as reader:
        handle = owner("cuda.ipc_export(0, a := cuda.malloc(0, 100))")
        assert owner(f"raised(cuda.ipc_open, 0, {handle}).name") == "cudaErrorInvalidResourceHandle"
        assert reader("raised(cuda.ipc_open, 0, bytes(64)).name") == "cudaErrorInvalidValue"
        owner("cuda.free(0, a); a = cuda.malloc(0, 100)")  # the same file number, the same size, another memory
        assert reader(f"raised(cuda.ipc_open, 0, {handle}).name") == "cudaErrorMapBufferObjectFailed"
        handle = owner("cuda.ipc_export(1, cuda.malloc(1, 100))")
        assert reader(f"raised(cuda.ipc_open, 0, {handle}).name") == "cudaErrorInvalidDevice"
        reader(f"o = cuda.ipc_open(0, {owner('cuda.ipc_export(0, a)')})")
        assert reader("raised(cuda.ipc_export, 0, o).name") == "cudaErrorInvalidValue"
        assert reader("raised(cuda.free, 0, o).name") == "cudaErrorInvalidValue"


def test_faults_from_the_environment() -> None:
    fail = "cudaMalloc:2:2,cudaIpcOpenMemHandle:*:801"
    with Peer() as owner, Peer(fail=fail) as reader:
        handle = owner("cuda.ipc_export(0, cuda.malloc(0, 100))")
        reader("cuda.malloc(0, 8)")
        assert reader("raised(cuda.malloc, 0, 8).name") == "cudaErrorMemoryAllocation"
        reader("cuda.malloc(0, 8)")
        for _ in range(3):
            assert reader(f"raised(cuda.ipc_open, 0, {handle}).name") == "cudaErrorNotSupported"
        reader("fake.fail_never()")
        reader(f"cuda.ipc_open(0, {handle})")


# ── What real CUDA leaves undefined ───────────────────────────────────────────────────────────────────────────────────


def test_opening_twice_is_noticed() -> None:
    with Peer() as owner, Peer() as reader:
        handle = owner("cuda.ipc_export(0, cuda.malloc(0, 100))")
        assert reader(f"cuda.ipc_open(0, {handle}) == cuda.ipc_open(0, {handle})")
        assert reader("fake.violations()") == ["opened twice"]
        assert reader("fake.count('opens')") == 2


def test_freeing_under_a_mapping_is_noticed() -> None:
    with Peer() as owner, Peer() as reader:
        handle = owner("cuda.ipc_export(0, a := cuda.malloc(0, 100))")
        reader(f"o = cuda.ipc_open(0, {handle})")
        owner("cuda.free(0, a)")
        assert owner("fake.violations()") == ["freed under a mapping"]
        assert reader("text_of(o, 100) == b'\\xdd' * 100")
        owner("fake.reset()")
        assert owner("fake.violations()") == []


def test_releasing_memory_with_work_pending_is_noticed() -> None:
    with Peer() as owner, Peer() as reader:
        reader(f"o = cuda.ipc_open(0, {owner('cuda.ipc_export(0, cuda.malloc(0, 5000))')})")
        reader("s, a, h = cuda.stream_create(0), cuda.malloc(0, 5000), Host(8192)")
        reader("cuda.host_register(h.at, 8192, False)")
        for end in ("cuda.ipc_close(0, o)", "cuda.host_unregister(h.at)"):
            at = "o" if "close" in end else "h.at"
            reader(f"[fake.fill(0, s, {at}, 5000, i) for i in range(20)]; {end}")
        assert reader("fake.violations()") == ["released with work pending"] * 2
        assert reader("text_of(h.at, 5000) == bytes([19]) * 5000 and fake.count('queued') == 0")


@pytest.mark.parametrize("version", [12080, 13000])
def test_the_other_form_of_a_batch_is_noticed(version: int) -> None:
    run(
        """
        a, b, s = cuda.malloc(0, 8), cuda.malloc(0, 8), cuda.stream_create(0)
        one = lambda n: ctypes.byref(ctypes.c_uint64(n))
        attributes = (ctypes.c_uint32 * 6)(1)
        failed = ctypes.c_uint64()
        def batch(*end):
            count = ctypes.c_size_t(1)
            return fake.library.cudaMemcpyBatchAsync(one(b), one(a), one(8), count, attributes, one(0), count, *end)
        stream, short_form = ctypes.c_void_p(s), cuda.runtime_version() >= 13000
        right, wrong = ((stream,), (ctypes.byref(failed), stream))[:: 1 if short_form else -1]
        assert batch(*right) == 0 and fake.violations() == []
        assert batch(*wrong) == 1 and fake.violations() == ["batch signature"]
        default = ctypes.c_void_p(0)
        assert batch(*right[:-1], default) == 1
        assert fake.violations() == ["batch signature", "batch on a default stream"]
        """,
        version=version,
    )
