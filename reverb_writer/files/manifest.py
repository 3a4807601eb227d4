"""The description of a trajectory on disk: `manifest.json`.

    trajectory_01764000000000000000_1f3a9c2e_00000007/
        manifest.json                     the manifest; written last, so a trajectory without it is half-written
        steps_000000_000256.npz           steps 0..255: one array per leaf, [256, ...]
        steps_000256_000301.npz           steps 256..300

Leaves are stored by name, `observation/rgb.npy` in the `.npz`, in one of these encodings:

    raw                 unchanged
    deflate             compressed, lossless; default for images: uint8 leaves of two or more dimensions
    normalized_image    floats in [0, 1] as uint8: clipped, times 255, truncated; comes back within 1/255
    strings             all bytes one after the other, uint8 [bytes], and beside them their lengths, `NAME.lengths`

A reader checks the manifest by its own CRC-32, and each file by its size and CRC-32.

The structure of a step is a nest in JSON:

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

import enum
import itertools
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import tree

from reverb_writer.errors import FormatError, ReverbWriterError, StructureError
from reverb_writer.nests import join_path
from reverb_writer.protocol.messages import DataType
from reverb_writer.protocol.tensors import dtype_of
from reverb_writer.steps import named_tuple

_MAX_DEPTH = 32


FORMAT = "reverb-writer trajectory"
VERSION = 1
_DTYPES = {name: np.dtype(name) for name in ("bool", "float16", "float32", "float64", "complex64", "complex128")}
_DTYPES |= {f"{sign}int{bits}": np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)}
_DTYPES["object"] = np.dtype(object)


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
        return named_tuple(str(value[kind]), tuple(fields))(*(_decode(part, depth + 1) for part in fields.values()))
    raise ValueError(f"expected a leaf's number, dict, list, tuple or named tuple, got {str(value)[:80]!r}.")


class Encoding(enum.Enum):
    """How a leaf is stored."""

    RAW = "raw"
    DEFLATE = "deflate"
    NORMALIZED_IMAGE = "normalized_image"
    STRINGS = "strings"


class End(enum.Enum):
    """How a trajectory ended; an importing observer ends its episode in the same way."""

    STEP = "step"  # its last step was the last of the episode
    RESET = "reset"  # by `reset()`, with the cached steps written
    CUT = "cut"  # by `reset(discard=True)` or `close()`


@dataclass(frozen=True)
class Leaf:
    """One leaf of the steps: its name, dtype, shape of one step, encoding."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    encoding: Encoding


@dataclass(frozen=True)
class Part:
    """One file: steps [start, stop), its size in bytes and its CRC-32."""

    file: str
    start: int
    stop: int
    size: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """The description of a trajectory on disk.

    Attributes:
        num_steps: steps, the boundary step included.
        boundary_step: whether the last step only holds the final observation, as in TF-Agents and RLDS.
        end: how it ended.
        terminated: whether the environment ended it; None if it is not known.
        truncated: whether a limit ended it, so that the state after it has a value; None if it is not known.
        structure: the nest of a step, with numbers for leaves.
        leaves: the leaves, by number.
        parts: the files, in order.
        metadata: what the writer was given to keep with it; JSON.
    """

    num_steps: int
    boundary_step: bool
    end: End
    terminated: bool | None
    truncated: bool | None
    structure: Any
    leaves: Sequence[Leaf]
    parts: Sequence[Part]
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_transitions(self) -> int:
        """The steps that have an action: all but the boundary step."""
        return self.num_steps - self.boundary_step

    def to_json(self) -> str:
        """Return the manifest as JSON; `structure` must be JSON already, see `encode_nest`."""
        values = {
            "format": FORMAT,
            "version": VERSION,
            **{name: getattr(self, name) for name in ("num_steps", "boundary_step", "terminated", "truncated")},
            "end": self.end.value,
            "structure": self.structure,
            "leaves": [
                {"name": leaf.name, "dtype": leaf.dtype.name, "shape": leaf.shape, "encoding": leaf.encoding.value}
                for leaf in self.leaves
            ],
            "parts": [asdict(part) for part in self.parts],
            "metadata": dict(self.metadata),
        }
        return json.dumps({**values, "crc32": _crc32(values)})

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Read a manifest; `structure` becomes a nest with numbers for leaves."""
        try:
            values = json.loads(text)
            crc32 = values.pop("crc32")
            found = values.get("format"), values.get("version")
            if found == (FORMAT, VERSION) and crc32 == _crc32(values):
                return cls._from_values(values)
        except (ReverbWriterError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise FormatError(f"its manifest cannot be read: {error!r}") from error
        if found != (FORMAT, VERSION):
            raise FormatError(
                f"its format is {found[0]!r}, version {found[1]!r}; expected {FORMAT!r}, version {VERSION}."
            )
        raise FormatError("the checksum of its manifest is wrong: it was changed after it was written.")

    @classmethod
    def _from_values(cls, values: Mapping[str, Any]) -> Manifest:
        manifest = cls(
            num_steps=int(values["num_steps"]),
            boundary_step=bool(values["boundary_step"]),
            end=End(values["end"]),
            terminated=values["terminated"],
            truncated=values["truncated"],
            structure=decode_nest(values["structure"]),
            leaves=[_leaf(**leaf) for leaf in values["leaves"]],
            parts=[Part(**part) for part in values["parts"]],
            metadata=values["metadata"],
        )
        _check_parts(manifest)
        return manifest


def _crc32(values: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(values, sort_keys=True, separators=(",", ":")).encode())


def _leaf(name: str, dtype: str, shape: Sequence[int], encoding: str) -> Leaf:
    found = dtype_of(DataType.DT_BFLOAT16) if dtype == "bfloat16" else _DTYPES[dtype]
    sizes = tuple(int(size) for size in shape)
    if min(sizes, default=0) < 0 or (found.kind == "O") != (Encoding(encoding) is Encoding.STRINGS):
        raise FormatError(f"leaf `{name}`: {dtype} {shape} cannot be encoded as {encoding}.")
    return Leaf(str(name), found, sizes, Encoding(encoding))


def _check_parts(manifest: Manifest) -> None:
    at = 0
    for part in manifest.parts:
        if part.start != at or part.stop <= at or "/" in part.file or "\\" in part.file:
            raise FormatError(f"`{part.file}` has steps {part.start} to {part.stop}, expected from {at} on.")
        at = part.stop
    if at != manifest.num_steps or not at:
        raise FormatError(f"its files have {at} steps, expected {manifest.num_steps}, at least one.")
