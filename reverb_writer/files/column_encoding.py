"""Steps [T, ...] to the bytes of a file and back, each leaf in its encoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.errors import FormatError, SpecError
from reverb_writer.files import npz
from reverb_writer.files.manifest import Encoding, Leaf

Array = npt.NDArray[Any]

_LARGEST = 255
_IMAGE_DIMS = 2


def choose_encodings(
    names: Sequence[str],
    dtypes: Sequence[np.dtype[Any]],
    shapes: Sequence[tuple[int, ...]],
    asked: Mapping[str, str | Encoding],
) -> list[Leaf]:
    """Return the leaves, each with the encoding that was asked for, or else the default of its dtype and shape."""
    unknown = set(asked) - set(names)
    if unknown:
        raise SpecError(f"`encodings` names {', '.join(sorted(unknown))}; the leaves are {', '.join(names)}.")
    leaves = []
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        is_image = dtype == np.uint8 and len(shape) >= _IMAGE_DIMS
        default = Encoding.STRINGS if dtype.kind == "O" else Encoding.DEFLATE if is_image else Encoding.RAW
        try:
            encoding = Encoding(asked.get(name, default))
        except ValueError:
            choices = ", ".join(repr(each.value) for each in Encoding)
            raise SpecError(f"`encodings[{name!r}]` must be one of {choices}, got {asked[name]!r}.") from None
        if encoding is Encoding.NORMALIZED_IMAGE and dtype.kind != "f":
            raise SpecError(f"`encodings[{name!r}]`: {dtype} cannot be a normalized image. Expected floats in [0, 1].")
        if (encoding is Encoding.STRINGS) != (dtype.kind == "O"):
            raise SpecError(f"`encodings[{name!r}]`: {encoding.value!r} cannot hold {dtype}.")
        leaves.append(Leaf(name, dtype, shape, encoding))
    return leaves


def encode(leaves: Sequence[Leaf], columns: Sequence[Array]) -> bytes:
    """Return the bytes of an `.npz` file with these columns, each [T, ...]."""
    members: list[npz.Member] = []
    for leaf, column in zip(leaves, columns, strict=True):
        if leaf.encoding is Encoding.STRINGS:
            strings = [bytes(string) for string in column.flat]
            lengths = np.array([len(string) for string in strings], np.int64).reshape(column.shape)
            members.append(npz.Member(leaf.name, np.frombuffer(b"".join(strings), np.uint8)))
            members.append(npz.Member(f"{leaf.name}.lengths", lengths))
        elif leaf.encoding is Encoding.NORMALIZED_IMAGE:
            scaled = np.clip(np.nan_to_num(column), 0, 1) * column.dtype.type(_LARGEST)
            members.append(npz.Member(leaf.name, scaled.astype(np.uint8), deflate=True))
        else:
            members.append(npz.Member(leaf.name, column, leaf.encoding is Encoding.DEFLATE))
    return npz.write(members)


def decode(leaves: Sequence[Leaf], data: Array, num_steps: int) -> list[Array]:
    """Return the columns that a file holds, each [num_steps, ...]; they may be views of `data`."""
    layout: list[tuple[str, np.dtype[Any], tuple[int, ...]]] = []
    for leaf in leaves:
        shape = (num_steps, *leaf.shape)
        if leaf.encoding is Encoding.STRINGS:
            layout.append((f"{leaf.name}.lengths", np.dtype(np.int64), shape))
        else:
            dtype = np.dtype(np.uint8) if leaf.encoding is Encoding.NORMALIZED_IMAGE else leaf.dtype
            layout.append((leaf.name, dtype, shape))
    columns = npz.read(data, layout)
    return [_decode(leaf, column, data) for leaf, column in zip(leaves, columns, strict=True)]


def _decode(leaf: Leaf, column: Array, data: Array) -> Array:
    if leaf.encoding is Encoding.NORMALIZED_IMAGE:
        return np.asarray(column / leaf.dtype.type(_LARGEST), leaf.dtype)
    if leaf.encoding is not Encoding.STRINGS:
        return column
    ends = np.cumsum(column.reshape(-1))
    if column.size and (column.min() < 0 or ends[-1] > data.size):
        raise FormatError(f"leaf `{leaf.name}`: its lengths of strings do not fit its bytes.")
    total = int(ends[-1]) if column.size else 0
    joined = npz.read(data, [(leaf.name, np.dtype(np.uint8), (total,))])[0].tobytes()
    strings = np.empty(column.size, object)
    for index, (length, end) in enumerate(zip(column.reshape(-1).tolist(), ends.tolist(), strict=True)):
        strings[index] = joined[end - length : end]
    return strings.reshape(column.shape)
