"""`bench compare`: ratios to the roofline of the same file, and a red exit only beyond the spread."""

from pathlib import Path

import pytest

from bench.__main__ import main
from bench.compare import BETTER, GONE, NEW, SAME, WORSE, Change, compare
from bench.results import Key, Results

PUSH = Key("push", "mlp4", 2, "shmsync", "push")
ROOF = PUSH._replace(rival="roofline", metric="torch")
# Eleven rounds with a spread of some percent.
NOISE = [1.0, 0.97, 1.04, 1.01, 0.99, 1.03, 0.96, 1.02, 0.98, 1.05, 0.95]


def results(push: float = 4.0, roof: float = 1.0, quick: bool = False) -> Results:
    """A run in which a push took `push` milliseconds and the roofline `roof`, more or less."""
    made = Results({"quick": quick})
    for noise in NOISE:
        made.add(PUSH, "s", 1e-3 * push * noise)
        made.add(ROOF, "s", 1e-3 * roof * noise)
    return made


def verdict(changes: list[Change], key: Key = PUSH) -> str:
    return next(change.verdict for change in changes if change.series.key == key)


def exit_code(tmp_path: Path, old: Results, new: Results) -> int:
    old.save(tmp_path / "old.json")
    new.save(tmp_path / "new.json")
    return main(["compare", str(tmp_path / "old.json"), str(tmp_path / "new.json")])


def test_a_slower_push_is_a_regression(tmp_path: Path) -> None:
    """Mutant: the two sides of `>` in _verdict swapped."""
    assert verdict(compare(results(push=4.0), results(push=6.0))) == WORSE
    assert exit_code(tmp_path, results(push=4.0), results(push=6.0)) == 1


def test_a_faster_push_is_better(tmp_path: Path) -> None:
    assert verdict(compare(results(push=6.0), results(push=4.0))) == BETTER
    assert exit_code(tmp_path, results(push=6.0), results(push=4.0)) == 0


def test_a_machine_half_as_fast_is_no_regression(tmp_path: Path) -> None:
    """Mutant: compare seconds instead of ratios."""
    old, new = results(push=4.0, roof=1.0), results(push=8.0, roof=2.0)
    assert verdict(compare(old, new)) == SAME
    assert exit_code(tmp_path, old, new) == 0


def test_a_slower_push_on_a_faster_machine_is_a_regression() -> None:
    """Mutant: compare seconds instead of ratios."""
    assert verdict(compare(results(push=4.0, roof=1.0), results(push=4.0, roof=0.5))) == WORSE


def test_overlapping_quartiles_resolve_no_difference() -> None:
    """Mutant: leave out `overlaps`, so that the medians decide alone."""
    old, new = Results(), Results()
    for step in range(11):
        old.add(PUSH, "s", 4.0 + 0.4 * step)
        new.add(PUSH, "s", 5.0 + 0.4 * step)
        for made in (old, new):
            made.add(ROOF, "s", 1.0)
    assert verdict(compare(old, new)) == SAME


def test_a_small_difference_is_none_however_narrow_the_spread() -> None:
    """Mutant: TOLERANCE = 0."""
    old, new = Results(), Results()
    for made, seconds in ((old, 4.0), (new, 4.1)):
        for _ in range(9):
            made.add(PUSH, "s", seconds)
            made.add(ROOF, "s", 1.0)
    assert verdict(compare(old, new)) == SAME


def test_what_slows_a_whole_round_down_cancels_out() -> None:
    """Half of the rounds ran at a third of the speed. Mutant: divide by the roofline's median instead of its round."""
    old, new = Results(), Results()
    for made, push in ((old, 4.0), (new, 6.0)):
        for round_number in range(12):
            slow = 3.0 if round_number % 2 else 1.0
            made.add(PUSH, "s", push * slow)
            made.add(ROOF, "s", 1.0 * slow)
    assert verdict(compare(old, new)) == WORSE


def test_the_fastest_plain_copy_is_the_roofline() -> None:
    """Mutant: the first one found."""
    old, new = results(push=4.0, roof=2.0), results(push=4.0, roof=2.0)
    for made, seconds in ((old, 1e-3), (new, 0.5e-3)):
        for _ in NOISE:
            made.add(ROOF._replace(metric="streaming memmove"), "s", seconds)
    assert verdict(compare(old, new)) == WORSE


