"""The structure of items and steps: Reverb's messages to Python nests and back, and checks of columns.

    messages.StructuredValue            Python
    ------------------------            ------
    not set                             None: the table has no signature
    tensor_spec_value                   ArraySpec
    bounded_tensor_spec_value           ArraySpec; bounds are ignored, because Reverb does not check them
    list_value, tuple_value             list, tuple
    dict_value                          dict, sorted by key, which is the order of dm-tree's leaves
    named_tuple_value                   a named tuple class of this name with these fields, or `Trajectory`
    none_value                          None
    anything else                       None for the whole signature, and a warning in the log

The leaves of a nest, in dm-tree's order, are the columns of an item. A table with an unreadable signature is treated
as a table without one: its items are flat tuples of columns.

A spec is a nest of `ArraySpec` of one step, in the form of a signature but without the time dimension. The last tensor
of every chunk, uint8 [1, bytes], is a mark followed by the encoded spec, which may be empty. One of two marks says that
the tensor before it, uint8 [rows], has the kinds of the rows. No item refers to these tensors. Pure: no I/O.

Source: Reverb 0.14 (`signature.cc`), TensorFlow 2.15 (`struct.proto`, `nested_structure_coder.py`).
"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import tree
from google.protobuf.message import DecodeError

from reverb_writer import nests
from reverb_writer.errors import FormatError, ReverbWriterError, StructureError, UnsafeDataError
from reverb_writer.nests import named_leaves
from reverb_writer.protocol import tensors
from reverb_writer.protocol.messages import StructuredValue
from reverb_writer.steps import named_tuple

_LOG = logging.getLogger(__package__)

MAX_DEPTH: Final = 31
"""Deepest nest that is encoded: readers of protobuf refuse 100 levels, and a dict takes three."""

_MARK, _MARK_WITH_KINDS = b"\0rw-spec1", b"\0rw-spec2"
_MAX_BYTES = 1 << 16
"""Largest size of a spec, enough for some thousand leaves."""
_FLAT = "Learners will get these items as flat tuples of columns"


@dataclass(frozen=True)
class ArraySpec:
    """Dtype, shape and name of an array.

    >>> ArraySpec((None, 3), np.float32, "reward")
    ArraySpec(shape=(None, 3), dtype=dtype('float32'), name='reward')

    Attributes:
        shape: sizes, with None for an unknown size. None instead of a tuple if the number of dimensions is unknown.
        dtype: anything that `numpy.dtype` accepts; stored as a `numpy.dtype`. Strings are object.
        name: shown in messages only; may be empty.
    """

    shape: tuple[int | None, ...] | None
    dtype: np.dtype[Any]
    name: str = ""

    def __post_init__(self) -> None:
        if self.shape is not None:
            sizes = tuple(None if size is None else operator.index(size) for size in self.shape)
            object.__setattr__(self, "shape", sizes)
        object.__setattr__(self, "dtype", np.dtype(self.dtype))


def decode(value: Any) -> Any:
    """Return the nest of `ArraySpec` of a `messages.StructuredValue`, which may be from an untrusted writer.

    Return None if the value is not set or cannot be read; the log names the unreadable part. In a process, named tuples
    with the same name and fields have one class.
    """
    try:
        return _decode(value, ()) if value.ByteSize() else None
    except FormatError as error:
        _warn_once(f"{error} Items of the table are read as flat tuples of columns.")
        return None


@functools.lru_cache(maxsize=256)
def _warn_once(text: str) -> None:
    # Once, because each ServerInfo decodes signatures, and a waiting writer requests it repeatedly.
    _LOG.warning("%s", text)


def _decode(value: Any, path: tuple[object, ...]) -> Any:
    kind = value.WhichOneof("kind")
    if kind == "none_value":
        return None
    if kind in ("tensor_spec_value", "bounded_tensor_spec_value"):
        return _decode_leaf(getattr(value, kind), path)
    if kind == "list_value":
        return [_decode(element, (*path, index)) for index, element in enumerate(value.list_value.values)]
    if kind == "tuple_value":
        return tuple(_decode(element, (*path, index)) for index, element in enumerate(value.tuple_value.values))
    if kind == "dict_value":
        pairs = {pair.key: _decode(pair.value, (*path, pair.key)) for pair in value.dict_value.fields}
        return dict(sorted(pairs.items()))
    if kind == "named_tuple_value":
        pairs = value.named_tuple_value.values
        row = named_tuple(value.named_tuple_value.name, tuple(pair.key for pair in pairs))
        return row(*(_decode(pair.value, (*path, pair.key)) for pair in pairs))
    raise FormatError(f"signature{_at(path)}: expected a tensor spec, list, tuple, dict, named tuple or None.")


def _decode_leaf(spec: Any, path: tuple[object, ...]) -> ArraySpec:
    try:
        dtype = tensors.dtype_of(spec.dtype)
    except ReverbWriterError as error:
        raise FormatError(f"signature{_at(path)}: {error}") from error
    sizes = [dim.size for dim in spec.shape.dim]
    if min(sizes, default=0) < -1:
        raise FormatError(f"signature{_at(path)}: shape {sizes}, expected sizes >= 0, or -1 for an unknown one.")
    shape = None if spec.shape.unknown_rank else tuple(None if size == -1 else size for size in sizes)
    return ArraySpec(shape, dtype, spec.name)


def encode(nest: Any) -> Any:
    """Return the `messages.StructuredValue` that dm-reverb reads as the same nest of `tf.TensorSpec`.

    Raises StructureError if Reverb cannot store the nest or a dtype.

    >>> decode(encode({"reward": ArraySpec((None,), np.float32)}))
    {'reward': ArraySpec(shape=(None,), dtype=dtype('float32'), name='')}
    """
    value = StructuredValue()
    _encode(nest, value, ())
    return value


def _encode(nest: Any, value: Any, path: tuple[object, ...]) -> None:
    if len(path) > MAX_DEPTH:
        raise StructureError(f"signature nested more than {MAX_DEPTH} deep. Make it flatter.")
    if isinstance(nest, ArraySpec):
        _encode_leaf(nest, value.tensor_spec_value, path)
    elif nest is None:
        value.none_value.SetInParent()
    elif isinstance(nest, Mapping):
        value.dict_value.SetInParent()
        for key in _sorted_keys(nest, path):
            _encode(nest[key], value.dict_value.fields.add(key=key).value, (*path, key))
    elif isinstance(nest, tuple) and hasattr(nest, "_fields"):
        value.named_tuple_value.name = type(nest).__name__
        for key, element in zip(nest._fields, nest, strict=True):
            _encode(element, value.named_tuple_value.values.add(key=key).value, (*path, key))
    elif isinstance(nest, (list, tuple)):
        sequence = value.list_value if isinstance(nest, list) else value.tuple_value
        sequence.SetInParent()
        for index, element in enumerate(nest):
            _encode(element, sequence.values.add(), (*path, index))
    else:
        raise StructureError(
            f"signature{_at(path)}: {type(nest).__name__}, expected ArraySpec, list, tuple, dict, named tuple or None."
        )


def _encode_leaf(spec: ArraySpec, proto: Any, path: tuple[object, ...]) -> None:
    try:
        proto.dtype = tensors.dtype_number(spec.dtype)
    except StructureError as error:
        raise StructureError(f"signature{_at(path)}: {error}") from error
    proto.name = spec.name
    proto.shape.unknown_rank = spec.shape is None
    for size in spec.shape or ():
        proto.shape.dim.add(size=-1 if size is None else size)


def _sorted_keys(nest: Mapping[Any, Any], path: tuple[object, ...]) -> list[str]:
    for key in nest:
        if not isinstance(key, str):
            raise StructureError(f"signature{_at(path)}: key {key!r} of type {type(key).__name__}, expected str.")
    return sorted(nest)


def _at(path: tuple[object, ...]) -> str:
    return f", leaf `{'/'.join(map(str, path))}`" if path else ""


# ------------------------------------------------------------------------------------------------ specs of steps


def encode_spec(nest: Any) -> bytes:
    """Return the bytes of a spec."""
    encoded: bytes = encode(nest).SerializeToString(deterministic=True)
    return encoded


def decode_spec(data: bytes) -> Any:
    """Return the nest of `ArraySpec` of encoded bytes; None if they cannot be read."""
    try:
        return decode(StructuredValue.FromString(data))
    except DecodeError:
        return None


def spec_tensor(nest: Any, *, with_kinds: bool = False) -> bytes:
    """Return the encoded last tensor of a chunk, for `item_encoding.encode_chunk`.

    If Reverb cannot describe the nest, or the spec is larger than 64 KiB, a warning is logged, and the spec is left
    out: the tensor has only the mark, or it is empty without kinds.
    """
    spec = b""
    try:
        spec = encode_spec(nest)
        if len(spec) > _MAX_BYTES - len(_MARK):
            _warn_once(f"{_FLAT}: a spec of {len(spec)} bytes, expected at most {_MAX_BYTES - len(_MARK)}.")
            spec = b""
    except StructureError as error:
        _warn_once(f"{_FLAT}: {error}")
    if not (spec or with_kinds):
        return b""
    array = np.frombuffer((_MARK_WITH_KINDS if with_kinds else _MARK) + spec, np.uint8)[None]
    header, encode_content = tensors.encoder(array.dtype, array.shape)
    compressed = bytes(encode_content(array))
    return b"".join((header, tensors.varint(len(compressed)), compressed))


class StoredSpec(NamedTuple):
    """The content of a chunk's last tensor."""

    spec: bytes  # encoded; empty if it was left out
    has_kinds: bool  # whether the tensor before it has the kinds of the rows


