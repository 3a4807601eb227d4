"""The description of a trajectory on disk: the member `manifest.json` of its file.

    format, version               "reverb-writer trajectory" and the format's version
    num_steps                     number of steps, including the boundary step
    boundary_step                 whether the last step only holds the final observation, as in TF-Agents and RLDS
    end                           kind of its end, a value of `End`
    terminated                    whether the environment ended it; null: unknown
    truncated                     whether a limit ended it, so that its final state has a value; null: unknown
    structure                     the nest of one step with dtypes and shapes: a signature of Reverb, in base 64
    metadata                      the user's data

Each leaf is an array named by its path, such as `observation/rgb`; the array of a step without a nest is named `step`.
The strings of a leaf `text` are stored as their joined bytes, and their lengths as the array `text.lengths`.

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
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from reverb_writer.errors import FormatError, ReverbWriterError, StructureError
from reverb_writer.nests import named_leaves
from reverb_writer.protocol import signatures
from reverb_writer.protocol.messages import StructuredValue
from reverb_writer.slices.markers import read_markers
from reverb_writer.steps import boundary_steps

Array = npt.NDArray[Any]
Read = Callable[[str, np.dtype[Any], tuple[int, ...]], Array]
"""Reads an array from a file, given its name, dtype and shape."""

FORMAT = "reverb-writer trajectory"
VERSION = 1


class End(enum.Enum):
    """The kind of a trajectory's end; an import ends the episode in the same way."""

    STEP = "step"  # by the last step of the episode
    RESET = "reset"  # by `reset()`, with the cached steps written
    CUT = "cut"  # by `reset(discard=True)` or `close()`


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
            columns.append(_strings(read, name, shape) if is_text else read(name, spec.dtype, shape).copy())
        return columns


@dataclass(frozen=True)
class Manifest:
    """The description of a trajectory, with the fields listed above; `layout` is `structure`."""

    num_steps: int
    boundary_step: bool
    end: End
    terminated: bool | None
    truncated: bool | None
    layout: RowLayout
    metadata: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        num_steps: int,
        last_rows: Any,
        end: End,
        layout: RowLayout,
        metadata: Mapping[str, Any],
        *,
        terminated: bool | None = None,
        truncated: bool | None = None,
        has_boundary: bool = False,
    ) -> Manifest:
        """Describe a trajectory; `last_rows`, leaves [2, ...], supply the outcome if the caller does not."""
        is_boundary = boundary_steps(last_rows)
        if end is not End.STEP:
            terminated, truncated = terminated or False, True if truncated is None else truncated
        else:
            has_boundary = has_boundary or (is_boundary is not None and bool(is_boundary[-1]))
            if terminated is None and truncated is None:
                markers = read_markers(last_rows)
                terminated = None if markers.terminated is None else bool(markers.terminated[-1])
                truncated = None if markers.truncated is None else bool(markers.truncated[-1])
            if truncated is None and terminated is not None:
                truncated = not terminated
        return cls(num_steps, has_boundary, end, terminated, truncated, layout, metadata)

    @property
    def num_transitions(self) -> int:
        """The number of steps with an action: all but the boundary step."""
        return self.num_steps - self.boundary_step

    def to_json(self) -> str:
        """Return the manifest as JSON."""
        plain = {name: getattr(self, name) for name in ("num_steps", "boundary_step", "terminated", "truncated")}
        plain |= {"end": self.end.value, "structure": self.layout.encoded, "metadata": dict(self.metadata)}
        return json.dumps({"format": FORMAT, "version": VERSION, **plain})

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Read a manifest; raises FormatError if it is invalid or has another version."""
        try:
            values = json.loads(text)
            found = values.get("format"), values.get("version")
            if found == (FORMAT, VERSION):
                num_steps = int(values["num_steps"])
                if num_steps < 1:
                    raise FormatError(f"{num_steps} steps, expected at least one.")
                return cls(
                    num_steps,
                    bool(values["boundary_step"]),
                    End(values["end"]),
                    values["terminated"],
                    values["truncated"],
                    RowLayout.read(values["structure"]),
                    dict(values["metadata"]),
                )
        except (ReverbWriterError, AttributeError, DecodeError, KeyError, TypeError, ValueError) as error:
            raise FormatError(f"its manifest cannot be read: {error!r}") from error
        raise FormatError(f"its format is {found[0]!r}, version {found[1]!r}; expected {FORMAT!r}, version {VERSION}.")


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
    strings[:] = [joined[end - length : end] for length, end in zip(lengths.tolist(), ends, strict=True)]
    return strings.reshape(shape)
