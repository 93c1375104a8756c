"""Imports run one way: a module may import those of the levels below its own, give or take what the tables say.

Mutant: `import shmsync.publisher` anywhere in `slots.py`. The rules themselves are tried on small made-up packages at
the end of this file.
"""

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

# ── The tables ────────────────────────────────────────────────────────────────────────────────────────────────────────
# Modules are named relative to the package: "torchrl.updater" is shmsync/torchrl/updater.py, "torchrl" is
# shmsync/torchrl/__init__.py, "shmsync" is shmsync/__init__.py, "_C" is the extension.

LEVELS: list[set[str]] = [
    {"errors"},
    {"exits", "faults", "forks", "ids", "limits", "weights", "outputs", "gate", "sweep", "guards"},
    {"layout", "wire", "handle"},
    {"slots"},
    {"segment", "pages", "leases", "roster", "bell", "files"},
    {"copying", "device", "checksums", "places", "leftovers", "ringtable", "serving", "tables"},
    {"mapped", "hostring", "devicering", "streams", "gathering", "sources"},
    {"lease", "performer", "verification", "moving", "imports", "rings", "passing", "written", "inheriting", "wishing"},
    {"switching"},
    {"channel"},
    {"publisher", "subscriber"},
    {"targets", "binding", "listener"},
    {"remote", "survey", "doctor"},
    {"torchrl.base", "torchrl.report", "torchrl.releases", "torchrl.rollout", "torchrl.stamps", "torchrl.answers"}
    | {"torchrl.install", "torchrl.together", "torchrl.fallback"},
    {"torchrl.collector", "torchrl.receiver", "torchrl.staleness", "torchrl.silence"},
    {"torchrl.messenger", "torchrl.injection"},
    {"torchrl.updater", "torchrl.scheme", "torchrl.schemes"},
    {"torchrl", "running"},
    {"cli"},
    {"shmsync", "__main__"},
]

# Imports within one level.
BESIDE: dict[str, set[str]] = {
    "wire": {"layout"},
    "handle": {"wire"},
    "tables": {"copying"},
    "pages": {"segment"},
    "roster": {"segment", "leases"},
    "bell": {"segment"},
    "files": {"segment"},
    "binding": {"targets"},
    "torchrl.install": {"torchrl.releases"},
    "torchrl.receiver": {"torchrl.collector"},
    "torchrl.scheme": {"torchrl.updater"},
    "torchrl.schemes": {"torchrl.updater", "torchrl.scheme"},
}

# All that these may import, whatever their level.
ONLY: dict[str, set[str]] = {
    "gate": {"errors"},
    "targets": {"errors", "weights", "outputs", "layout", "copying", "device", "tables"},
    "__main__": {"cli"},
}

# Imports against the direction, each with its reason: inside a function or for type checkers, never when the module is
# loaded.
DEFERRED: dict[str, set[str]] = {
    "lease": {"subscriber"},  # a lease knows its subscriber, for type checkers only
    "performer": {"subscriber"},  # the same
    "verification": {"subscriber"},  # the same
    "moving": {"subscriber"},  # the same
    "switching": {"subscriber"},  # the same
    "wishing": {"subscriber"},  # the same
    "written": {"subscriber"},  # the same
    "inheriting": {"subscriber", "binding"},  # the same
    "rings": {"channel"},  # the channel that they are of, for type checkers only
    "subscriber": {"binding"},  # Subscriber.bind() makes a binding, which knows its subscriber
    "torchrl.collector": {"torchrl.receiver"},  # attachment() looks whether receivers have been injected
    "torchrl.install": {"shmsync"},  # the classes that it puts in, some of which need torchrl
}

EXTENSION = "_C"
MAY_IMPORT_EXTENSION = {"checksums", "copying", "device", "shmsync"}

# Rows of the tables whose module is still to be written.
PLANNED: set[str] = set()


def allowed_imports() -> dict[str, set[str]]:
    """The table that the tables above spell out: module → the modules that it may import."""
    allowed: dict[str, set[str]] = {}
    below: set[str] = set()
    for level in LEVELS:
        for module in level:
            allowed[module] = set(ONLY.get(module, below | BESIDE.get(module, set())))
            if module in MAY_IMPORT_EXTENSION:
                allowed[module].add(EXTENSION)
        below |= level
    return allowed


# ── Reading a package ─────────────────────────────────────────────────────────────────────────────────────────────────


def modules_of(package: Path) -> dict[str, Path]:
    """Module name, relative to the package → file."""
    modules = {}
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        modules[".".join(parts) or package.name] = file
    return modules


