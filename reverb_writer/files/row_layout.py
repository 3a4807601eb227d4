"""What all steps of a trajectory have in common: their nest, and for each leaf its dtype, its shape and its encoding.

A leaf is stored as an array by its name, such as `observation/rgb`; a step that is one array is called `step`.
"""

from __future__ import annotations

import base64
import enum
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.errors import FormatError, SpecError, StructureError
from reverb_writer.files import npz
from reverb_writer.nests import named_leaves
from reverb_writer.protocol import signatures
from reverb_writer.protocol.messages import StructuredValue

Array = npt.NDArray[Any]

_LARGEST = 255
_IMAGE_DIMS = 2


class Encoding(enum.Enum):
    """How a leaf is stored."""

    RAW = "raw"  # unchanged
    DEFLATE = "deflate"  # compressed, lossless
    NORMALIZED_IMAGE = "normalized_image"  # floats in [0, 1] as uint8: clipped, times 255, truncated
    STRINGS = "strings"  # all bytes one after the other, uint8 [bytes], and beside them their lengths


@dataclass(frozen=True)
class Leaf:
    """One leaf of the steps: its name, dtype, shape of one step, encoding."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    encoding: Encoding

    @property
    def lengths_name(self) -> str:
        """The name of the array with the lengths of strings."""
        return f"{self.name}.lengths"


@dataclass(frozen=True)
class RowLayout:
    """The nest of a step, its leaves in dm-tree's order, and both as text."""

    nest: Any  # of `ArraySpec`
    leaves: Sequence[Leaf]
    encoded: str  # the nest as a signature of Reverb, in base 64

    @classmethod
    def of(cls, nest: Any, encodings: Mapping[str, str | Encoding]) -> RowLayout:
        """Return the layout of steps like `nest`, of `ArraySpec`; a leaf without an encoding gets its default.

        Raises:
            StructureError: such steps cannot be stored.
            SpecError: a leaf cannot have the encoding that was asked for.
        """
        encoded = base64.b64encode(signatures.encode(nest).SerializeToString()).decode()
        return cls(nest, _leaves(nest, encodings), encoded)

    @classmethod
    @functools.lru_cache(maxsize=64)  # most files of a directory have the same
    def read(cls, encoded: str, encodings: tuple[str, ...]) -> RowLayout:
        """Return the layout that a manifest describes.

        Raises:
            Exception: it describes none.
        """
        nest = signatures.decode(StructuredValue.FromString(base64.b64decode(encoded)))
        names, specs = named_leaves(nest, "a step")
        if any(spec is None or spec.shape is None or None in spec.shape for spec in specs):
            raise FormatError("`structure` describes no step: dtype or shape of a leaf is missing.")
        by_name = zip([name or "step" for name in names], encodings, strict=True)
        return cls(nest, _leaves(nest, dict(by_name)), encoded)

    def encode(self, columns: Sequence[Array]) -> list[npz.Member]:
        """Return the arrays to store for these columns, each [T, ...]."""
        members: list[npz.Member] = []
        for leaf, column in zip(self.leaves, columns, strict=True):
            if leaf.encoding is Encoding.STRINGS:
                strings = [bytes(string) for string in column.flat]
                lengths = np.array([len(string) for string in strings], np.int64).reshape(column.shape)
                members.append(npz.Member(leaf.name, np.frombuffer(b"".join(strings), np.uint8)))
                members.append(npz.Member(leaf.lengths_name, lengths))
            elif leaf.encoding is Encoding.NORMALIZED_IMAGE:
                scaled = np.clip(np.nan_to_num(column), 0, 1) * column.dtype.type(_LARGEST)
                members.append(npz.Member(leaf.name, scaled.astype(np.uint8), deflate=True))
            else:
                members.append(npz.Member(leaf.name, column, leaf.encoding is Encoding.DEFLATE))
        return members

    def decode(self, archive: npz.Reader, num_steps: int) -> list[Array]:
        """Return the columns of a file, each [num_steps, ...]; most are read-only.

        Raises:
            FormatError: its arrays are not of this layout.
        """
        columns = []
        for leaf in self.leaves:
            shape = (num_steps, *leaf.shape)
            if leaf.encoding is Encoding.STRINGS:
                columns.append(_strings(leaf, archive, shape))
            elif leaf.encoding is Encoding.NORMALIZED_IMAGE:
                scaled = archive.array(leaf.name, np.dtype(np.uint8), shape)
                columns.append(np.asarray(scaled / leaf.dtype.type(_LARGEST), leaf.dtype))
            else:
                columns.append(archive.array(leaf.name, leaf.dtype, shape))
        return columns


def _leaves(nest: Any, encodings: Mapping[str, str | Encoding]) -> list[Leaf]:
    paths, specs = named_leaves(nest, "a step")
    names = [path or "step" for path in paths]
    if unknown := set(encodings) - set(names):
        raise SpecError(f"`encodings` names {', '.join(sorted(unknown))}; the leaves are {', '.join(names)}.")
    leaves = [_leaf(name, spec.dtype, spec.shape, encodings) for name, spec in zip(names, specs, strict=True)]
    stored = names + [leaf.lengths_name for leaf in leaves if leaf.encoding is Encoding.STRINGS]
    if len(set(stored)) != len(stored):
        raise StructureError(f"leaves need different names, got {', '.join(stored)}. Rename a key that has a slash.")
    return leaves


def _leaf(name: str, dtype: np.dtype[Any], shape: tuple[int, ...], encodings: Mapping[str, str | Encoding]) -> Leaf:
    if "\0" in name:
        raise StructureError(f"leaf {name!r}: an .npz file cannot name it. Rename the key that has a NUL.")
    is_image = dtype == np.uint8 and len(shape) >= _IMAGE_DIMS
    default = Encoding.STRINGS if dtype.kind == "O" else Encoding.DEFLATE if is_image else Encoding.RAW
    try:
        encoding = Encoding(encodings.get(name, default))
    except ValueError:
        choices = ", ".join(repr(each.value) for each in Encoding)
        raise SpecError(f"`encodings[{name!r}]` must be one of {choices}, got {encodings[name]!r}.") from None
    if encoding is Encoding.NORMALIZED_IMAGE and dtype.kind != "f":
        raise SpecError(f"`encodings[{name!r}]`: {dtype} cannot be a normalized image. Expected floats in [0, 1].")
    if (encoding is Encoding.STRINGS) != (dtype.kind == "O"):
        raise SpecError(f"`encodings[{name!r}]`: {encoding.value!r} cannot hold {dtype}.")
    return Leaf(name, dtype, shape, encoding)


def _strings(leaf: Leaf, archive: npz.Reader, shape: tuple[int, ...]) -> Array:
    lengths = archive.array(leaf.lengths_name, np.dtype(np.int64), shape).reshape(-1)
    if lengths.size and lengths.min() < 0:
        raise FormatError(f"leaf `{leaf.name}`: a string cannot have a negative length.")
    ends = np.cumsum(lengths).tolist()
    joined = archive.array(leaf.name, np.dtype(np.uint8), (ends[-1] if ends else 0,)).tobytes()
    strings = np.empty(lengths.size, object)
    for index, (length, end) in enumerate(zip(lengths.tolist(), ends, strict=True)):
        strings[index] = joined[end - length : end]
    return strings.reshape(shape)
