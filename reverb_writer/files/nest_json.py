"""Nests as JSON and back: the structure of the steps of a trajectory on disk.

    in the manifest                                              the nest
    ---------------                                              --------
    3                                                            leaf number 3, in dm-tree's order
    {"dict": {"observation": 0, "reward": 1}}                    {"observation": ..., "reward": ...}
    {"list": [0, 1]}, {"tuple": [0, 1]}                          [..., ...], (..., ...)
    {"named_tuple": "Point", "fields": {"x": 0, "y": 1}}         Point(x=..., y=...)

A named tuple is read as a new class of that name and those fields, a `Trajectory` as `reverb_writer.Trajectory`.
Reading imports and runs nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import tree

from reverb_writer.errors import FormatError, StructureError
from reverb_writer.nests import join_path, named_tuple
from reverb_writer.steps import Trajectory

_MAX_DEPTH = 32


def encode_nest(nest: Any) -> Any:
    """Return a nest as JSON, with each leaf replaced by its number.

    >>> encode_nest({"reward": None, "observation": (None, None)})
    {'dict': {'observation': {'tuple': [0, 1]}, 'reward': 2}}
    """
    return _encode(nest, itertools.count(), ())


def _encode(nest: Any, numbers: Iterator[int], path: tuple[Any, ...]) -> Any:
    if len(path) > _MAX_DEPTH:
        raise StructureError(f"a step nested more than {_MAX_DEPTH} deep cannot be stored. Make the step flatter.")
    if isinstance(nest, Mapping):
        for key in nest:
            if not isinstance(key, str):
                raise StructureError(
                    f"leaf `{join_path((*path, key))}`: key {key!r} of type {type(key).__name__}, expected str."
                )
        return {"dict": {key: _encode(nest[key], numbers, (*path, key)) for key in sorted(nest)}}
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        fields = {key: _encode(value, numbers, (*path, key)) for key, value in zip(nest._fields, nest, strict=True)}
        return {"named_tuple": type(nest).__name__, "fields": fields}
    if isinstance(nest, list | tuple):
        kind = "list" if isinstance(nest, list) else "tuple"
        return {kind: [_encode(value, numbers, (*path, index)) for index, value in enumerate(nest)]}
    if hasattr(nest, "__attrs_attrs__"):
        raise StructureError(
            f"{type(nest).__name__} is an attrs class, which cannot be read back from a file. Use a named tuple."
        )
    return next(numbers)


def decode_nest(value: Any) -> Any:
    """Return the nest that JSON describes, with numbers for leaves.

    >>> decode_nest({"named_tuple": "Point", "fields": {"x": 0, "y": 1}})
    Point(x=0, y=1)
    """
    try:
        nest = _decode(value, 0)
    except (AttributeError, TypeError, ValueError) as error:
        raise FormatError(f"`structure` describes no nest: {error}") from error
    if tree.flatten(nest) != list(range(len(tree.flatten(nest)))):
        raise FormatError("`structure` describes no nest: its leaves are not numbered in dm-tree's order.")
    return nest


def _decode(value: Any, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise ValueError(f"the structure is nested more than {_MAX_DEPTH} deep.")
    if type(value) is int:
        return value
    kind = next(iter(value), None) if isinstance(value, dict) else None
    if kind == "dict":
        return {str(key): _decode(part, depth + 1) for key, part in value["dict"].items()}
    if kind in ("list", "tuple"):
        parts = [_decode(part, depth + 1) for part in value[kind]]
        return parts if kind == "list" else tuple(parts)
    if kind == "named_tuple" and isinstance(value.get("fields"), dict):
        fields = value["fields"]
        return _class_of(str(value[kind]), tuple(fields))(*(_decode(part, depth + 1) for part in fields.values()))
    raise ValueError(f"expected a leaf's number, dict, list, tuple or named tuple, got {str(value)[:80]!r}.")


def _class_of(name: str, fields: tuple[str, ...]) -> Any:
    return Trajectory if fields == Trajectory._fields else named_tuple(name, fields)
