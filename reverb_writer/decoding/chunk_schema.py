"""Dtypes and shapes of a chunk's columns, checked once for all chunks that have the same ones."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from reverb_writer.errors import FormatError
from reverb_writer.protocol import tensors

DtypesAndShapes = Sequence[tuple[np.dtype[Any], tuple[int, ...]]]
EncodedHeader = tuple[int, bytes]
"""A tensor's dtype, a `messages.DataType`, and its shape, an encoded TensorShapeProto."""

_MAX_COLUMNS, _MAX_SHAPE_BYTES = 256, 8192  # of schemas that are cached


class ChunkSchema:
    """Dtypes and shapes of a chunk's columns. Equal small schemas are one shared object: compare with `is`."""

    def __init__(self, encoded_headers: Sequence[EncodedHeader]) -> None:
        """Parse the headers of a chunk's tensors; see `tensors.parse_header` for errors."""
        self.headers = [tensors.parse_header(*header) for header in encoded_headers]  # of each column's tensor
        if not all(header.shape and header.shape[0] for header in self.headers):
            raise FormatError("a tensor of a chunk has no rows.")
        # of each column, without the time dimension
        self.dtypes_and_shapes = [(header.dtype, header.shape[1:]) for header in self.headers]
        # number of rows that all columns have. Valid items name no rows that only some columns have
        self.length = min([header.shape[0] for header in self.headers])
        # decoded size, without the characters of strings
        self.num_bytes = sum([header.num_bytes for header in self.headers])
        self.has_strings = any(header.dtype.kind == "O" for header in self.headers)  # whether a column has strings
        have_equal_lengths = all(header.shape[0] == self.length for header in self.headers)
        # whether each tensor's content decompresses to the memory of a column of `length` rows
        self.is_raw = have_equal_lengths and not self.has_strings and sys.byteorder == "little"
        # indices of the columns of booleans
        self.boolean_columns = [number for number, header in enumerate(self.headers) if header.dtype.kind == "b"]

    def has_usual_sizes(self, contents: Sequence[bytes | memoryview]) -> bool:
        """Return whether snappy blocks have the expected length prefixes, and may be as large as those say.

        A block for which this is False may still be valid, because a length can be encoded in more than one way.
        """
        return all(
            [  # noqa: C419  # twice as fast as a generator
                content[: len(header.length_prefix)] == header.length_prefix and len(content) >= header.min_block_bytes
                for content, header in zip(contents, self.headers, strict=True)
            ]
        )


def schema_of(encoded_headers: tuple[EncodedHeader, ...]) -> ChunkSchema:
    """Return the schema of a chunk with these tensors; the same object for equal headers, if they are small."""
    shape_bytes = sum([len(shape) for _, shape in encoded_headers])
    is_small = len(encoded_headers) <= _MAX_COLUMNS and shape_bytes <= _MAX_SHAPE_BYTES
    return _cached_schema(encoded_headers) if is_small else ChunkSchema(encoded_headers)


_cached_schema = functools.lru_cache(maxsize=256)(ChunkSchema)
