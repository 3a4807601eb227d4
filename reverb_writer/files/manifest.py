"""The description of a trajectory on disk: the member `manifest.json` of its file.

    format, version               "reverb-writer trajectory" and the format's version
    num_steps                     number of rows, including the boundary row
    end                           end of the last real row, a value of `End`; null if the file has no kinds
    reset                         whether `reset()` and no last row ended it: an import repeats the call
    structure                     the nest of one step with dtypes and shapes: a signature of Reverb, in base 64
    metadata                      the user's data

Each leaf is an array named by its path, such as `observation/rgb`; the array of a step without a nest is named `step`.
The strings of a leaf `text` are stored as their joined bytes, and their lengths as the array `text.lengths`. The kinds
of rows (`reverb_writer.rows`) are the array `kinds`, [num_steps] uint8. Its member of the zip file is `kinds`; the
member of a leaf of that name is `kinds.npy`. A file has no kinds if its writer did not know them: an item of another
writer, or a file of version 1. Version 1 has `boundary_step`, `terminated` and `truncated` instead of kinds, and its
`end` is `step`, `reset` or `cut`.

A named tuple is read as a new class with the same name and fields, a `Trajectory` as `reverb_writer.Trajectory`.
Reading imports no module and runs no code of the file.
"""

from __future__ import annotations

import base64
import enum
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from reverb_writer import rows
from reverb_writer.errors import FormatError, ReverbWriterError, SpecError, StructureError
from reverb_writer.nests import named_leaves
from reverb_writer.protocol import signatures
from reverb_writer.protocol.messages import StructuredValue

Array = npt.NDArray[Any]
Read = Callable[[str, np.dtype[Any], tuple[int, ...]], Array]
"""Reads an array from a file, given the name of its member, its dtype and its shape."""

FORMAT = "reverb-writer trajectory"
VERSION = 2
KINDS: Final = "kinds"  # the member of the kinds of rows
MAX_BYTES: Final = 16 << 20  # of a manifest: a few bytes of a foreign file may inflate to gigabytes


class End(enum.Enum):
    """The end of a trajectory, which the kinds of its rows show."""

    TERMINATED = "terminated"  # the environment ended the episode
    TRUNCATED = "truncated"  # a limit ended the episode, so that its final state has a value
    CUT = "cut"  # the recording stopped before the episode ended


def end_of(kinds: Array) -> End:
    """Return the end of a trajectory: the end of its last real row.

    >>> end_of(np.array([3, 12, 16], np.uint8))
    <End.TERMINATED: 'terminated'>
    """
    real = kinds[kinds != rows.PADDING]
    last = int(real[-1]) if len(real) else 0
    if not last & rows.LAST:
        return End.CUT
    return End.TERMINATED if last & rows.TERMINAL else End.TRUNCATED


@dataclass(frozen=True)
class RowLayout:
    """Properties that all steps of a trajectory share."""

    nest: Any  # `ArraySpec` leaves in the structure of a step
    leaves: Mapping[str, Any]  # `ArraySpec` by name, in dm-tree's order
    encoded: str  # the nest as a signature of Reverb, in base 64

    @classmethod
    def of(cls, nest: Any) -> RowLayout:
        """Return the layout for a nest of `ArraySpec`; raises StructureError if its steps cannot be stored."""
        return cls(nest, _leaves(nest), base64.b64encode(signatures.encode(nest).SerializeToString()).decode())

    @classmethod
    @functools.lru_cache(maxsize=64)  # most files of a directory have the same layout
    def read(cls, encoded: str) -> RowLayout:
        """Return the layout of a manifest's `structure`; raises if it is invalid."""
        nest = signatures.decode(StructuredValue.FromString(base64.b64decode(encoded)))
        _, specs = named_leaves(nest, "a step")
        if any(spec is None or spec.shape is None or None in spec.shape for spec in specs):
            raise FormatError("`structure` describes no step: dtype or shape of a leaf is missing.")
        return cls(nest, _leaves(nest), encoded)

    def encode(self, columns: Sequence[Array]) -> dict[str, Array]:
        """Return the arrays to store, by name, for columns [T, ...]."""
        arrays: dict[str, Array] = {}
        for (name, spec), column in zip(self.leaves.items(), columns, strict=True):
            arrays[name] = column
            if spec.dtype.kind == "O":
                strings = [bytes(string) for string in column.flat]
                arrays[name] = np.frombuffer(b"".join(strings), np.uint8)
                arrays[_lengths(name)] = np.array([len(string) for string in strings], np.int64).reshape(column.shape)
        return arrays

    def decode(self, read: Read, num_steps: int) -> list[Array]:
        """Return the columns of a file, each [num_steps, ...], owned by the caller."""
        columns = []
        for name, spec in self.leaves.items():
            shape = (num_steps, *spec.shape)
            is_text = spec.dtype.kind == "O"
            columns.append(_strings(read, name, shape) if is_text else read(member(name), spec.dtype, shape).copy())
        return columns


