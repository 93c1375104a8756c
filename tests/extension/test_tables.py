"""same_tables: every change of a table, and of what is in it, is noticed; nothing of the objects' is run."""

import sys
from array import array
from collections import OrderedDict
from types import SimpleNamespace

import pytest

_C = pytest.importorskip("shmsync._C")

NAMES = ("odd", "even")


def owner() -> SimpleNamespace:
    return SimpleNamespace(odd={"one": [1], "three": [3]}, even={"two": [2]})


class Look:
    """What two objects were like."""

    def __init__(self, count: int = 2) -> None:
        self.owners = [owner() for _ in range(count)]
        self.tables = tuple(vars(one)[name] for one in self.owners for name in NAMES)
        self.counts = array("Q", map(len, self.tables))
        self.keys = tuple(key for table in self.tables for key in table)
        self.values = tuple(value for table in self.tables for value in table.values())

    def same(self, **other) -> bool:
        args = {"first": self.owners[0], "rest": tuple(self.owners[1:]), "names": NAMES, **vars(self), **other}
        del args["owners"]
        return _C.same_tables(**args)


@pytest.fixture
def look() -> Look:
    return Look()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_what_has_not_changed(count) -> None:
    assert Look(count).same()


def test_no_names_and_no_entries(look) -> None:
    nothing = {"tables": (), "counts": array("Q"), "keys": (), "values": ()}
    assert look.same(names=(), **nothing)
    assert not look.same(names=(), **{**nothing, "keys": ("one",), "values": ([1],)})


CHANGES = {
    "added": lambda one: one.odd.update(five=[5]),
    "taken away": lambda one: one.odd.pop("three"),
    "replaced by an equal one": lambda one: one.odd.update(one=[1]),
    "renamed": lambda one: one.even.update(four=one.even.pop("two")),
    "in another order": lambda one: one.odd.update(one=one.odd.pop("one")),
    "another table": lambda one: setattr(one, "odd", dict(one.odd)),
    "no table": lambda one: delattr(one, "odd"),
    "something else": lambda one: setattr(one, "odd", None),
    "moved to the next table": lambda one: one.even.update(
        OrderedDict([("three", one.odd.pop("three")), ("two", one.even.pop("two"))])
    ),
}


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed(look, name, which) -> None:
    """Mutants: don't compare keys; nor values; nor tables; nor counts; look at the first object only."""
    CHANGES[name](look.owners[which])
    assert not look.same()


def test_a_key_may_be_equal_text(look) -> None:
    """A name that was deleted and set again is another string perhaps. Mutant: compare keys by identity only."""
    look.keys = tuple("".join(list(key)) for key in look.keys)
    assert look.same()


def test_no_code_of_a_key_is_run(look) -> None:
    """Mutant: compare keys as Python does."""

    class Key(str):
        def __eq__(self, other):
            raise AssertionError("was run")

        __hash__ = str.__hash__

    look.keys = (Key("one"), *look.keys[1:])
    assert not look.same()


def test_an_attribute_of_the_class_is_no_table(look) -> None:
    """Mutant: take any attribute."""
    kind = type("Kind", (), {"odd": look.owners[0].odd})
    look.owners[0] = kind()
    look.owners[0].even = look.tables[1]
    assert not look.same()


def test_tables_of_other_kinds_of_dict(look) -> None:
    one = look.owners[0]
    one.odd = OrderedDict(one.odd)
    look.tables = (one.odd, *look.tables[1:])
    assert look.same()
    one.odd["one"] = [1]
    assert not look.same()


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"tables": ({},)}, "4 tables"),
        ({"counts": array("Q", [1])}, "4 tables"),
        ({"values": ()}, "as many values"),
        ({"counts": array("d", [1.0] * 4)}, "uint64"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(look, other, text) -> None:
    with pytest.raises(ValueError, match=text):
        look.same(**other)


def test_an_object_without_attributes_is_refused(look) -> None:
    with pytest.raises(AttributeError):
        look.same(first=3)


def test_it_takes_no_references(look) -> None:
    """Mutant: let the attributes' reference go to nobody."""
    things = [vars(look.owners[1]), *look.tables, *look.values]
    before = [sys.getrefcount(thing) for thing in things]
    for _ in range(100):
        assert look.same()
    assert [sys.getrefcount(thing) for thing in things] == before
