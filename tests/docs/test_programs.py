"""Every program of the documentation runs as a reader would run it, and prints what its page says."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.docs.markdown import DOCS, PAGES
from tests.docs.programs import Page, WrongPage, page, run
from tests.helpers.trainers import wait_for

WITH_PROGRAMS = [path for path in PAGES if page(path.read_text()).steps]


@pytest.mark.timeout(200)  # several steps of a minute at most
@pytest.mark.parametrize("path", WITH_PROGRAMS, ids=lambda path: path.stem)
def test_a_page_runs(path: Path, tmp_path: Path) -> None:
    """Mutants: break a line of a page's program; change a word of its output."""
    run(page(path.read_text()), tmp_path)


def test_every_guide_is_a_program() -> None:
    """Mutant: call a guide's blocks `py`."""
    guides = set((DOCS / "guides").glob("*.md")) - {DOCS / "guides/index.md"}
    assert guides
    assert guides <= set(WITH_PROGRAMS)
    assert all(step.expected for path in guides for step in page(path.read_text()).steps)


# ── The rules themselves ────────────────────────────────────────────────────────────────────────────────────────────


def ran(text: str, folder: Path) -> Page:
    read = page(text)
    run(read, folder)
    return read


def test_blocks_are_one_program_and_files_beside_it(tmp_path: Path) -> None:
    """Mutant: run each block on its own."""
    text = (
        '```python title="beside.py"\nvalue = 3\n```\n```python\nx = 1\n```\n```diff\n-x\n```\n'
        "```python\nimport beside\nprint(x)\nprint(beside.value)\n```\n```text\n1\n3\n```\n"
        "```bash\npython beside.py && echo done\n```\n```text\ndone\n```\n"
    )
    read = ran(text, tmp_path)
    assert list(read.files) == ["beside.py", "program.py"]
    assert [step.expected for step in read.steps] == ["1\n3\n", "done\n"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```python\n1 / 0\n```\n", "ZeroDivisionError"),
        ("```python\nraise SystemExit(3)\n```\n", "ended with 3"),
        ("```python\nprint(1)\n```\n```text\n2\n```\n", "-2\n+1"),
        ("```python\nprint(1)\nprint(2)\n```\n```text\n1\n```\n", "+2"),
        ("```python\n```\n```text\n1\n```\n", "-1"),
        ("```bash\nfalse | true\n```\n", "ended with 1"),
    ],
)
def test_what_fails_or_prints_something_else_is_found(text: str, said: str, tmp_path: Path) -> None:
    """Mutants: don't look at the exit code; compare without the last line."""
    with pytest.raises(AssertionError, match="line 1") as found:
        ran(text, tmp_path)
    assert said in str(found.value)


def test_dots_stand_for_what_varies(tmp_path: Path) -> None:
    ran("```python\nprint('pid 4711 of 2')\n```\n```text\npid ... of 2\n```\n", tmp_path)


def test_a_program_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all that it has started. Mutant: end the process alone, and wait for its output."""
    monkeypatch.setattr("tests.docs.programs.TIMEOUT_SECONDS", 1.0)
    with pytest.raises(AssertionError, match="did not end in time"):
        ran("```bash\nsleep 600 & echo $! >pid; wait\n```\n", tmp_path)
    state = Path(f"/proc/{int((tmp_path / 'pid').read_text())}/stat")

    def ended() -> bool:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return state.read_text().rpartition(")")[2].split()[0] == "Z"
        return True

    wait_for(ended, "the end of what it had started")  # it has been killed, and dies when it is its turn


@pytest.mark.parametrize(
    "text",
    [
        "```py\n```\n",
        '```python title="a.py"\n```\n',
        '```bash\npython a.py\n```\n```python title="a.py"\n```\n```text\n1\n```\n',
        "```bash\ntrue\n```\n```python\n```\n",
    ],
    ids=["language", "idle file", "output of a file", "order"],
)
def test_a_page_that_breaks_the_rules_is_refused(text: str) -> None:
    with pytest.raises(WrongPage):
        page(text)
