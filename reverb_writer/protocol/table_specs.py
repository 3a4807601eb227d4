"""What the items of a table look like, as bytes that can be kept beside the table; see client/spec_table.py.

A spec is a nest of `ArraySpec` of one step: it has the form of a Reverb signature, without the time dimension.

The table of the specs has a signature of its own, which tells with every ServerInfo how large items may be:
{"max_item_bytes": {table: uint8 [bytes]}}. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tree
from google.protobuf.message import DecodeError

from reverb_writer import nests
from reverb_writer.errors import StructureError
from reverb_writer.leaves import mismatch
from reverb_writer.nests import check_same_leaves, named_leaves
from reverb_writer.protocol import signatures
from reverb_writer.protocol.messages import StructuredValue
from reverb_writer.protocol.signatures import ArraySpec
from reverb_writer.steps import Trajectory
from reverb_writer.tables import TableConfig

SPECS_TABLE = "__specs__"
"""The table in which a server keeps the specs of its other tables."""

_CONFIG = TableConfig(SPECS_TABLE, max_size=100_000)
_LIMITS = "max_item_bytes"
_ACTION = "Make the actors agree. `Client.reset` empties the table and lets it have another structure."


def specs_config(tables: Sequence[TableConfig]) -> TableConfig:
    """Return the table for the specs of these tables, which tells their `max_item_bytes`."""
    limits = {
        table.name: ArraySpec((table.max_item_bytes,), np.dtype(np.uint8)) for table in tables if table.max_item_bytes
    }
    return replace(_CONFIG, signature={_LIMITS: limits} if limits else None)


def item_limits(signature: Any) -> dict[str, int]:
    """Return `max_item_bytes` of the tables that have one, as the signature of the table of the specs tells it.

    >>> item_limits(specs_config([TableConfig("replay", max_item_bytes=1000), TableConfig("queue")]).signature)
    {'replay': 1000}
    """
    limits = signature.get(_LIMITS) if isinstance(signature, Mapping) else None
    if not isinstance(limits, Mapping):
        return {}
    shapes = {table: spec.shape for table, spec in limits.items() if isinstance(spec, ArraySpec)}
    return {table: shape[0] for table, shape in shapes.items() if shape and shape[0] is not None}


def spec_key(table: str) -> int:
    """Return the key of the item that holds a table's spec: 63 bits of a hash of its name."""
    return int.from_bytes(hashlib.blake2b(table.encode(), digest_size=8).digest(), "big") >> 1


def encode_spec(nest: Any) -> bytes:
    """Return the bytes of a spec.

    >>> from reverb_writer.protocol.signatures import ArraySpec
    >>> decode_spec(encode_spec({"reward": ArraySpec((), "float32")}))
    {'reward': ArraySpec(shape=(), dtype=dtype('float32'), name='')}
    """
    encoded: bytes = signatures.encode(nest).SerializeToString(deterministic=True)
    return encoded


def decode_spec(data: bytes) -> Any:
    """Return the nest of `ArraySpec` of a spec; a trajectory is a `Trajectory`. None if it cannot be read."""
    try:
        return with_trajectories(signatures.decode(StructuredValue.FromString(data)))
    except DecodeError:
        return None


def with_trajectories(nest: Any) -> Any:
    """Return a nest in which named tuples with the fields of a trajectory are `Trajectory`, of whatever class."""
    if isinstance(nest, Mapping):
        return {key: with_trajectories(value) for key, value in nest.items()}
    if isinstance(nest, list):
        return [with_trajectories(value) for value in nest]
    if isinstance(nest, tuple):
        values = [with_trajectories(value) for value in nest]
        if hasattr(nest, "_fields"):
            return Trajectory(*values) if nest._fields == Trajectory._fields else type(nest)(*values)
        return tuple(values)
    return nest


def check_same(table: str, stored: Any, own: Any) -> None:
    """Raise StructureError, which names the leaf, if a structure is not that with which a table was written first."""
    theirs, ours = _specs(stored), _specs(own)
    like = f"the data that table `{table}` was first written with"
    check_same_leaves(f"data for table `{table}`", [*ours], [*theirs], like, _ACTION)
    for path, spec in ours.items():
        if spec != theirs[path]:
            where = f"data for table `{table}`, leaf `{path}`"
            raise mismatch(where, *spec, *theirs[path], f"as in {like}", _ACTION)


def check_signature(
    table: str,
    signature: Any,
    paths: Sequence[str],
    dtypes: Sequence[np.dtype[Any]],
    shapes: Sequence[tuple[int, ...]],
    times: Sequence[tuple[int | None, ...]] | None = None,
) -> None:
    """Check that a table's signature describes the columns.

    Args:
        table: its name.
        signature: nest of `ArraySpec`, with the time dimension.
        paths: of the leaves, in the order of the columns.
        dtypes: of each; `object` for strings.
        shapes: of each, without time.
        times: of each the size that stands before it: (T,), () where there is no time. None for windows of any length.
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


def _specs(nest: Any) -> dict[str, tuple[Any, Any]]:
    """Return dtype and shape of each leaf by its name."""
    paths, specs = named_leaves(nest, "spec")
    return {path: (spec.dtype, spec.shape) for path, spec in zip(paths, specs, strict=True) if spec}
