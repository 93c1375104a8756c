"""The Markdown of made-up results: verdicts, ratios, and where we lose."""

import pytest

from bench import lose, requirements
from bench.report import markdown
from bench.requirements import FAILS, HOLDS, UNKNOWN
from bench.results import Key, Results

EIGHT = Key("push", "leaves200", 8, "shmsync", "push")


def results(ours: float, theirs: float, extension: bool = False) -> Results:
    """105 MB to 8 workers in milliseconds, three rounds alike."""
    made = Results({"has_extension": extension})
    for _ in range(3):
        made.add(EIGHT, "s", ours / 1e3)
        made.add(EIGHT._replace(rival="torchrl-updater"), "s", theirs / 1e3)
        made.add(EIGHT._replace(rival="roofline", metric="torch"), "s", 0.010)
    return made


def verdict(made: Results, text: str, limit: str) -> str:
    [found] = [r for r in requirements.check(made) if text in r.text and limit in r.limit]
    return found.verdict


@pytest.mark.parametrize(("theirs", "expected"), [(120, HOLDS), (119, FAILS)])
def test_twelve_times_faster_is_enough(theirs: float, expected: str) -> None:
    """Mutant: the ratio upside down; > for >=."""
    assert verdict(results(10, theirs), "105 MB to 8 workers", "at least 12 x") == expected


def test_what_was_not_measured_says_so() -> None:
    assert verdict(results(10, 200), "4 MB to 2 workers", "at least 4 x") == UNKNOWN


def test_the_engine_is_judged_only_where_it_is_there() -> None:
    """Mutant: `_engine` always."""
    with_it, without = (requirements.check(results(10, 150, extension)) for extension in (True, False))
    assert any("at least 20 x" in r.limit for r in with_it)
    assert not any("at least 20 x" in r.limit for r in without)
    assert verdict(results(10, 150, True), "105 MB to 8 workers", "20 x faster than torchrl-updater") == FAILS


@pytest.mark.parametrize(
    ("seconds", "expected"), [((10, 11, 11.4), HOLDS), ((10, 12, 11), FAILS), ((12, 10, 10), FAILS)]
)
def test_a_publish_is_independent_of_its_subscribers_within_15_percent(
    seconds: tuple[float, ...], expected: str
) -> None:
    """Also when fewer subscribers are slower: that would be noise, and no proof. Mutant: compare with one only."""
    made = Results()
    for count, value in zip((1, 8, 32), seconds, strict=True):
        made.add(Key("subscribers", "leaves200", count, "shmsync", "publish"), "s", value)
    assert verdict(made, "plain subscribers", "15 %") == expected


@pytest.mark.parametrize(("nbytes", "expected"), [((400, 800), HOLDS), ((400, 1600), FAILS), ((1200, 1200), FAILS)])
def test_a_notification_is_small_and_of_one_size(nbytes: tuple[int, int], expected: str) -> None:
    """Bytes of two messages each, then four. Mutant: bytes per push instead of per message."""
    made = Results()
    for workload, sent, messages in (("cartpole", nbytes[0], 2), ("leaves200", nbytes[1], 4)):
        key = Key("push", workload, messages, "shmsync", "message bytes, workers silent")
        made.add(key, "B", sent)
        made.add(key._replace(metric="messages, workers silent"), "1", messages)
    assert verdict(made, "notification", "512") == expected


def test_one_mixed_forward_is_too_many() -> None:
    """Mutant: judge by the median."""
    made = Results({"has_extension": True})
    for share in (0.0, 0.0, 1e-6):
        made.add(EIGHT._replace(metric="mixed forwards"), "1", share)
        made.add(EIGHT._replace(metric="mixed forwards", rival="gloo"), "1", 0.05)
    [found] = [r for r in requirements.check(made) if "forwards that saw two versions" in r.text]
    assert found.verdict == FAILS
    assert "gloo 5.0 %" in found.measured


@pytest.mark.parametrize("metric", ["mixed steps", "wrong stamps"])
def test_one_wrong_step_is_too_many(metric: str) -> None:
    """Mutants: judge by the median; look at one of the two; judge torchrl's."""
    made = Results()
    for share in (0.0, 0.0, 1e-6):
        made.add(Key("steps", "RPC scheme", 2, "shmsync", metric), "1", share)
        made.add(Key("steps", "RPC scheme", 2, "torchrl-rpc-scheme", metric), "1", 0.05)
    [found] = [r for r in requirements.check(made) if "steps of collectors" in r.text]
    assert (found.verdict, "torchrl's worst: 5 %" in found.measured) == (FAILS, True)


def test_a_rival_that_is_ahead_is_named() -> None:
    """Mutant: the paragraph names ties only."""
    said = " ".join(lose.paragraphs(results(ours=30, theirs=20)))
    assert "ahead" in said
    assert "torchrl RPCWeightUpdater 20 ms, shmsync 30 ms" in said
    assert "In no comparison" in " ".join(lose.paragraphs(results(ours=20, theirs=30)))


def test_those_who_confirm_are_not_compared_with_those_who_dont() -> None:
    """Mutant: one field for all."""
    made = results(ours=20, theirs=30)
    made.add(EIGHT._replace(rival="lock"), "s", 0.001)
    assert "lock" not in " ".join(lose.paragraphs(made))
    made.add(EIGHT._replace(rival="shmsync-memory"), "s", 0.010)
    assert "shared module under a lock 1 ms, shmsync, notify=memory 10 ms" in " ".join(lose.paragraphs(made))


def test_overlapping_quartiles_are_a_tie() -> None:
    made = Results()
    for ours, theirs in ((10, 9), (12, 13), (14, 15)):
        made.add(EIGHT, "s", ours)
        made.add(EIGHT._replace(rival="gloo"), "s", theirs)
    assert "No difference resolved" in " ".join(lose.paragraphs(made))


def test_the_document_has_the_ratio_to_the_roofline_and_a_warning_on_a_busy_machine() -> None:
    made = results(ours=25, theirs=300)
    made.about["machine"] = {"load_at_start": 3.0}
    text = markdown(made, ["latest-push.png"])
    assert "| shmsync | 25 ms, 2.5 x |" in text
    assert "30.0 x" in text
    assert "not idle" in text
    assert "![latest-push.png](latest-push.png)" in text
    assert "## Must hold" in text
    assert "## Where we lose" in text
    made.about["machine"] = {"load_at_start": 0.1}
    assert "not idle" not in markdown(made)
