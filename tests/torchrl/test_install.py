"""torchrl's names made to mean shmsync's classes: `install()`, `uninstall()` and `python -m shmsync run`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shmsync import survey
from tests.helpers.collectors import free_port
from tests.helpers.trainers import ROOT

STOCK = Path(__file__).with_name("programs") / "stock.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        cwd=cwd,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def said(program: str) -> str:
    """What a program prints; it has to end well."""
    done = run("-c", program)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


# ── Programs ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_program_of_torchrls_trains_through_shmsync(tmp_path: Path) -> None:
    """Not a word of it knows shmsync; a look from outside finds its channel, both workers on it and versions that rise.
    Mutant: replace the name in the module that defines it alone."""
    with (tmp_path / "output").open("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "shmsync", "run", str(STOCK), "6", free_port()],
            cwd=tmp_path,
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        seen: list[tuple[int, int]] = []
        try:
            begin = time.monotonic()
            while process.poll() is None and time.monotonic() < begin + 90:
                seen += channels_of(process.pid)
                time.sleep(0.01)
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        text = output.read()
    assert process.returncode == 0, text
    assert text == "batch 40 <class 'shmsync.torchrl.updater.RPCWeightUpdater'>\n" * 6
    assert {workers for version, workers in seen if version} >= {2}
    assert len({version for version, _ in seen}) > 1


def channels_of(pid: int) -> list[tuple[int, int]]:
    """Version and number of subscribers of each channel of a process."""
    try:
        found = [survey.look(handle, time.time()) for handle in survey.handles(pid)]
    except Exception:  # it comes, or it ends
        return []
    return [(one.version, len(one.subscribers)) for one in found]


def script(folder: Path, text: str, name: str = "program.py") -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def test_a_program_knows_where_it_is_when_it_goes_elsewhere(tmp_path: Path) -> None:
    """As Python's: the name as it was given, the file absolute. Mutant: run the path as it was given."""
    text = "import os, sys; os.chdir('/'); print(sys.argv[0], __file__, sys.modules['__main__'].__file__)"
    path = script(tmp_path, text)
    name = os.path.relpath(path)
    said = run("-m", "shmsync", "run", name).stdout
    assert said == run(name).stdout
    assert (said.split()[0], Path(said.split()[1]).resolve()) == (name, path)


def test_a_program_is_compiled_as_it_is(tmp_path: Path) -> None:
    """Mutant: let it have the `__future__` imports of who compiles it."""
    path = script(tmp_path, "def f(x: int) -> None: pass\nprint(f.__annotations__['x'] is int)")
    assert run("-m", "shmsync", "run", str(path)).stdout == "True\n"


def test_a_program_may_come_through_a_pipe(tmp_path: Path) -> None:
    """Which can be read once. Mutant: read it twice."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = subprocess.Popen(["sh", "-c", 'echo "print(__name__, 6 * 7)" > "$0"', str(pipe)])
    done = run("-m", "shmsync", "run", str(pipe))
    writer.wait()
    assert (done.stdout, done.stderr) == ("__main__ 42\n", "")


@pytest.mark.parametrize("command", ["doctor", "run"])
def test_a_folder_that_hides_the_package_is_an_error(tmp_path: Path, command: str) -> None:
    """Such as a clone of the repository seen from beside it: Python takes it for the package, which has no file then,
    and nothing would be replaced. Mutant: go on."""
    program = f"""
import runpy, sys, shmsync
shmsync.__file__, shmsync.__path__ = None, [{str(tmp_path)!r}, *shmsync.__path__]
sys.argv[1:] = {[command, *([str(script(tmp_path, "print(1)"))] if command == "run" else [])]}
runpy.run_module("shmsync", run_name="__main__")
"""
    done = run("-c", program)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"shmsync: {tmp_path} hides the installed package")


def test_a_class_of_the_programs_own_says_what_it_needs(tmp_path: Path) -> None:
    """Processes import the program anew, without `run`. Mutant: let it come as torchrl's class with the wrong state."""
    program = script(tmp_path, OWN_SCHEME)
    said = run("-m", "shmsync", "run", str(program)).stdout
    assert said.startswith("ShmSyncError __mp_main__.Own is derived from torchrl's scheme in this process, pid ")
    assert run(
        "-m", "shmsync", "run", str(script(tmp_path, f"import shmsync; shmsync.install()\n{OWN_SCHEME}"))
    ).stdout == ("Own shmsync.torchrl.schemes\n")