@dataclass(frozen=True)
class Former:
    """How a trajectory of version 1 ended, if its leaves do not show it."""

    boundary_step: bool  # whether the last row only holds the final observation
    terminated: bool | None  # None: unknown
    truncated: bool | None
    ended: bool  # whether the last row ended the episode


@dataclass(frozen=True)
class Manifest:
    """The description of a trajectory, with the fields listed above; `layout` is `structure`."""

    num_steps: int
    end: End | None
    is_reset: bool
    layout: RowLayout
    metadata: Mapping[str, Any]
    former: Former | None = None

    @property
    def has_kinds(self) -> bool:
        """Whether the file has the kinds of its rows."""
        return self.end is not None

    def to_json(self) -> str:
        """Return the manifest as JSON; raises SpecError if it is too large to be read again."""
        end = None if self.end is None else self.end.value
        plain: dict[str, Any] = {"num_steps": self.num_steps, "end": end, "reset": self.is_reset}
        plain |= {"structure": self.layout.encoded, "metadata": dict(self.metadata)}
        text = json.dumps({"format": FORMAT, "version": VERSION, **plain})
        if len(text) > MAX_BYTES:
            raise SpecError(
                f"structure and metadata of the trajectory have {len(text):,} bytes, expected at most {MAX_BYTES:,}. "
                "Store large data as leaves."
            )
        return text

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Read a manifest; raises FormatError if it is invalid or has an unknown version."""
        try:
            values = json.loads(text)
            found = values.get("format"), values.get("version")
            if found in ((FORMAT, 1), (FORMAT, VERSION)):
                num_steps = int(values["num_steps"])
                if num_steps < 1:
                    raise FormatError(f"{num_steps} steps, expected at least one.")
                layout, metadata = RowLayout.read(values["structure"]), dict(values["metadata"])
                if found[1] == VERSION:
                    end = None if values["end"] is None else End(values["end"])
                    return cls(num_steps, end, bool(values["reset"]), layout, metadata)
                former = Former(
                    bool(values["boundary_step"]), values["terminated"], values["truncated"], values["end"] == "step"
                )
                return cls(num_steps, None, values["end"] != "cut", layout, metadata, former)
        except (ReverbWriterError, AttributeError, DecodeError, KeyError, TypeError, ValueError) as error:
            raise FormatError(f"its manifest cannot be read: {error!r}") from error
        raise FormatError(
            f"its format is {found[0]!r}, version {found[1]!r}; expected {FORMAT!r}, version 1 or {VERSION}."
        )


def _leaves(nest: Any) -> dict[str, Any]:
    paths, specs = named_leaves(nest, "a step")
    names = [path or "step" for path in paths]
    stored = names + [_lengths(name) for name, spec in zip(names, specs, strict=True) if spec.dtype.kind == "O"]
    if len(set(stored)) != len(stored):
        raise StructureError(f"leaves need different names, got {', '.join(stored)}. Rename a key that has a slash.")
    if unnamable := [name for name in names if "\0" in name]:
        raise StructureError(f"leaf {unnamable[0]!r}: an .npz file cannot name it. Rename the key that has a NUL.")
    return dict(zip(names, specs, strict=True))


def member(name: str) -> str:
    """Return the name of a leaf's member in the zip file."""
    return f"{name}.npy"


def _lengths(name: str) -> str:
    return f"{name}.lengths"


def _strings(read: Read, name: str, shape: tuple[int, ...]) -> Array:
    lengths = read(member(_lengths(name)), np.dtype(np.int64), shape).reshape(-1)
    if lengths.size and lengths.min() < 0:
        raise FormatError(f"leaf `{name}`: a string cannot have a negative length.")
    ends = np.cumsum(lengths).tolist()
    joined = read(member(name), np.dtype(np.uint8), (ends[-1] if ends else 0,)).tobytes()
    strings = np.empty(lengths.size, object)
    strings[:] = [joined[end - length : end] for length, end in zip(lengths.tolist(), ends, strict=True)]
    return strings.reshape(shape)
