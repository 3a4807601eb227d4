"""How samples of equal or different lengths become one batch. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from reverb_writer.decoding.samples import BatchInfo, Column
from reverb_writer.errors import SpecError, StructureError
from reverb_writer.slices.batch import Batch

Array = npt.NDArray[Any]
Collate = Literal["error", "pad", "list", "flat"]


def collate(
    columns: Sequence[Column], info: BatchInfo, pack: Callable[[Sequence[Any]], Any], how: Collate, server: str
) -> Batch:
    """Make a batch of samples."""
    mask = None
    if how == "list":
        data: Any = [pack(leaves) for leaves in zip(*[column.split() for column in columns], strict=True)]
    else:
        for number, column in enumerate(columns):
            if isinstance(column.rows, list):
                kinds = sorted({f"{rows.dtype} {rows.shape[1:]}" for rows in column.rows})
                raise StructureError(
                    f"column {number}: samples differ in dtype or shape ({', '.join(kinds)}). Pass "
                    "`collate='list'`, or find the actor that differs."
                )
        if how == "flat":
            data = pack([column.rows for column in columns])
        elif how == "pad":
            data = pack([_padded(column) for column in columns])
            mask = np.arange(info.lengths.max()) < info.lengths[:, None]
        else:
            _check_same_lengths(columns)
            data = pack([_stacked(column) for column in columns])
    if server or mask is not None:
        info = dataclasses.replace(info, mask=mask, server=server)
    return Batch(data, info)


def transformed(batch: Batch, transform: Callable[[Batch], Batch]) -> Batch:
    """Return what the learner's function makes of a batch."""
    found = transform(batch)
    if not isinstance(found, Batch):
        raise SpecError(
            f"`transform` must return a Batch, such as `dataclasses.replace(batch, data=...)`, got "
            f"{type(found).__name__}."
        )
    return found


def _check_same_lengths(columns: Sequence[Column]) -> None:
    checked: Any = None
    for number, column in enumerate(columns):
        lengths = column.lengths
        if column.is_scalar or lengths is checked:  # most columns of a table have the same array
            continue
        if np.count_nonzero(lengths == lengths[0]) < len(lengths):
            raise StructureError(
                f"column {number}: samples of {lengths.min()} to {lengths.max()} rows in one batch, expected one "
                "length. Pass `collate='pad'`, 'list' or 'flat'."
            )
        checked = lengths


def _stacked(column: Column) -> Array:
    rows, lengths = column.rows, column.lengths
    assert isinstance(rows, np.ndarray)  # noqa: S101  # the caller has looked
    return rows if column.is_scalar else rows.reshape(len(lengths), lengths[0], *rows.shape[1:])


def _padded(column: Column) -> Array:
    rows, lengths = column.rows, column.lengths
    assert isinstance(rows, np.ndarray)  # noqa: S101  # the caller has looked
    if column.is_scalar:
        return rows
    longest = lengths.max()
    if (lengths == longest).all():
        return rows.reshape(len(lengths), longest, *rows.shape[1:])
    fill = b"" if rows.dtype.kind == "O" else 0
    padded = np.full((len(lengths), longest, *rows.shape[1:]), fill, rows.dtype)
    padded[np.arange(longest) < lengths[:, None]] = rows
    return padded