OWN_SCHEME = """
import multiprocessing, pickle
from torchrl.weight_update import SharedMemWeightSyncScheme

class Own(SharedMemWeightSyncScheme):
    pass

def arrive(text, pipe):
    try:
        arrived = pickle.loads(text)
        pipe.send((type(arrived).__name__, type(arrived).__mro__[1].__module__))
    except Exception as error:
        pipe.send((type(error).__name__, str(error)))

if __name__ == "__main__":
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=arrive, args=(pickle.dumps(Own()), there))
    child.start()
    print(*here.recv())
    child.join()
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no -P")
@pytest.mark.parametrize("name", ["folder/__main__.py", "program.py"])
def test_no_entry_of_the_path_is_lost_with_a_safe_path(tmp_path: Path, name: str) -> None:
    """Python's -P puts no current folder there that could be replaced. Mutant: replace the first all the same."""
    path = script(tmp_path, "import sys; print(sys.path)", name)
    program = str(path.parent if name.startswith("folder") else path)
    assert run("-P", "-m", "shmsync", "run", program).stdout == run("-P", program).stdout


def test_a_program_finds_itself_as_if_python_had_started_it(tmp_path: Path) -> None:
    """Its arguments, options of ours among them, its name, its folder first on the path, and its exit code. Mutant:
    let argparse have the arguments."""
    script(tmp_path, "value = 3", "beside.py")
    path = script(
        tmp_path,
        "import sys, beside, pickle\ndef f(): pass\npickle.loads(pickle.dumps(f))\n"
        "print(__name__, __file__, sys.argv, beside.value)\nsys.exit(7)",
    )
    done = run("-m", "shmsync", "run", str(path), "--json", "-m", "run")
    assert done.stdout == f"__main__ {path} ['{path}', '--json', '-m', 'run'] 3\n"
    assert (done.returncode, done.stderr) == (7, "")


@pytest.mark.parametrize("named", [["-m", "package.program"], ["-mpackage.program"]], ids=" ".join)
def test_a_module_finds_itself_as_if_python_had_started_it(tmp_path: Path, named: list[str]) -> None:
    """As `python -m` would. Mutants: leave sys.argv[0] alone; want a blank."""
    script(tmp_path, "", "package/__init__.py")
    path = script(tmp_path, "import sys; print(__spec__.name, sys.argv[0], sys.argv[1:])", "package/program.py")
    done = run("-m", "shmsync", "run", *named, "-h", cwd=tmp_path)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", f"package.program {path} ['-h']\n")


SAVES_ITSELF = """
import atexit, multiprocessing, pickle
class Sample:
    pass
def save():
    print(len(pickle.dumps(Sample())) > 0, __name__)
atexit.register(save)
"""
SENDS_ITSELF = f"""{SAVES_ITSELF}
def work(pipe):
    pipe.send(Sample())
if __name__ == "__main__":
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=work, args=(there,))
    child.start()
    print(type(here.recv()) is Sample)
    child.join()
else:
    atexit.unregister(save)
"""