def test_too_few_rounds_say_nothing_about_a_time() -> None:
    """Mutant: leave out `too_few`."""
    old, new = Results(), Results()
    for made, push in ((old, 4.0), (new, 9.0)):
        for _ in range(3):
            made.add(PUSH, "s", push)
            made.add(ROOF, "s", 1.0)
    assert verdict(compare(old, new)) == SAME


def test_rivals_may_become_slower() -> None:
    """Mutant: compare all series."""
    old, new = results(), results()
    theirs = PUSH._replace(rival="torchrl-updater")
    for made, seconds in ((old, 1.0), (new, 9.0)):
        for _ in NOISE:
            made.add(theirs, "s", seconds)
    assert all(change.series.rival != "torchrl-updater" for change in compare(old, new))


def test_one_mixed_forward_is_a_regression() -> None:
    """Shares are compared as they are. Mutant: a tolerance for shares."""
    mixed = PUSH._replace(metric="mixed forwards")
    old, new = results(), results()
    old.add(mixed, "1", 0.0)
    new.add(mixed, "1", 0.0001)
    assert verdict(compare(old, new), mixed) == WORSE


def test_frames_per_second_are_better_when_there_are_more_of_them() -> None:
    """Their reference is torchrl's updater. Mutant: less is better for every unit."""
    rate = Key("collector", "-", 2, "shmsync", "frames per second")
    old, new = Results(), Results()
    for made, frames in ((old, 1000.0), (new, 1500.0)):
        for noise in NOISE:
            made.add(rate, "1/s", frames * noise)
            made.add(rate._replace(rival="torchrl-updater"), "1/s", 800.0 * noise)
    assert verdict(compare(old, new), rate) == BETTER
    assert verdict(compare(new, old), rate) == WORSE


@pytest.mark.parametrize(
    ("metric", "more", "expected"), [("message bytes", 100, WORSE), ("trainer private", 100, SAME)]
)
def test_bytes_of_messages_are_exact_and_memory_is_not(metric: str, more: int, expected: str) -> None:
    """Mutant: the slack for memory given to messages too."""
    key = PUSH._replace(metric=metric)
    old, new = results(), results()
    old.add(key, "B", 300)
    new.add(key, "B", 300 + more)
    assert verdict(compare(old, new), key) == expected


@pytest.mark.parametrize(("quick", "code"), [(False, 1), (True, 0)])
def test_what_is_no_longer_measured_counts_between_runs_of_one_kind(tmp_path: Path, quick: bool, code: int) -> None:
    """A quick run measures less than a full one. Mutant: pass over what is gone."""
    busy = PUSH._replace(metric="first new forward")
    old, new = results(), results(quick=quick)
    for noise in NOISE:
        old.add(busy, "s", noise)
    assert verdict(compare(old, new), busy) == GONE
    assert exit_code(tmp_path, old, new) == code


def test_what_is_new_is_named_and_harmless(tmp_path: Path) -> None:
    busy = PUSH._replace(metric="first new forward")
    new = results()
    for noise in NOISE:
        new.add(busy, "s", noise)
    assert verdict(compare(results(), new), busy) == NEW
    assert exit_code(tmp_path, results(), new) == 0


def test_the_report_says_where_no_difference_was_resolved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exit_code(tmp_path, results(push=4.0), results(push=6.0))
    said = capsys.readouterr().out
    assert "push mlp4 x2 shmsync: push" in said
    assert "4x (4 - 4) -> 6x (6 - 6)" in said
    exit_code(tmp_path, results(), results())
    assert "1 no difference resolved" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["{}", "[]", "no JSON", '{"format": 99}'])
def test_another_file_is_refused_by_name(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Mutant: catch KeyError only."""
    results().save(tmp_path / "good.json")
    (tmp_path / "bad.json").write_text(text)
    assert main(["compare", str(tmp_path / "good.json"), str(tmp_path / "bad.json")]) == 2
    assert "bad.json" in capsys.readouterr().err


def test_results_survive_their_file(tmp_path: Path) -> None:
    made = results()
    made.notes.append("ray: not installed")
    made.save(tmp_path / "results.json")
    read = Results.load(tmp_path / "results.json")
    assert [(s.key, s.unit, s.samples) for s in read] == [(s.key, s.unit, s.samples) for s in made]
    assert (read.about, read.notes, read.failures) == (made.about, made.notes, made.failures)
