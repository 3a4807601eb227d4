"""Records of arrays whose fields declare their axis: functions to take entries, join records and convert arrays.

    axis      a field has one entry per
    ROWS      row of slices that are laid end to end, [N, ...]
    SAMPLES   sample or slice, [B, ...] or [S, ...]

A field with an axis is an array, a nest of arrays, or None. Other fields belong to the record as a whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import tree

Flags = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]
Kinds = npt.NDArray[np.uint8]

ROWS, SAMPLES = {"axis": "rows"}, {"axis": "samples"}
"""Metadata of a field of a dataclass."""

_RecordT = TypeVar("_RecordT")


def axes(record: Any) -> dict[str, str]:
    """Return the axis of each field that has one and is not None, by name."""
    present = [field for field in dataclasses.fields(record) if getattr(record, field.name) is not None]
    return {field.name: field.metadata["axis"] for field in present if field.metadata}


def converted(record: _RecordT, convert: Callable[[Any], Any]) -> _RecordT:
    """Return a record with each of its arrays converted; arrays in records inside it do not change."""
    return _replaced(record, {name: _mapped(convert, getattr(record, name)) for name in axes(record)})


def taken(record: _RecordT, *, samples: Any, rows: Any = None) -> _RecordT:
    """Return some entries of a record, by NumPy indices of each axis; slices give views."""
    index = {"samples": samples, "rows": rows}
    found = {
        name: _mapped(lambda leaf, axis=axis: leaf[index[axis]], getattr(record, name))
        for name, axis in axes(record).items()
    }
    return _replaced(record, found)


def joined(records: Sequence[_RecordT], **others: Any) -> _RecordT:
    """Return records as one record, with `others` as further fields; a field that a record lacks is None."""
    found: dict[str, Any] = {}
    for name in axes(records[0]).keys() - others.keys():
        nests = [getattr(record, name) for record in records]
        is_of_all = all(nest is not None for nest in nests)
        found[name] = _mapped(lambda *leaves: np.concatenate(leaves), *nests) if is_of_all else None
    return _replaced(records[0], found | others)


def _mapped(function: Callable[..., Any], *nests: Any) -> Any:
    """Apply a function to the leaves of nests; `tree` takes ten times as long for one array."""
    return function(*nests) if isinstance(nests[0], np.ndarray) else tree.map_structure(function, *nests)


def _replaced(record: _RecordT, found: dict[str, Any]) -> _RecordT:
    replaced: _RecordT = dataclasses.replace(record, **found)  # type: ignore[type-var]  # every record is a dataclass
    return replaced