def absolute(node: ast.ImportFrom, file: Path, package: Path) -> str:
    """The dotted name that `from … import` starts from, with its dots resolved."""
    if node.level == 0:
        return node.module or ""
    here = file.relative_to(package.parent).parent.parts
    base = here[: len(here) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


def imported_by_call(node: ast.Call) -> str | None:
    """The name in `import_module("name")` or `__import__("name")`, if it is a constant."""
    name = getattr(node.func, "attr", getattr(node.func, "id", None))
    first = node.args[0] if node.args else None
    if name in ("import_module", "__import__") and isinstance(first, ast.Constant) and isinstance(first.value, str):
        return first.value
    return None


def is_deferred(node: ast.AST) -> bool:
    """Whether what stands in `node` is not run when its module is loaded."""
    type_checking = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    return type_checking or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))


def nodes_below(node: ast.AST, deferred: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(node):
        child_deferred = deferred or is_deferred(child)
        yield child, child_deferred
        yield from nodes_below(child, child_deferred)


class Import(NamedTuple):
    line: int
    name: str  # `from a import b` is "a.b"
    deferred: bool


def imports_in(file: Path, package: Path) -> Iterator[Import]:
    """Every import, wherever in the file it stands."""
    for node, deferred in nodes_below(ast.parse(file.read_text(encoding="utf-8"), str(file))):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name, deferred) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node, file, package)
            yield from (Import(node.lineno, f"{base}.{alias.name}", deferred) for alias in node.names)
        elif isinstance(node, ast.Call) and (name := imported_by_call(node)):
            yield Import(node.lineno, name, deferred)


def module_in(name: str, package: str, known: set[str]) -> str | None:
    """Which module of the package a dotted name stands for; None if it is not of this package.

    `shmsync.errors.ShmSyncError` is "errors"; a name that is defined in `shmsync/__init__.py` is "shmsync".
    """
    if name.split(".")[0] != package:
        return None
    parts = name.split(".")[1:]
    while parts and ".".join(parts) not in known:
        parts = parts[:-1]
    return ".".join(parts) or package


# ── The rules ─────────────────────────────────────────────────────────────────────────────────────────────────────────


Table = Mapping[str, set[str]]


def forbidden_imports(package: Path, allowed: Table, allowed_deferred: Table) -> list[str]:
    modules = modules_of(package)
    known = {*modules, EXTENSION}
    found = {}  # a dict, for its order: one `from` may name a module several times
    for module, file in modules.items():
        permitted, later = allowed.get(module, set()), allowed_deferred.get(module, set())
        for line, name, deferred in imports_in(file, package):
            target = module_in(name, package.name, known)
            if target not in {None, module, *permitted, *(later if deferred else ())}:
                found[f"{file.relative_to(package.parent)}:{line}: {module} may not import {target}"] = None
    return list(found)


def wrong_rows(package: Path, allowed: Table, planned: set[str]) -> list[str]:
    written, rows = set(modules_of(package)), set(allowed)
    kinds = {
        "not in the tables": written - rows,
        "in the tables, but neither written nor PLANNED": rows - written - planned,
        "PLANNED, but written already": planned & written,
        "PLANNED, but not in the tables": planned - rows,
    }
    return [f"{module}: {wrong}" for wrong, modules in kinds.items() for module in sorted(modules)]


def torchrl_imports(package: Path) -> list[str]:
    """Imports of torchrl outside of the subpackage that is for it."""
    return [
        f"{file.relative_to(package.parent)}:{line}: {module} may not import torchrl"
        for module, file in modules_of(package).items()
        if module.split(".")[0] != "torchrl"
        for line, name, _ in imports_in(file, package)
        if name.split(".")[0] == "torchrl"
    ]


# ── shmsync ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def shmsync_package() -> Path:
    spec = importlib.util.find_spec("shmsync")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def test_imports_run_one_way(shmsync_package: Path) -> None:
    assert forbidden_imports(shmsync_package, allowed_imports(), DEFERRED) == []


def test_every_module_has_its_row(shmsync_package: Path) -> None:
    assert wrong_rows(shmsync_package, allowed_imports(), PLANNED) == []


def test_tables_name_no_module_twice_or_in_vain() -> None:
    rows = [module for level in LEVELS for module in level]
    assert len(rows) == len(set(rows))
    for table in (BESIDE, ONLY, DEFERRED, {module: set() for module in MAY_IMPORT_EXTENSION}):
        assert set().union(table, *table.values()) <= set(rows)
    for module, beside in BESIDE.items():
        assert any({module} | beside <= level for level in LEVELS), f"{module} and {beside} are not on one level"


def test_only_its_own_subpackage_imports_torchrl(shmsync_package: Path) -> None:
    assert torchrl_imports(shmsync_package) == []


def test_importing_is_silent_and_leaves_torchrl_alone(shmsync_package: Path) -> None:
    code = "import sys, shmsync; sys.exit('torchrl was imported' if 'torchrl' in sys.modules else 0)"
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=shmsync_package.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


