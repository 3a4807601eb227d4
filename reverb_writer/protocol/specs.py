"""The structure of a step of an item, as bytes that every chunk carries, and structures compared with each other.

A spec is a nest of `ArraySpec` of one step: it has the form of a Reverb signature, without the time dimension. It is
the last tensor of a chunk, uint8 [1, bytes], to which no item refers: a mark, and the encoded spec. Pure.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tree
from google.protobuf.message import DecodeError

from reverb_writer import nests
from reverb_writer.errors import FormatError, StructureError, UnsafeDataError
from reverb_writer.nests import named_leaves
from reverb_writer.protocol import signatures, tensors
from reverb_writer.protocol.messages import StructuredValue

_LOG = logging.getLogger(__package__)

_MARK = b"\0rw-spec1"
_MAX_BYTES = 1 << 16
"""Size of the largest spec that is written or read: some thousand leaves."""


def encode_spec(nest: Any) -> bytes:
    """Return the bytes of a spec.

    >>> from reverb_writer.protocol.signatures import ArraySpec
    >>> decode_spec(encode_spec({"reward": ArraySpec((), "float32")}))
    {'reward': ArraySpec(shape=(), dtype=dtype('float32'), name='')}
    """
    encoded: bytes = signatures.encode(nest).SerializeToString(deterministic=True)
    return encoded


def decode_spec(data: bytes) -> Any:
    """Return the nest of `ArraySpec` of a spec; None if it cannot be read."""
    try:
        return signatures.decode(StructuredValue.FromString(data))
    except DecodeError:
        return None


def spec_tensor(nest: Any) -> bytes:
    """Return the encoded tensor that tells a chunk's spec, for `item_encoding.encode_chunk`.

    It is empty if Reverb cannot describe the nest, or if its spec is larger than 64 KiB; the log says so once.
    """
    try:
        content = _MARK + encode_spec(nest)
    except StructureError as error:
        _warn_once(str(error))
        return b""
    if len(content) > _MAX_BYTES:
        _warn_once(f"a spec of {len(content)} bytes, expected at most {_MAX_BYTES}.")
        return b""
    array = np.frombuffer(content, np.uint8)[None]
    header, encode_content = tensors.encoder(array.dtype, array.shape)
    compressed = bytes(encode_content(array))
    return b"".join((header, tensors.varint(len(compressed)), compressed))


@functools.lru_cache(maxsize=256)
def _warn_once(reason: str) -> None:
    _LOG.warning("Learners will get these items as flat tuples of columns: %s", reason)


@functools.lru_cache(maxsize=256)
def read_spec(dtype: int, encoded_shape: bytes, content: bytes) -> bytes:
    """Return the encoded spec that is a chunk's last tensor; empty if that tensor is no spec, or cannot be read."""
    if len(content) > _MAX_BYTES:
        return b""
    try:
        header = tensors.parse_header(dtype, encoded_shape)
        if header.dtype != np.uint8 or len(header.shape) != 2 or header.shape[0] != 1:  # noqa: PLR2004
            return b""
        tensor = tensors.EncodedTensor(header, content)
        tensor.check(_MAX_BYTES)
        array = np.empty(header.shape, np.uint8)
        tensor.decode_into(array)
    except (FormatError, UnsafeDataError):
        return b""
    data = array.tobytes()
    spec = data[len(_MARK) :] if data.startswith(_MARK) else b""
    return spec if decode_spec(spec) is not None else b""


def spec_text(spec: Any) -> str:
    """Return the leaves of a spec with their dtypes and shapes.

    >>> from reverb_writer.protocol.signatures import ArraySpec
    >>> spec_text({"n": ArraySpec((), "int64"), "x": ArraySpec((3,), "float32")})
    'n int64 (), x float32 (3,)'
    """
    return ", ".join(f"{path} {dtype} {shape}" for path, (dtype, shape) in _specs(spec).items()) or "no leaves"


def have_same_leaves(one: Any, other: Any) -> bool:
    """Return whether the leaves of two specs have the same paths, dtypes and shapes, in whatever kinds of nodes."""
    return [*_specs(one).items()] == [*_specs(other).items()]


def check_signature(
    table: str,
    signature: Any,
    paths: Sequence[str],
    dtypes: Sequence[np.dtype[Any]],
    shapes: Sequence[tuple[int, ...]],
    times: Sequence[tuple[int | None, ...]] | None = None,
) -> None:
    """Check that a table's signature describes the columns.

    `signature` is a nest of `ArraySpec` with the time dimension. `times` has the size that stands before the shape of
    each column: (T,), () where there is no time; None for windows of any length.
    """
    expected = [(path, spec) for path, spec in zip(*named_leaves(signature, "signature"), strict=True) if spec]
    if len(expected) != len(paths):
        names = ", ".join(name for name, _ in expected)
        raise StructureError(
            f"table `{table}`: its signature has {len(expected)} leaves ({names}), got {len(paths)} "
            f"({', '.join(paths)}). Write the leaves that it names."
        )
    times = [(None,)] * len(paths) if times is None else times
    # `reverb.TimestepDataset` wants the shapes of a step; with unknown sizes only all leaves together tell that apart.
    of_steps = all(_covers(spec.shape, shape) for (_, spec), shape in zip(expected, shapes, strict=True))
    for (name, spec), path, dtype, shape, time in zip(expected, paths, dtypes, shapes, times, strict=True):
        if spec.dtype != dtype or not (of_steps or spec.shape == shape or _covers(spec.shape, time + shape)):
            got, wanted = (shape, spec.shape and spec.shape[1:]) if time == (None,) else (time + shape, spec.shape)
            raise StructureError(
                f"leaf `{path}`: {dtype} {got}, but table `{table}` holds {spec.dtype} {wanted} in `{name}` (its "
                "signature). Cast or reshape the leaf."
            )


def _covers(signature: tuple[int | None, ...] | None, shape: tuple[int | None, ...]) -> bool:
    """Return whether a signature describes values of this shape; None is any size."""
    return signature is None or (
        len(signature) == len(shape)
        and all(size is None or want in (None, size) for want, size in zip(signature, shape, strict=True))
    )


def packer(spec: Any) -> Callable[[Sequence[Any]], Any]:
    """Return a function that puts columns into the nest of a spec; into a tuple if they do not fit it, or it is None.

    >>> from reverb_writer.protocol.signatures import ArraySpec
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
    """Return `packer` of an encoded spec; of none if it is empty."""
    return packer(decode_spec(encoded) if encoded else None)


def _specs(nest: Any) -> dict[str, tuple[Any, Any]]:
    """Return dtype and shape of each leaf by its name."""
    paths, specs = named_leaves(nest, "spec")
    return {path: (spec.dtype, spec.shape) for path, spec in zip(paths, specs, strict=True) if spec}
