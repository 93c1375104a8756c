"""A hashable picture of a suspended generator: two with the same picture go on in the same way.

A generator can't be copied, but CPython shows all it has: the next instruction, the locals, and through the garbage
collector also what lies on its stack (iterators in the middle of a loop, values on their way out of a `finally`).
"""

from __future__ import annotations

import dataclasses
import gc
import inspect
import types
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

_ATOMS = (int, float, str, bytes, bool, range, type(None))
_ITERATORS = (type(iter([])), type(iter(())), type(iter(range(0))), type(iter(range(1 << 70))))
# Part of the program, the same in every run of it.
_CODE = (
    *(type, types.ModuleType, types.CodeType, types.FunctionType, types.MethodType),
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType),
)


def freeze(value: Any, opaque: Mapping[int, str]) -> Hashable:
    """The picture of a value. `opaque`: objects by id that are kept elsewhere, and the names that stand for them.

    Raises TypeError for what it does not know, rather than take two states for one.
    """
    if isinstance(value, _ATOMS):
        return value
    if id(value) in opaque:
        return opaque[id(value)]
    if isinstance(value, types.GeneratorType):
        return _generator(value, opaque)
    return _collection(value, opaque)


def _collection(value: Any, opaque: Mapping[int, str]) -> Hashable:
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *(freeze(item, opaque) for item in value))
    if isinstance(value, (set, frozenset)):
        return ("set", *sorted(freeze(item, opaque) for item in value))
    if isinstance(value, dict):
        return ("dict", *sorted((freeze(k, opaque), freeze(v, opaque)) for k, v in value.items()))
    if isinstance(value, (np.ndarray, np.generic)):
        return ("array", freeze(value.tolist(), opaque))
    if isinstance(value, _ITERATORS):
        return ("iterator", *(freeze(part, opaque) for part in value.__reduce__()[1:]))
    return _object(value, opaque)


def _object(value: Any, opaque: Mapping[int, str]) -> Hashable:
    if isinstance(value, _CODE):
        return getattr(value, "__qualname__", getattr(value, "__name__", "code"))
    if isinstance(value, types.CellType):
        return ("cell", *(freeze(part, opaque) for part in gc.get_referents(value)))
    if isinstance(value, slice):
        return ("slice", value.start, value.stop, value.step)
    if isinstance(value, BaseException):
        return ("error", type(value).__name__, str(value))
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return (type(value).__name__, *(freeze(getattr(value, field.name), opaque) for field in fields))
    raise TypeError(f"Expected a value that has a picture, got a {type(value).__qualname__}")


def _generator(steps: types.GeneratorType, opaque: Mapping[int, str]) -> Hashable:
    name = steps.gi_code.co_qualname if hasattr(steps.gi_code, "co_qualname") else steps.gi_code.co_name
    if inspect.getgeneratorstate(steps) == inspect.GEN_CLOSED:
        return (name, "closed")
    frame = steps.gi_frame
    parts = gc.get_referents(steps) + gc.get_referents(frame)
    program = {id(frame), id(frame.f_globals), id(frame.f_builtins), id(steps.gi_code)}
    return (name, frame.f_lasti, *(freeze(part, opaque) for part in parts if id(part) not in program))
