"""What tests of the documentation read in Markdown: fenced blocks, headings and links."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
# What somebody reads on its own, and what the site is built of.
TOP = sorted(ROOT.glob("*.md"))
PAGES = sorted(DOCS.rglob("*.md"))

_FENCE = re.compile(r"^```(?P<language>[^\s`]*)(?P<info>[^\n`]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'title="([^"]+)"')
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


class Block(NamedTuple):
    """A fenced block: its language, its title if it has one, its text, and the line where it begins."""

    language: str
    title: str
    text: str
    line: int


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found = []
    for fence in _FENCE.finditer(text):
        title = _TITLE.search(fence["info"])
        line = text.count("\n", 0, fence.start()) + 1
        found.append(Block(fence["language"], title[1] if title else "", fence["text"], line))
    return found


def headings(text: str) -> list[str]:
    """The headings of a page, as they are written."""
    return _HEADING.findall(_FENCE.sub("", text))


def anchors(text: str) -> set[str]:
    """What a link to a heading of the page may say after its #."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings(text)}


def links(text: str) -> list[str]:
    """Where the links and pictures of a page lead."""
    return _LINK.findall(_FENCE.sub("", text))


def sections(text: str) -> dict[str, str]:
    """The text below each heading, up to the next heading."""
    found, heading = {"": ""}, ""
    fences = [fence.span() for fence in _FENCE.finditer(text)]
    position = 0
    for match in _HEADING.finditer(text):
        if any(begin <= match.start() < end for begin, end in fences):
            continue
        found[heading] = text[position : match.start()]
        heading, position = match[1], match.end()
    found[heading] = text[position:]
    return found
