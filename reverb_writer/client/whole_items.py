"""Whole items: a nest whose leaves have any lengths becomes one chunk, and an item per table that refers to it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tree

from reverb_writer.errors import StructureError
from reverb_writer.leaves import host_array, stored_dtype
from reverb_writer.nests import fields_of, flattener, named_leaves
from reverb_writer.protocol.item_encoding import KEY_BITS, encode_chunk, encode_one_item, encode_whole_chunks
from reverb_writer.protocol.signatures import ArraySpec, check_signature, spec_tensor
from reverb_writer.protocol.tensors import LeafEncoder
from reverb_writer.transport.in_flight import InsertRequest

Columns = Sequence[npt.NDArray[Any]]


class ItemLayout:
    """The structure of items that differ only in their lengths. Immutable, except for the memory of its encoders.

    Attributes:
        paths, dtypes, shapes: per leaf; shapes are without the axis of the length.
        is_single: per leaf, whether it is one value, without the axis of the length.
        spec: the encoded spec, as the last tensor of each chunk; empty for a nest without names.
        encoders: per leaf; they remember which leaves shrink.
    """

    def __init__(self, nest: Any, paths: Sequence[str], columns: Columns, is_single: Sequence[bool]) -> None:
        """Take the structure of a nest whose leaves are these columns [T_i, ...]; a single value's column is [1, ...].

        Raises:
            StructureError: there is no leaf.
        """
        if not columns:
            raise StructureError(f"an item must have at least one leaf, got {nest!r}.")
        self.paths, self.is_single = tuple(paths), tuple(is_single)
        self.dtypes = [stored_dtype(column.dtype) for column in columns]
        self.shapes = [column.shape[1:] for column in columns]
        self.encoders = [LeafEncoder() for _ in columns]
        self.spec = b""
        if fields_of(nest) is not None:
            self.spec = spec_tensor(tree.unflatten_as(nest, list(map(ArraySpec, self.shapes, self.dtypes))))

    def fits(self, columns: Columns) -> bool:
        """Return whether columns of the same nest have these dtypes and shapes."""
        return self.shapes == [column.shape[1:] for column in columns] and self.dtypes == [
            stored_dtype(column.dtype) for column in columns
        ]

    def check(self, columns: Columns, signatures: Mapping[str, Any]) -> None:
        """Raise StructureError if the columns do not match the signature of a table."""
        for table, signature in signatures.items():
            if signature is not None:
                times = [
                    () if single else column.shape[:1] for column, single in zip(columns, self.is_single, strict=True)
                ]
                check_signature(table, signature, self.paths, self.dtypes, self.shapes, times)


class ItemReader:
    """Reads items of a writer: nests become columns. Items of the structure of the last one are read fast."""

    def __init__(self) -> None:
        """Know no structure yet."""
        self._layout: ItemLayout | None = None

    def read(self, nest: Any) -> tuple[ItemLayout, Columns]:
        """Return the layout of an item, and its columns [T_i, ...], which may share the leaves' memory.

        Raises:
            StructureError: a leaf has no rows, or there is no leaf.
        """
        if self._layout is not None:
            leaves = self._leaves(nest)
            columns = None if leaves is None else self._columns(leaves, self._layout)
            if columns is not None:
                return self._layout, columns
        nest = _with_lists_as_leaves(nest)
        paths, leaves = named_leaves(nest, "item")
        arrays = [host_array(leaf) for leaf in leaves]
        is_single = [array.ndim == 0 for array in arrays]
        columns = [array[None] if single else array for array, single in zip(arrays, is_single, strict=True)]
        for path, column in zip(paths, columns, strict=True):
            _check_rows(path, column)
        layout = ItemLayout(nest, paths, columns, is_single)
        self._flatten, self._layout = flattener(nest), layout
        return layout, columns

    def _leaves(self, nest: Any) -> Sequence[Any] | None:
        """Return the leaves of a nest of the last structure, else None."""
        try:
            return self._flatten(nest)
        except (TypeError, LookupError):
            return None

    @staticmethod
    def _columns(leaves: Sequence[Any], layout: ItemLayout) -> Columns | None:
        """Return the columns of leaves that fit a layout, else None."""
        if len(leaves) != len(layout.dtypes):
            return None
        columns = []
        for leaf, single in zip(leaves, layout.is_single, strict=True):
            if isinstance(leaf, list | tuple | Mapping) and not _is_values(leaf):
                return None  # a nest in place of a leaf
            array = leaf if type(leaf) is np.ndarray else host_array(leaf)
            if single != (array.ndim == 0) or not (single or len(array)):
                return None
            columns.append(array[None] if single else array)
        return columns if layout.fits(columns) else None


def read_item(nest: Any, squeeze: Any = None) -> tuple[ItemLayout, Columns]:
    """Return the layout of one item, and its columns [T_i, ...], which may share the leaves' memory.

    `squeeze` is a nest of booleans like `nest`, true for a leaf of one value, [...] without time; None for no leaf.

    Raises:
        StructureError: a leaf has no rows or no time, or there is no leaf.
    """
    paths, leaves = named_leaves(nest, "`data`")
    is_single = [False] * len(leaves) if squeeze is None else list(map(bool, tree.flatten(squeeze)))
    if len(is_single) != len(leaves):
        raise StructureError(f"`squeeze` must have a leaf for each of the {len(leaves)} of `data`, got {squeeze!r}.")
    columns = [
        np.asarray(leaf)[None] if single else np.asarray(leaf) for leaf, single in zip(leaves, is_single, strict=True)
    ]
    for path, column in zip(paths, columns, strict=True):
        _check_rows(path, column)
    return ItemLayout(nest, paths, columns, is_single), columns


def item_request(
    layout: ItemLayout, columns: Columns, priorities: Mapping[str, float], key: int | None = None
) -> InsertRequest:
    """Encode one item per table, with keys `key`, `key` + 1, ...; if `key` is None, the first one is random."""
    first_key = secrets.randbits(KEY_BITS) if key is None else key
    chunk_key = secrets.randbits(KEY_BITS)
    rows, chunk = encode_item(layout, columns, priorities, chunk_key, first_key)
    return InsertRequest(frozenset(priorities), first_key, rows, {chunk_key: chunk})


def one_item(
    columns: Columns, is_single: Sequence[bool], priorities: Mapping[str, float], key: int | None = None
) -> InsertRequest:
    """Encode one item per table, of columns [T_i, ...] without names; single columns have one row."""
    layout = ItemLayout(columns, [*map(str, range(len(columns)))], columns, is_single)
    return item_request(layout, columns, priorities, key)


def encode_item(
    layout: ItemLayout, columns: Columns, priorities: Mapping[str, float], chunk_key: int, key: int
) -> tuple[list[npt.NDArray[np.uint8]], bytes]:
    """Encode an item per table, with keys `key`, `key` + 1, ..., and the chunk that they share.

    The items are [1, size] bytes, as `encode_items` makes them.
    """
    trajectory = encode_whole_chunks(chunk_key, [*map(len, columns)], layout.is_single)
    rows = [
        np.frombuffer(encode_one_item(table, item_key, priority, trajectory), np.uint8)[None]
        for item_key, (table, priority) in enumerate(priorities.items(), key)
    ]
    return rows, encode_chunk(chunk_key, chunk_key, 0, columns, spec=layout.spec, encoders=layout.encoders)


def _check_rows(path: str, column: npt.NDArray[Any]) -> None:
    if column.ndim == 0 or not column.shape[0]:
        raise StructureError(
            f"leaf `{path}`: shape {column.shape}, expected [T, ...] with T >= 1. For a single value pass "
            "`value[None]`; a sequence without rows cannot be stored, so leave its item out."
        )


def _with_lists_as_leaves(nest: Any) -> Any:
    """Return a nest in which each list of numbers or strings is an array."""
    return tree.traverse(lambda part: host_array(part) if _is_values(part) else None, nest)


def _is_values(part: Any) -> bool:
    """Return whether a part is a list of numbers or strings, which is one leaf."""
    return isinstance(part, list) and all(isinstance(value, int | float | complex | str | bytes) for value in part)
