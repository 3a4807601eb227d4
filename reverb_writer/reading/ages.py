"""Versions of samples: the weights with which an actor made an item, and the age of the item by the learner's count.

Actors store the version of their weights with each item. The learner assigns the newest version; the age of an item is
the newest version less the item's version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from reverb_writer import rows as of_rows
from reverb_writer.decoding.samples import SampleRows
from reverb_writer.errors import StructureError
from reverb_writer.nests import join_paths, named_leaves
from reverb_writer.slices.axes import Integers

Pack = Callable[[Sequence[Any]], Any]
_NO_VERSION = np.iinfo(np.int64).max


def versions_of(samples: SampleRows, pack: Pack, path: str) -> Integers:
    """Return the version of each sample, [n] int64: the smallest one among its rows.

    Rows without an action do not count if the rows have kinds, because writers fill them with zeros.

    Args:
        samples: at least one sample.
        pack: makes the table's nest of a value per column.
        path: path of the leaf with the versions.

    Raises:
        StructureError: no leaf has this path, or its rows are not integers.
    """
    column = _column(samples.num_columns, pack, path)
    values, lengths = samples.copy_of(column), samples.lengths[column]
    if values.dtype.kind not in "iu" or values.ndim != 1:
        raise StructureError(
            f"leaf `{path}`: {values.dtype} {list(values.shape[1:])} per row, expected an integer: the version of an "
            "item. Pass the path of another leaf as `version`."
        )
    values, starts = values.astype(np.int64), lengths.cumsum() - lengths
    kinds = samples.copy_of_kinds()
    if kinds is None:
        oldest: Integers = np.minimum.reduceat(values, starts)
        return oldest
    oldest = np.minimum.reduceat(np.where(of_rows.has(kinds, of_rows.ACTION), values, _NO_VERSION), starts)
    return np.where(oldest == _NO_VERSION, values[starts], oldest)


def _column(num_columns: int, pack: Pack, path: str) -> int:
    """Return the number of the column of a leaf."""
    paths, columns = named_leaves(pack([*range(num_columns)]), "the items")
    found: dict[str, int] = dict(zip(paths, columns, strict=True))
    if path not in found:
        raise StructureError(
            f"the items have no leaf `{path}` with their version, only {join_paths(paths)}. Store a version with each "
            "item, or pass the path of its leaf as `version`."
        )
    return found[path]