# ── The checker ───────────────────────────────────────────────────────────────────────────────────────────────────────

TOY_ALLOWED: dict[str, set[str]] = {
    "toy": {"low", "high"},
    "low": set(),
    "high": {"low"},
    "sub": {"low"},
    "sub.leaf": {"low", "_C"},
}
TOY_FILES = {
    "toy": "__init__.py",
    "low": "low.py",
    "high": "high.py",
    "sub": "sub/__init__.py",
    "sub.leaf": "sub/leaf.py",
}


def toy(tmp_path: Path, sources: dict[str, str]) -> Path:
    """Write a package of the modules in TOY_FILES, empty but for the given sources."""
    package = tmp_path / "toy"
    (package / "sub").mkdir(parents=True)
    for module, file in TOY_FILES.items():
        (package / file).write_text(sources.get(module, ""), encoding="utf-8")
    return package


@pytest.mark.parametrize(
    "sources",
    [
        {"toy": "from toy import low\nfrom .high import f"},
        {"high": "import os\nimport toy.low\nfrom . import low\nfrom .low import f"},
        {"sub.leaf": "from ..low import f\nfrom toy._C import copy\nimport torch"},
        {"low": "import tomllib, toyota.high\nfrom toyota import high"},
    ],
)
def test_checker_passes_what_is_allowed(tmp_path: Path, sources: dict[str, str]) -> None:
    assert forbidden_imports(toy(tmp_path, sources), TOY_ALLOWED, {}) == []


@pytest.mark.parametrize(
    ("module", "source", "target"),
    [
        ("low", "import toy.high", "high"),
        ("low", "import toy.high as h", "high"),
        ("low", "from toy import high", "high"),
        ("low", "from toy.high import f", "high"),
        ("low", "from . import high", "high"),
        ("low", "from .high import f, g", "high"),
        ("low", "def f():\n    from .high import g", "high"),
        ("low", "if TYPE_CHECKING:\n    from .high import g", "high"),
        ("low", "import importlib\nimportlib.import_module('toy.high')", "high"),
        ("low", "from .sub import leaf", "sub.leaf"),
        ("low", "from .sub import f", "sub"),
        ("low", "from toy import f", "toy"),
        ("low", "import toy", "toy"),
        ("low", "from ._C import copy", "_C"),
        ("sub.leaf", "from ..high import f", "high"),
        ("sub.leaf", "from .. import high", "high"),
        ("sub.leaf", "from . import f", "sub"),
        ("sub", "from .leaf import f", "sub.leaf"),
    ],
)
def test_checker_finds_what_is_forbidden(tmp_path: Path, module: str, source: str, target: str) -> None:
    (found,) = forbidden_imports(toy(tmp_path, {module: source}), TOY_ALLOWED, {})
    assert found.endswith(f": {module} may not import {target}")


@pytest.mark.parametrize(
    ("source", "fine"),
    [
        ("def f():\n    if g():\n        from .high import h", True),
        ("if TYPE_CHECKING:\n    from .high import f", True),
        ("from .high import f", False),
        ("try:\n    from .high import f\nexcept ImportError:\n    pass", False),
        ("class C:\n    from .high import f", False),
        ("def f():\n    from .sub import g", False),
    ],
)
def test_checker_lets_a_deferred_import_only_be_deferred(tmp_path: Path, source: str, fine: bool) -> None:
    found = forbidden_imports(toy(tmp_path, {"low": source}), TOY_ALLOWED, {"low": {"high"}})
    assert (found == []) is fine


def test_checker_finds_wrong_rows(tmp_path: Path) -> None:
    package = toy(tmp_path, {})
    assert wrong_rows(package, TOY_ALLOWED | {"later": set()}, planned={"later"}) == []
    assert wrong_rows(package, TOY_ALLOWED | {"later": set()}, planned=set()) == [
        "later: in the tables, but neither written nor PLANNED"
    ]
    assert wrong_rows(package, {k: v for k, v in TOY_ALLOWED.items() if k != "low"}, planned=set()) == [
        "low: not in the tables"
    ]
    assert wrong_rows(package, TOY_ALLOWED, planned={"low"}) == ["low: PLANNED, but written already"]
    assert wrong_rows(package, TOY_ALLOWED, planned={"x"}) == ["x: PLANNED, but not in the tables"]


@pytest.mark.parametrize("source", ["import torchrl", "from torchrl.envs import GymEnv", "__import__('torchrl')"])
def test_checker_finds_torchrl(tmp_path: Path, source: str) -> None:
    (found,) = torchrl_imports(toy(tmp_path, {"low": source}))
    assert found.endswith(": low may not import torchrl")
    assert torchrl_imports(toy(tmp_path / "fine", {"low": "from .torchrl import updater\nimport torch"})) == []