NO_SPEC: Final = StoredSpec(b"", has_kinds=False)


@functools.lru_cache(maxsize=256)
def read_spec(dtype: int, encoded_shape: bytes, content: bytes) -> StoredSpec:
    """Return the content of a chunk's last tensor; `NO_SPEC` if the tensor is no spec or cannot be read."""
    if len(content) > _MAX_BYTES:
        return NO_SPEC
    try:
        header = tensors.parse_header(dtype, encoded_shape)
        if header.dtype != np.uint8 or len(header.shape) != 2 or header.shape[0] != 1:  # noqa: PLR2004
            return NO_SPEC
        tensor = tensors.EncodedTensor(header, content)
        tensor.check(_MAX_BYTES)
        array = np.empty(header.shape, np.uint8)
        tensor.decode_into(array)
    except (FormatError, UnsafeDataError):
        return NO_SPEC
    data = array.tobytes()
    mark, spec = data[: len(_MARK)], data[len(_MARK) :]
    if mark not in (_MARK, _MARK_WITH_KINDS):
        return NO_SPEC
    return StoredSpec(spec if decode_spec(spec) is not None else b"", mark == _MARK_WITH_KINDS)


def spec_text(spec: Any) -> str:
    """Return a text of the leaves of a spec with dtypes and shapes.

    >>> spec_text({"n": ArraySpec((), "int64"), "x": ArraySpec((3,), "float32")})
    'n int64 (), x float32 (3,)'
    """
    return ", ".join(f"{path} {dtype} {shape}" for path, (dtype, shape) in _specs(spec).items()) or "no leaves"


