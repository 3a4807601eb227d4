"""Samples of one length, or of many, as one batch. Pure functions of arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import tree

from reverb_writer.decoding.samples import Column, SampleInfos
from reverb_writer.errors import StructureError

__all__ = ["Batch", "BatchInfo", "Collate", "collate"]

Array = npt.NDArray[Any]
Collate = Literal["error", "pad", "list", "flat"]


@dataclass(frozen=True)
class BatchInfo(SampleInfos):
    """What is known of the B samples of a batch; see `SampleInfos` for what the server tells.

    Attributes:
        lengths: [B] int64, rows of each sample; of its longest leaf, should leaves differ.
        mask: [B, T] bool, True for rows that are real; with `collate="pad"` only, else None.
        server: address of the server that they come from.
    """

    lengths: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_] | None
    server: str

    def importance_weights(self, exponent: float = 1.0) -> npt.NDArray[np.float64]:
        """Return [B] weights that make up for sampling by priority, the largest of them 1.

        They are (table size x probability) ** -exponent, divided by the largest. A batch comes from one server. They do
        not make up for this: servers with fewer items give as many batches as others.

        Args:
            exponent: beta, 0 for none of it to 1 for all.

        Source: Schaul et al. 2016, Prioritized Experience Replay, section 3.4.
        """
        weights: npt.NDArray[np.float64] = (self.table_sizes * self.probabilities) ** -exponent
        weights /= weights.max()
        return weights


class Batch(NamedTuple):
    """A batch of samples.

    Attributes:
        data: the table's nest, leaves [B, T, ...]; other `collate`s differ, see `ReplayDataset`.
        info: keys, priorities, probabilities, table sizes, times sampled, and lengths.
    """

    data: Any
    info: BatchInfo

    def map_arrays(self, convert: Callable[[Array], Any]) -> Batch:
        """Return the batch with each array of the data converted, as for a framework; the info stays as it is."""
        return Batch(tree.map_structure(convert, self.data), self.info)

    def numbers(self) -> dict[str, Array]:
        """Return what there is beside the data as a dict of arrays."""
        return {name: value for name, value in vars(self.info).items() if isinstance(value, np.ndarray)}


def collate(
    columns: Sequence[Column], infos: SampleInfos, pack: Callable[[Sequence[Any]], Any], how: Collate, server: str
) -> Batch:
    """Make a batch of samples.

    Args:
        columns: of B samples.
        infos: of them.
        pack: makes the table's nest of a list of leaves.
        how: what becomes of samples that differ in length: "error", "pad" with zeros and a mask, "list" for a list of B
            nests, or "flat" for leaves [sum of lengths, ...].
        server: for the info.

    Raises:
        StructureError: samples differ in length, and `how` is "error"; or in dtype or shape, and it is not "list".
    """
    lengths = np.max([column.lengths for column in columns], axis=0)
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
            mask = np.arange(lengths.max()) < lengths[:, None]
        else:
            data = pack([_stacked(column, number) for number, column in enumerate(columns)])
    given = {field.name: getattr(infos, field.name) for field in fields(SampleInfos)}
    return Batch(data, BatchInfo(**given, lengths=lengths, mask=mask, server=server))


def _stacked(column: Column, number: int) -> Array:
    rows, lengths = column.rows, column.lengths
    assert isinstance(rows, np.ndarray)  # noqa: S101  # the caller has looked
    if column.is_scalar:
        return rows
    if (lengths != lengths[0]).any():
        raise StructureError(
            f"column {number}: samples of {lengths.min()} to {lengths.max()} rows in one batch, expected one length. "
            "Pass `collate='pad'`, 'list' or 'flat'."
        )
    return rows.reshape(len(lengths), lengths[0], *rows.shape[1:])


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
