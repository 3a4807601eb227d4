"""Items that are larger than their table allows are refused before anything of them is sent. Pure.

The limit, `max_item_bytes`, comes with every ServerInfo; see `protocol.table_specs`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from reverb_writer.errors import StructureError
from reverb_writer.table_info import ServerInfo


def item_limits(info: ServerInfo, tables: Iterable[str]) -> dict[str, int]:
    """Return the limits of those tables that have one, in bytes."""
    return {table: limit for table in tables if (limit := info.tables[table].max_item_bytes)}


def column_bytes(column: Any) -> int:
    """Return the bytes of an array, uncompressed; of strings those of their text.

    >>> column_bytes(np.zeros((2, 3), np.float32)), column_bytes(np.array(["ab", b"c"], object))
    (24, 3)
    """
    if isinstance(column, str | bytes):
        return len(column.encode() if isinstance(column, str) else column)
    array = np.asarray(column)
    return sum(map(column_bytes, array.flat)) if array.dtype.kind in "OUS" else array.nbytes


def check_columns(limits: Mapping[str, int], paths: Sequence[str], columns: Sequence[Any]) -> None:
    """Check the columns of one item.

    Raises:
        StructureError: they are larger than a table allows; names the largest.
    """
    if limits:
        table = min(limits, key=lambda name: limits[name])
        sizes = [column_bytes(column) for column in columns]
        if sum(sizes) > limits[table]:
            raise too_large(table, limits[table], "the item", paths, sizes)


def too_large(table: str, limit: int, what: str, paths: Sequence[str], sizes: Sequence[int]) -> StructureError:
    """Return the error that says what is too large for a table, by how much, and which leaf takes most of it."""
    size, path = max(zip(sizes, paths, strict=True))
    return StructureError(
        f"table `{table}`: {what} takes {sum(sizes)} bytes uncompressed, expected at most {limit}, the table's "
        f"`max_item_bytes`. Its largest leaf is `{path}` with {size} bytes. Write fewer steps in an item, make that "
        "leaf smaller, or raise the server's limit."
    )