def have_same_leaves(one: Any, other: Any) -> bool:
    """Return whether the leaves of two specs have the same paths, dtypes and shapes; kinds of nodes may differ."""
    return [*_specs(one).items()] == [*_specs(other).items()]


def check_signature(
    table: str,
    signature: Any,
    paths: Sequence[str],
    dtypes: Sequence[np.dtype[Any]],
    shapes: Sequence[tuple[int, ...]],
    times: Sequence[tuple[int | None, ...]] | None = None,
    *,
    length: int | None = None,
    is_cut: bool = False,
) -> None:
    """Raise StructureError unless the columns match a table's signature.

    `signature` is a nest of `ArraySpec` with the time dimension. `times` has, per column, the part of the shape before
    `shapes`: (T,), or () without time; None for windows of `length` steps, whose length may be None for any. `is_cut`
    says that TRUNCATE also makes shorter windows.
    """
    expected = [(path, spec) for path, spec in zip(*named_leaves(signature, "signature"), strict=True) if spec]
    if len(expected) != len(paths):
        names = ", ".join(name for name, _ in expected)
        raise StructureError(
            f"table `{table}`: its signature has {len(expected)} leaves ({names}), got {len(paths)} "
            f"({', '.join(paths)}). Write the leaves that it names."
        )
    times = [(None,)] * len(paths) if times is None else times
    # `reverb.TimestepDataset` needs a signature of steps. With unknown sizes, only all leaves together show this form.
    of_steps = all(_covers(spec.shape, shape) for (_, spec), shape in zip(expected, shapes, strict=True))
    for (name, spec), path, dtype, shape, time in zip(expected, paths, dtypes, shapes, times, strict=True):
        if spec.dtype != dtype or not (of_steps or spec.shape == shape or _covers(spec.shape, time + shape)):
            got, wanted = (shape, spec.shape and spec.shape[1:]) if time == (None,) else (time + shape, spec.shape)
            raise StructureError(
                f"leaf `{path}`: {dtype} {got}, but table `{table}` holds {spec.dtype} {wanted} in `{name}` (its "
                "signature). Cast or reshape the leaf."
            )
        if length and not of_steps and spec.shape and spec.shape != shape and (steps := spec.shape[0]) is not None:
            text = f"but `{name}` has {steps} steps in its signature."
            if steps != length:
                raise StructureError(
                    f"table `{table}`: windows of {length} steps, {text} Pass `sequence_length={steps}`."
                )
            if is_cut and steps > 1:
                raise StructureError(
                    f"table `{table}`: TRUNCATE makes windows of fewer than {steps} steps, {text} Pass another "
                    "`end_of_episode`, or give the table a signature of any number of steps (None)."
                )


