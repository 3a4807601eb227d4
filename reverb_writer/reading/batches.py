"""Batches, and how samples of equal or different lengths become one. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import tree

from reverb_writer.decoding.samples import BatchInfo, Column
from reverb_writer.errors import SpecError, StructureError
from reverb_writer.nests import join_paths, named_leaves, shapes_text
from reverb_writer.slices import SliceMarkers
from reverb_writer.transitions.step_flags import split_mask

Array = npt.NDArray[Any]
Collate = Literal["error", "pad", "list", "flat"]


@dataclass(frozen=True, repr=False)
class Batch:
    """A batch of samples; `data, info = batch` works too. Printed, it shows shapes instead of numbers.

    Attributes:
        data: the table's nest. From a `ReplayDataset`, leaves [B, T, ...]; other `collate`s differ, see there. From a
            `ContiguousDataset`, leaves [N, ...]: slices laid end to end.
        info: [B] keys, priorities, probabilities, table sizes, times sampled, and lengths. From a `ContiguousDataset`,
            [S], of the item that each slice is of.
        markers: `SliceMarkers` [N] of a batch from a `ContiguousDataset`; else None.
        next: from a `ContiguousDataset` with `with_next`, leaves [S, ...]: the row that follows each slice in its
            trajectory. Where `markers.slices.cut_by_sampler` is False no row follows, and it is the slice's last row.
    """

    data: Any
    info: BatchInfo
    markers: SliceMarkers | Any = None  # Any: readers of slices need not check for None
    next: Any = None

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the data and the info."""
        return iter((self.data, self.info))

    def __repr__(self) -> str:
        return shapes_text(self)

    def __getattr__(self, name: str) -> Any:
        """Say where a leaf of the data is, which is no attribute of the batch."""
        if name.startswith("_") or "data" not in vars(self):  # such as in a copy that is not complete yet
            raise AttributeError(name)
        raise AttributeError(f"a Batch has no `{name}`{_whereabouts(self.data, name)}")

    def map_arrays(self, convert: Callable[[Array], Any], convert_info: Callable[[Array], Any] | None = None) -> Batch:
        """Return the batch with each array [...] of data, markers and `next` as `convert` returns it.

        `convert_info` does the same for the arrays of the info, [B]; None for `convert`.
        """
        markers = None if self.markers is None else self.markers.map_arrays(convert)
        after = None if self.next is None else tree.map_structure(convert, self.next)
        info = self.info if convert_info is None else self.info.map_arrays(convert_info)
        return Batch(tree.map_structure(convert, self.data), info, markers, after)

    def pin_memory(self) -> Batch:
        """Return the batch with its tensors pinned, as `DataLoader(pin_memory=True)` asks for."""
        return self.map_arrays(_pinned, _pinned)

    def numbers(self) -> dict[str, Array]:
        """Return the arrays of `info`, [B], and of `markers`, [N], by name."""
        named = {**vars(self.info), **({} if self.markers is None else vars(self.markers))}
        return {name: value for name, value in named.items() if isinstance(value, np.ndarray)}


def _pinned(tensor: Any) -> Any:
    return tensor.pin_memory() if hasattr(tensor, "pin_memory") else tensor  # strings are lists, or bytes in one


def _whereabouts(data: Any, name: str) -> str:
    """Return where a leaf is, or which there are; ends the message about one that was looked for elsewhere."""
    steps, mask = split_mask(data)
    fields = steps._asdict() if hasattr(steps, "_asdict") else steps
    if not isinstance(fields, Mapping):
        return f", only `data`, a {type(data).__name__}, `info`, `markers` and `next`."
    if name in fields:
        of_data = "batch.data" if mask is None else "batch.data[0]"
        leaf = f"{of_data}[{name!r}]" if isinstance(steps, Mapping) else f"{of_data}.{name}"
        return f": it is a part of the data, `{leaf}`."
    return f"; the leaves of its data are {join_paths(named_leaves(steps, 'the data')[0])}."


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
    return Batch(data, dataclasses.replace(info, mask=mask, server=server))


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
        if (lengths != lengths[0]).any():
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
