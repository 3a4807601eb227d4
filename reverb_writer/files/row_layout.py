"""What all steps of a trajectory have in common: their nest, and the name, dtype and shape of each leaf.

A leaf is stored as an array by its name, such as `observation/rgb`; a step that is one array is called `step`. Strings
are stored as all their bytes one after the other, and beside them, by the name `text.lengths`, are their lengths.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.errors import FormatError, StructureError
from reverb_writer.nests import named_leaves
from reverb_writer.protocol import signatures
from reverb_writer.protocol.messages import StructuredValue

Array = npt.NDArray[Any]
Read = Callable[[str, np.dtype[Any], tuple[int, ...]], Array]
"""Returns the array of a name, a dtype and a shape from a file."""


@dataclass(frozen=True)
class RowLayout:
    """The nest of a step, its leaves in dm-tree's order, and the nest as text."""

    nest: Any  # of `ArraySpec`
    leaves: Mapping[str, Any]  # the same by name
    encoded: str  # the nest as a signature of Reverb, in base 64

    @classmethod
    def of(cls, nest: Any) -> RowLayout:
        """Return the layout of steps like `nest`, of `ArraySpec`.

        Raises:
            StructureError: such steps cannot be stored.
        """
        encoded = base64.b64encode(signatures.encode(nest).SerializeToString()).decode()
        return cls(nest, _leaves(nest), encoded)

    @classmethod
    @functools.lru_cache(maxsize=64)  # most files of a directory have the same
    def read(cls, encoded: str) -> RowLayout:
        """Return the layout that a manifest describes.

        Raises:
            Exception: it describes none.
        """
        nest = signatures.decode(StructuredValue.FromString(base64.b64decode(encoded)))
        _, specs = named_leaves(nest, "a step")
        if any(spec is None or spec.shape is None or None in spec.shape for spec in specs):
            raise FormatError("`structure` describes no step: dtype or shape of a leaf is missing.")
        return cls(nest, _leaves(nest), encoded)

    def encode(self, columns: Sequence[Array]) -> dict[str, Array]:
        """Return the arrays to store for these columns, each [T, ...], by name."""
        arrays: dict[str, Array] = {}
        for (name, spec), column in zip(self.leaves.items(), columns, strict=True):
            arrays[name] = column
            if spec.dtype.kind == "O":
                strings = [bytes(string) for string in column.flat]
                arrays[name] = np.frombuffer(b"".join(strings), np.uint8)
                arrays[_lengths(name)] = np.array([len(string) for string in strings], np.int64).reshape(column.shape)
        return arrays

    def decode(self, read: Read, num_steps: int) -> list[Array]:
        """Return the columns of a file, each [num_steps, ...], owned by the caller.

        Raises:
            FormatError: its arrays are not of this layout.
        """
        columns = []
        for name, spec in self.leaves.items():
            shape = (num_steps, *spec.shape)
            is_text = spec.dtype.kind == "O"
            columns.append(_strings(read, name, shape) if is_text else read(name, spec.dtype, shape).copy())
        return columns


def _leaves(nest: Any) -> dict[str, Any]:
    paths, specs = named_leaves(nest, "a step")
    names = [path or "step" for path in paths]
    stored = names + [_lengths(name) for name, spec in zip(names, specs, strict=True) if spec.dtype.kind == "O"]
    if len(set(stored)) != len(stored):
        raise StructureError(f"leaves need different names, got {', '.join(stored)}. Rename a key that has a slash.")
    if unnamable := [name for name in names if "\0" in name]:
        raise StructureError(f"leaf {unnamable[0]!r}: an .npz file cannot name it. Rename the key that has a NUL.")
    return dict(zip(names, specs, strict=True))


def _lengths(name: str) -> str:
    return f"{name}.lengths"


def _strings(read: Read, name: str, shape: tuple[int, ...]) -> Array:
    lengths = read(_lengths(name), np.dtype(np.int64), shape).reshape(-1)
    if lengths.size and lengths.min() < 0:
        raise FormatError(f"leaf `{name}`: a string cannot have a negative length.")
    ends = np.cumsum(lengths).tolist()
    joined = read(name, np.dtype(np.uint8), (ends[-1] if ends else 0,)).tobytes()
    strings = np.empty(lengths.size, object)
    for index, (length, end) in enumerate(zip(lengths.tolist(), ends, strict=True)):
        strings[index] = joined[end - length : end]
    return strings.reshape(shape)