def _covers(signature: tuple[int | None, ...] | None, shape: tuple[int | None, ...]) -> bool:
    """Return whether a shape matches a signature's shape; None is any size."""
    return signature is None or (
        len(signature) == len(shape)
        and all(size is None or want in (None, size) for want, size in zip(signature, shape, strict=True))
    )


def packer(spec: Any) -> Callable[[Sequence[Any]], Any]:
    """Return a function that puts columns into the nest of a spec; into a tuple if they do not fit, or without a spec.

    >>> packer({"a": ArraySpec((), "int64"), "b": [ArraySpec((), "int64")]})([1, 2])
    {'a': 1, 'b': [2]}
    """
    if spec is None:
        return tuple
    num_leaves = len(tree.flatten(spec))
    pack = nests.packer(spec)
    return lambda columns: pack(columns) if len(columns) == num_leaves else tuple(columns)


@functools.lru_cache(maxsize=64)
def packer_of(encoded: bytes) -> Callable[[Sequence[Any]], Any]:
    """Return the `packer` of an encoded spec; empty bytes are no spec."""
    return packer(decode_spec(encoded) if encoded else None)


def _specs(nest: Any) -> dict[str, tuple[Any, Any]]:
    """Return dtype and shape of each leaf, by path."""
    paths, specs = named_leaves(nest, "spec")
    return {path: (spec.dtype, spec.shape) for path, spec in zip(paths, specs, strict=True) if spec}
