"""The syntax of signatures in a configuration: `"uint8[84, 84, 4]"`, `"float32"`, `"float32[?, 3]"`.

A leaf describes the array of one step; in the signature of the table the number of steps of an item is the first axis.
TOML tables are dicts, TOML arrays are lists.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from reverb_writer.errors import SpecError, StructureError
from reverb_writer.protocol.signatures import ArraySpec
from reverb_writer.protocol.tensors import dtype_number

_LEAF = re.compile(r"(?P<dtype>\w+)\s*(?:\[(?P<shape>[\d?,\s]*)\])?")
_STRINGS = ("string", "object")


def read_signature(nest: Any, sequence_length: int | None, path: str = "signature") -> Any:
    """Return the nest of `ArraySpec` that a nest of descriptions describes.

    Args:
        nest: dicts and lists of strings.
        sequence_length: steps of an item; None if unknown or not the same for all items.
        path: the path of the nest, for errors.

    Raises:
        SpecError: a leaf does not describe an array; the message names the leaf.

    >>> read_signature({"rgb": "uint8[84, 84]", "reward": "float32"}, 20)
    {'rgb': ArraySpec(shape=(20, 84, 84), dtype=dtype('uint8'), name='rgb'), \
'reward': ArraySpec(shape=(20,), dtype=dtype('float32'), name='reward')}
    """
    if isinstance(nest, dict):
        return {name: read_signature(inner, sequence_length, f"{path}.{name}") for name, inner in nest.items()}
    if isinstance(nest, list):
        return [read_signature(inner, sequence_length, f"{path}.{index}") for index, inner in enumerate(nest)]
    match = _LEAF.fullmatch(nest.strip()) if isinstance(nest, str) else None
    dtype = _dtype(match["dtype"]) if match else None
    if match is None or dtype is None:
        raise SpecError(
            f'`{path}`: got {nest!r}, allowed: a dtype and a shape, such as "uint8[84, 84, 4]" or "float32".'
        )
    sizes = [size.strip() for size in (match["shape"] or "").split(",") if size.strip()]
    shape = tuple(None if size == "?" else int(size) for size in sizes)
    return ArraySpec((sequence_length, *shape), dtype, path.rpartition(".")[2])


def _dtype(name: str) -> np.dtype[Any] | None:
    if name in _STRINGS:
        return np.dtype(object)
    try:
        dtype = np.dtype(name)
    except TypeError:
        return None
    try:
        dtype_number(dtype)
    except StructureError:
        return None
    return dtype if dtype.kind in "biufc" else None
