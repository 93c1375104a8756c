"""From whatever a user calls weights to a flat table of named tensors.

Key paths are dotted, whatever the nesting: `{"a": {"b": t}}`, `TensorDict` with `("a", "b")` and a flat
state dict with `"a.b"` are the same weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase, is_tensor_collection
from torch import Tensor, nn

from .errors import LayoutError, UnsupportedLeaf

MAX_RANK = 8

# The codes are part of the wire format: never renumber, only append.
_DTYPE_NAMES = (
    *("float32", "float64", "float16", "bfloat16", "complex32", "complex64", "complex128"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
DTYPES: dict[int, torch.dtype] = {
    code: getattr(torch, name) for code, name in enumerate(_DTYPE_NAMES, start=1) if hasattr(torch, name)
}
DTYPE_CODES: dict[torch.dtype, int] = {dtype: code for code, dtype in DTYPES.items()}

_PLAIN = tuple(getattr(nn, name, nn.Parameter) for name in ("Parameter", "Buffer")) + (Tensor,)

# torch.compile wraps a module in an OptimizedModule, which adds this to every name.
_COMPILED = "_orig_mod."

# Of a state dict, and of the weights that torchrl extracts.
_EXTRA_STATE = ("_extra_state", "__extra_state__")


class Named(NamedTuple):
    """One tensor of a user's weights. `optional`: a module's non-persistent buffer, which may be absent."""

    key: str
    tensor: Tensor
    optional: bool = False


class Place(NamedTuple):
    """Where a module keeps one tensor: `table[name]` is a parameter or a buffer of `owner`."""

    key: str
    table: Any
    name: str
    is_buffer: bool
    optional: bool
    owner: nn.Module


def places(module: nn.Module, prefix: str = "") -> Iterator[Place]:
    """All parameters and buffers of a module, tied ones under each of their names.

    Contract: copies nothing; the tables are the module's own.
    """
    for path, owner in module.named_modules(prefix=prefix, remove_duplicate=False):
        dotted = f"{path}." if path else ""
        for is_buffer, table in ((False, owner._parameters), (True, owner._buffers)):
            for name, value in table.items():
                if value is not None:
                    optional = is_buffer and name in owner._non_persistent_buffers_set
                    yield Place(f"{dotted}{name}".replace(_COMPILED, ""), table, name, is_buffer, optional, owner)


def flatten(weights: Any) -> dict[str, Named]:
    """The flat table of a module, TensorDict, state dict, or dict of these.

    What a state dict or torchrl keeps as extra state are no tensors to share, and are passed over.
    Raises LayoutError for another type, a key that is no string, or a key path that occurs twice.
    Contract: copies nothing; reads no values.
    """
    table: dict[str, Named] = {}
    for named in _walk(weights, ""):
        if named.key in table:
            raise LayoutError(f"Expected each key path once, got `{named.key}` twice")
        table[named.key] = named
    return table


def _walk(value: Any, path: str) -> Iterator[Named]:
    # TensorDictParams is a module too, and its entries are reached better as a TensorDict's.
    if isinstance(value, Tensor) and path:
        yield Named(path.replace(_COMPILED, ""), value)
    elif isinstance(value, TensorDictBase) or is_tensor_collection(value):
        yield from _walk_items(value, path)
    elif isinstance(value, nn.Module):
        _check_packed(value, path)
        for place in places(value, path):
            yield Named(place.key, place.table[place.name], place.optional)
    elif isinstance(value, Mapping):
        yield from _walk_items(value, path)
    else:
        where = f" - at `{path}`" if path else ""
        raise LayoutError(
            "Expected weights as an nn.Module, a TensorDict, a state dict, or a dict of these, "
            f"got {type(value).__module__}.{type(value).__qualname__}{where}"
        )


def _check_packed(module: nn.Module, path: str) -> None:
    """A quantized layer has no parameters: without this, nothing of it would be shared, in silence."""
    packed = [
        name
        for name, part in module.named_modules(prefix=path)
        if isinstance(vars(part).get("_packed_params"), torch.ScriptObject)
    ]
    if packed:
        why = "a quantized layer, whose weights are packed out of reach; publish the module before quantizing"
        raise UnsupportedLeaf(dict.fromkeys(packed, why))


def _walk_items(value: Any, path: str) -> Iterator[Named]:
    for key, item in value.items():
        name = ".".join(key) if isinstance(key, tuple) else key
        if not isinstance(name, str):
            raise LayoutError(f"Expected key paths of strings, got {key!r} - at `{path}`")
        if name.rpartition(".")[2] in _EXTRA_STATE:
            continue
        yield from _walk(item, f"{path}.{name}" if path else name)


def check_leaves(table: Mapping[str, Named]) -> None:
    """Raise UnsupportedLeaf, naming every leaf that cannot live in shared memory and why."""
    reasons = {key: why for key, named in table.items() if (why := unsupported(named.tensor))}
    if reasons:
        raise UnsupportedLeaf(reasons)


def unsupported(tensor: Tensor) -> str | None:
    """Why a tensor cannot be shared, or None if it can."""
    # The usual case first, this runs for every leaf of every publish.
    plain = type(tensor) in _PLAIN and tensor.layout is torch.strided and tensor.dtype in DTYPE_CODES
    if plain and not (tensor.is_meta or tensor.is_quantized or tensor.is_nested or tensor.ndim > MAX_RANK):
        return None
    only = "only plain dense tensors can be shared"
    faults = (
        (is_lazy(tensor), "a lazy parameter without a shape; run one forward first"),
        (tensor.is_meta, "on the meta device, it has no values"),
        (tensor.is_quantized, f"quantized ({tensor.dtype}), {only}; publish the dequantized weights"),
        (tensor.is_nested, f"a nested tensor, {only}"),
        (tensor.layout != torch.strided, f"sparse or opaque layout {tensor.layout}, {only}; use .to_dense()"),
        (_wraps(tensor), f"a {type(tensor).__name__}, {only}; publish its local or full tensor"),
        (tensor.dtype not in DTYPE_CODES, f"dtype {tensor.dtype} is not supported"),
    )
    found = next((reason for is_fault, reason in faults if is_fault), None)
    if found is None and tensor.ndim > MAX_RANK:
        return f"{tensor.ndim} dimensions, at most {MAX_RANK} are supported"
    return found


def is_lazy(tensor: Tensor) -> bool:
    """Whether a module has not given this parameter or buffer its shape yet."""
    return torch.nn.parameter.is_lazy(tensor)


def _wraps(tensor: Tensor) -> bool:
    """Whether a subclass computes its values (DTensor, fake tensors) instead of holding them."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def identity(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for two tensors exactly if they are the same elements of the same memory (tied)."""
    if tensor.numel() == 0:
        return ("empty", id(tensor))
    lazy = (tensor.is_conj(), tensor.is_neg())
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, lazy)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits (NaN equal to itself, -0.0 different from 0.0)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if identity(a) == identity(b) or a.numel() == 0:
        return True
    return bool(torch.equal(_bytes(a), _bytes(b).to(a.device)))


def _bytes(tensor: Tensor) -> Tensor:
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A tensor of one element counts as contiguous whatever its stride, but only stride 1 can be viewed as bytes.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
