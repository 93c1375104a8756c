"""The error tree: what each error is besides, and that all of them survive a pickle (an RPC, a queue)."""

import inspect
import pickle

import pytest

from shmsync import errors

ALSO = {
    errors.LayoutError: ValueError,
    errors.ChannelError: RuntimeError,
    errors.LimitError: RuntimeError,
    errors.SlotsExhausted: TimeoutError,
    errors.OutOfSharedMemory: MemoryError,
    errors.BindingError: RuntimeError,
    errors.NothingPublished: RuntimeError,
    errors.WaitTimeout: TimeoutError,
    errors.WorkerIdError: ValueError,
    errors.LagExceeded: RuntimeError,
    errors.LagTimeout: TimeoutError,
    errors.PushError: RuntimeError,
    errors.PushTimeout: TimeoutError,
}

INSTANCES = [
    errors.UnsupportedLeaf({"a.b": "sparse", "c": "lazy"}),
    errors.LayoutMismatch("text", unexpected=["x"], missing=["y"], differing={"z": "expected (3,), got (1,)"}),
    errors.TiedLeavesDiffer("`a` and `b`"),
    errors.PushError(3, {1: ValueError("broken")}),
    errors.PushTimeout(4, {0: TimeoutError("late"), 2: RuntimeError("dead")}),
    errors.SlotsExhausted("who"),
    errors.OutOfSharedMemory("how much"),
    errors.PublisherGone("pid"),
    errors.WaitTimeout("version"),
]


@pytest.mark.parametrize(("kind", "base"), ALSO.items(), ids=lambda kind: kind.__name__)
def test_an_error_is_the_builtin_that_callers_catch(kind, base) -> None:
    assert issubclass(kind, base)


def test_every_error_is_a_shmsync_error_and_in_the_drawing() -> None:
    kinds = [k for _, k in inspect.getmembers(errors, inspect.isclass) if issubclass(k, Exception)]
    for kind in kinds:
        assert issubclass(kind, errors.ShmSyncError)
        assert kind.__name__ in errors.__doc__


@pytest.mark.parametrize("error", INSTANCES, ids=lambda error: type(error).__name__)
def test_an_error_survives_a_pickle(error) -> None:
    """Mutant: leave out `__reduce__` (the first argument is not the text)."""
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    for name, value in vars(error).items():
        assert repr(getattr(copy, name)) == repr(value)


def test_a_long_list_of_keys_is_cut_and_counted() -> None:
    text = str(errors.LayoutMismatch("text", missing=[f"key{n}" for n in range(1000)]))
    assert "`key0`" in text
    assert "`key999`" not in text
    assert "and 980 more" in text


def test_a_push_error_names_workers_and_how_to_retry() -> None:
    text = str(errors.PushError(7, {2: ValueError("broken"), 0: KeyError("k")}))
    for part in ("7", "worker 0", "KeyError", "worker 2", "broken", "worker_ids=[0, 2]"):
        assert part in text


def test_a_push_error_offers_no_retry_for_who_is_only_behind() -> None:
    """To push again would put it further behind. Mutant: name all in the retry."""
    text = str(errors.PushError(7, {2: ValueError("broken"), 0: errors.LagExceeded("pid 5 uses version 3")}))
    assert "worker_ids=[2]" in text
    assert "pid 5" in text
    text = str(errors.PushError(7, {0: errors.LagExceeded("pid 5 uses version 3")}))
    assert "worker_ids" not in text