@pytest.mark.parametrize("how", ["file", "without an ending", "module", "folder"])
def test_a_program_stays_what_it_is_to_the_very_end(tmp_path: Path, how: str) -> None:
    """For its children, and for what it saves at its exit. Mutants: forget multiprocessing's name for it; take it away
    when its last line has run."""
    name = {"without an ending": "program", "folder": "folder/__main__.py"}.get(how, "program.py")
    # Children of a folder's program don't find it, under Python itself either.
    path = script(tmp_path, SAVES_ITSELF if how == "folder" else SENDS_ITSELF, name)
    arguments = {"module": ["-m", "program"], "folder": [str(path.parent)]}.get(how, [str(path)])
    done = run("-m", "shmsync", "run", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == ("" if how == "folder" else "True\n") + "True __main__\n"


def test_an_error_looks_as_if_python_had_started_the_program(tmp_path: Path) -> None:
    """Also one of shmsync's own, which the command line would tell in one line. Mutant: leave the frames above in."""
    path = script(tmp_path, "import shmsync\ndef f():\n    raise shmsync.ShmSyncError('text')\nf()\n")
    ours, pythons = run("-m", "shmsync", "run", str(path)), run(str(path))
    assert "ShmSyncError: text" in ours.stderr
    assert (ours.returncode, ours.stderr, ours.stdout) == (pythons.returncode, pythons.stderr, pythons.stdout)


@pytest.mark.parametrize(
    "arguments",
    [["/nowhere/program.py"], [], ["-m"], ["-u", "program.py"]],
    ids=["missing", "none", "no module", "option"],
)
def test_no_program_is_one_line_and_exit_2(arguments: list[str]) -> None:
    """Mutant: take `-m` for a program."""
    done = run("-m", "shmsync", "run", *arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert all(argument in done.stderr for argument in arguments[:1])
    assert ("own options go before" in done.stderr) == (arguments[:1] == ["-u"])


# ── Names ───────────────────────────────────────────────────────────────────────────────────────────────────────────

NAMES = """
import shmsync, sys
from pkgutil import resolve_name
def updaters():
    found = [resolve_name(f"torchrl.collectors.distributed{rpc}:RPCWeightUpdater") for rpc in ("", ".rpc")]
    assert len(set(found)) == 1
    return found[0]
"""


@pytest.mark.parametrize("before", [True, False], ids=["torchrl first", "install first"])
def test_torchrls_name_means_ours_until_uninstall(before: bool) -> None:
    """Twice installed is once installed; afterwards there is what was there. Mutants: remember the second time what
    the first has put there; don't wait for torchrl's import."""
    program = f"""{NAMES}
if {before}: import torchrl.collectors.distributed
shmsync.install(); shmsync.install()
assert ("torchrl" in sys.modules) is {before}
from torchrl.collectors.distributed import RPCWeightUpdater
assert RPCWeightUpdater is updaters() is shmsync.RPCWeightUpdater
finders = list(sys.meta_path)
shmsync.uninstall(); shmsync.uninstall()
theirs = updaters()
assert theirs.__module__ == "torchrl.collectors.distributed.rpc"
assert isinstance(shmsync.RPCWeightUpdater(), theirs)
shmsync.install()
assert updaters() is shmsync.RPCWeightUpdater
shmsync.uninstall()
assert updaters() is theirs and sys.meta_path == finders
import torchrl
assert "Replacing" not in repr(torchrl.__spec__.loader)
"""
    assert said(program) == ""


def test_uninstalled_before_torchrl_came_nothing_is_replaced() -> None:
    """Mutant: leave the finder there."""
    program = f"""{NAMES}
finders = list(sys.meta_path)
shmsync.install(); shmsync.uninstall()
assert sys.meta_path == finders
assert updaters().__module__ == "torchrl.collectors.distributed.rpc"
"""
    assert said(program) == ""


def test_a_look_for_torchrl_does_not_use_install_up() -> None:
    """And shmsync's updater may be the first to import it. Mutant: take the finder away when it is asked."""
    program = f"""{NAMES}
from importlib.util import find_spec
shmsync.install()
assert find_spec("torchrl") and find_spec("torchrl").loader.get_filename("torchrl").endswith("__init__.py")
assert "torchrl" not in sys.modules
ours = shmsync.RPCWeightUpdater
assert updaters() is ours
shmsync.uninstall()
assert issubclass(ours, updaters()) and updaters() is not ours
"""
    assert said(program) == ""


def test_a_program_may_still_choose_what_torchrl_chooses_otherwise() -> None:
    """How multiprocessing starts processes. Mutant: import torchrl in install()."""
    program = "import shmsync, multiprocessing as mp; shmsync.install(); mp.set_start_method('fork')"
    assert said(program) == ""


def test_what_somebody_else_has_put_there_stays() -> None:
    """Mutant: put torchrl's back whatever is there."""
    program = f"""{NAMES}
import torchrl.collectors.distributed as d
shmsync.install()
d.RPCWeightUpdater = d.rpc.RPCWeightUpdater = None
shmsync.uninstall()
assert updaters() is None
"""
    assert said(program) == ""


def test_schemes_are_replaced_where_shmsync_has_them() -> None:
    """By module, by the name of the backend, and where Multi*Collectors take theirs; an entry that was not there goes
    again. Mutant: set None back where there was nothing."""
    program = f"""{NAMES}
from torchrl.weight_update import weight_sync_schemes as table
from torchrl import weight_update as w
from torchrl.collectors import _multi_base
class Ours(w.WeightSyncScheme): create_transport = None
def found(): return [dict(table._WEIGHT_SYNC_SCHEMES), w.RPCWeightSyncScheme, w._rpc.RPCWeightSyncScheme,
    w.SharedMemWeightSyncScheme, w._shared.SharedMemWeightSyncScheme, _multi_base.SharedMemWeightSyncScheme]
table._WEIGHT_SYNC_SCHEMES.pop("shared")  # as in a release that does not have it
before, names = found(), ("RPCWeightSyncScheme", "SharedMemWeightSyncScheme")
for name in names: setattr(shmsync, name, type(name, (Ours,), {{}}))
shmsync.install()
rpc, shared = (getattr(shmsync, name) for name in names)
assert found()[1:] == [rpc, rpc, shared, shared, shared]
assert type(w.WeightSyncScheme.from_backend("rpc")) is rpc
assert isinstance(rpc(), before[1])
shmsync.uninstall()
assert found() == before
"""
    assert said(program) == ""


def test_without_torchrl_it_says_so(tmp_path: Path) -> None:
    """Mutant: let the ModuleNotFoundError out."""
    hidden = "import sys; sys.modules['torchrl'] = None; "
    program = hidden + "import shmsync\ntry: shmsync.install()\nexcept shmsync.ShmSyncError as e: print(e)"
    assert "torchrl is not installed" in said(program)
    assert said(hidden + "import shmsync; shmsync.uninstall()") == ""
    done = run("-c", hidden + "from shmsync.cli import main; sys.exit(main(['run', '/dev/null']))")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
