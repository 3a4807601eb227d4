"""Table signatures, which describe the nest of arrays in a table's items: Reverb's messages to Python nests and back.

    messages.StructuredValue            Python
    ------------------------            ------
    not set                             None: the table has no signature
    tensor_spec_value                   ArraySpec
    bounded_tensor_spec_value           ArraySpec; bounds are ignored, because Reverb does not check them
    list_value, tuple_value             list, tuple
    dict_value                          dict, sorted by key, which is the order of dm-tree's leaves
    named_tuple_value                   a named tuple class of that name and those fields, or `Trajectory`
    none_value                          None
    anything else                       None for the whole signature, and a warning in the log

The leaves of a nest, in dm-tree's order, are the columns of an item. A table whose signature cannot be read is
treated like a table without signature: its items are flat tuples of columns.

Source: Reverb 0.14 (`signature.cc`), TensorFlow 2.15 (`struct.proto`, `nested_structure_coder.py`).
"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from reverb_writer.errors import FormatError, ReverbWriterError, StructureError
from reverb_writer.protocol import tensors
from reverb_writer.protocol.messages import StructuredValue
from reverb_writer.steps import named_tuple

_LOG = logging.getLogger(__package__)

MAX_DEPTH: Final = 32
"""Nests deeper than this are neither decoded nor encoded."""


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
    """Return the nest of `ArraySpec` that a `messages.StructuredValue`, possibly of an untrusted writer, describes.

    None if it is not set or cannot be read; the log names the unreadable part. Within a process, named tuples of one
    name with the same fields have one class.
    """
    try:
        return _decode(value, ()) if value.ByteSize() else None
    except FormatError as error:
        _warn_once(str(error))
        return None


@functools.lru_cache(maxsize=256)
def _warn_once(reason: str) -> None:
    # Signatures are decoded with every ServerInfo, which a waiting writer requests repeatedly.
    _LOG.warning("%s Items of the table are read as flat tuples of columns.", reason)


def _decode(value: Any, path: tuple[object, ...]) -> Any:
    _check_depth(path, FormatError)
    kind = value.WhichOneof("kind")
    if kind == "none_value":
        return None
    if kind in ("tensor_spec_value", "bounded_tensor_spec_value"):
        return _decode_spec(getattr(value, kind), path)
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


def _decode_spec(spec: Any, path: tuple[object, ...]) -> ArraySpec:
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
    """Return the signature that describes a nest.

    >>> decode(encode({"reward": ArraySpec((None,), np.float32)}))
    {'reward': ArraySpec(shape=(None,), dtype=dtype('float32'), name='')}

    Args:
        nest: of `ArraySpec` and None, in lists, tuples, named tuples, and mappings with keys of type `str`.

    Returns:
        A `messages.StructuredValue` that dm-reverb reads as the same nest of `tf.TensorSpec`.

    Raises:
        StructureError: Reverb cannot store such a nest, or one of its dtypes.
    """
    value = StructuredValue()
    _encode(nest, value, ())
    return value


def _encode(nest: Any, value: Any, path: tuple[object, ...]) -> None:
    _check_depth(path, StructureError)
    if isinstance(nest, ArraySpec):
        _encode_spec(nest, value.tensor_spec_value, path)
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


def _encode_spec(spec: ArraySpec, proto: Any, path: tuple[object, ...]) -> None:
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


def _check_depth(path: tuple[object, ...], error: type[ReverbWriterError]) -> None:
    if len(path) > MAX_DEPTH:
        raise error(f"signature nested more than {MAX_DEPTH} deep. Make it flatter.")


def _at(path: tuple[object, ...]) -> str:
    return f", leaf `{'/'.join(map(str, path))}`" if path else ""
