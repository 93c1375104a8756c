"""Links within the repository lead somewhere. `make docs` checks those of the site once more, as the site has them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import shmsync
from shmsync import cli
from tests.docs.markdown import PAGES, ROOT, TOP, anchors, links


def broken(path: Path) -> list[str]:
    """The relative links of a page whose file, or whose heading in that file, is not there."""
    wrong = []
    for link in links(path.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        found = target.exists() and target.resolve().is_relative_to(ROOT)
        if not found or (anchor and anchor not in anchors(target.read_text())):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("path", [*TOP, *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    """Mutants: rename a file that a page links to; rename a heading."""
    assert broken(path) == []


def test_what_is_broken_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants: don't look at headings; take one in a code block for a heading."""
    monkeypatch.setattr("tests.docs.test_links.ROOT", tmp_path)
    (tmp_path / "other.md").write_text("## A Heading, `code`\n```bash\n# comment\n```\n")
    path = tmp_path / "page.md"
    path.write_text(
        "# Here\n[1](other.md) [2](other.md#a-heading-code) [3](#here) ![4](https://example.org/x) `[5](x)`\n"
        "[no](none.md) [no](other.md#comment) [no](other.md#a-heading) [no](#there) [no](../../../etc/passwd)\n"
    )
    assert broken(path) == ["x", "none.md", "other.md#comment", "other.md#a-heading", "#there", "../../../etc/passwd"]


def commands(text: str) -> set[str]:
    """The subcommands of `python -m shmsync` that a page names."""
    return set(re.findall(r"python -m shmsync ([a-z]+)", text))


@pytest.mark.parametrize("path", [*TOP, *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_and_names_that_pages_mention_exist(path: Path) -> None:
    """Mutants: name a subcommand, or `shmsync.Something`, that there is not."""
    text = path.read_text()
    (known,) = [action.choices for action in cli._parser()._actions if action.choices]
    assert commands(text) <= set(known)
    names = set(re.findall(r"(?<![\w/.])shmsync\.([A-Za-z_]\w*)", text))
    assert [name for name in sorted(names) if not hasattr(shmsync, name)] == []


def test_readme_leads_to_the_documentation() -> None:
    linked = links((ROOT / "README.md").read_text())
    wanted = {"docs/which-one.md", "docs/guides/index.md", "docs/versions-and-lag.md", "docs/faq.md"}
    assert wanted <= set(linked)


def test_the_tests_that_stand_for_torchrls_are_there() -> None:
    """Mutant: rename one of them."""
    rows = [line.split("|") for line in (ROOT / "docs/torchrls-tests.md").read_text().splitlines() if "|" in line]
    named = {name for cells in rows for name in re.findall(r"`(test_\w+)`", cells[-2])}
    defined = "\n".join(path.read_text() for path in (ROOT / "tests/torchrl").glob("test_*.py"))
    assert len(named) > 10
    assert [name for name in sorted(named) if f"def {name}(" not in defined] == []
