"""The FAQ has an entry for each error, by its name, and shows the texts that there really are."""

from __future__ import annotations

import doctest
import inspect

import pytest

from shmsync import errors
from tests.docs import provoked
from tests.docs.markdown import DOCS, blocks, sections

ENTRIES = sections((DOCS / "faq.md").read_text())
KINDS = sorted(name for name, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, Exception))


@pytest.mark.parametrize("name", KINDS)
def test_an_error_has_an_entry_with_its_own_text(name: str) -> None:
    """Mutants: remove an entry; add a class to errors.py; change a word in the text of an error."""
    assert name in ENTRIES, "docs/faq.md has no such heading"
    check(name, provoked.text_of(name))


@pytest.mark.parametrize("title", provoked.WARNINGS)
def test_a_warning_has_an_entry_with_its_own_text(title: str) -> None:
    check(title, provoked.text_of_warning(title))


@pytest.mark.parametrize("title", provoked.TEXTS)
def test_what_is_no_class_of_its_own_has_an_entry_with_its_own_text(title: str) -> None:
    check(title, provoked.TEXTS[title]())


def check(title: str, said: str) -> None:
    """An entry begins with an example of the text, and goes on with what to do."""
    example, *more = blocks(ENTRIES[title])
    assert (example.language, more) == ("text", [])
    assert doctest.OutputChecker().check_output(example.text, said + "\n", doctest.ELLIPSIS), said
    advice = ENTRIES[title].rpartition("```")[2]
    assert len(advice.split()) > 10, "the entry says too little"


def test_nothing_has_an_entry_that_is_not_provoked_here() -> None:
    """Mutant: rename an error and leave its entry."""
    with_text = {title for title, text in ENTRIES.items() if blocks(text)}
    assert with_text == {*KINDS, *provoked.TEXTS, *provoked.WARNINGS}
