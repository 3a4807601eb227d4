"""The size of an item: the bytes of its rows, uncompressed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from reverb_writer.errors import ReverbWriterError
from reverb_writer.local.chunk_store import Chunk
from reverb_writer.local.refusals import Refusal, Status
from reverb_writer.protocol import messages, tensors
from reverb_writer.protocol.trajectory_parsing import Parsed


def check_item_size(item_key: int, parsed: Parsed, chunks: Mapping[int, Chunk], max_bytes: int) -> None:
    """Refuse an item that is larger than the server allows.

    Args:
        item_key: key of the item.
        parsed: trajectory of the item.
        chunks: chunks of the item, by key.
        max_bytes: limit of the size of an item.

    Raises:
        Refusal: the item is larger, or a chunk is damaged.
    """
    layout, slices = parsed
    sizes: dict[int, int] = {}
    try:
        for group, pieces in zip(layout.groups, slices, strict=True):
            for key, first, length in pieces:
                for column, tensor in zip(group.columns, group.tensors, strict=True):
                    row = _row_bytes(chunks[key])[tensor]
                    added = length * row if isinstance(row, int) else sum(row[first : first + length])
                    sizes[column] = sizes.get(column, 0) + added
    except ReverbWriterError as error:
        raise Refusal(Status.INVALID_ARGUMENT, f"item {item_key} refers to a damaged chunk: {error}") from None
    total = sum(sizes.values())
    if total > max_bytes:
        largest = max(sizes, key=lambda column: sizes[column])
        raise Refusal(
            Status.INVALID_ARGUMENT,
            f"item {item_key} takes {total} bytes, expected at most {max_bytes}, the server's `max_item_bytes`; its "
            f"largest column, {largest}, takes {sizes[largest]}. Write shorter items, or raise the limit.",
        )


def _row_bytes(chunk: Chunk) -> list[int | list[int]]:
    """Return, for each tensor, the size of a row in bytes, or the sizes of all rows of strings."""
    if chunk.row_bytes is None:
        chunk.row_bytes = [_of_tensor(one) for one in messages.ChunkData.FromString(chunk.data).data.tensors]
    return chunk.row_bytes


def _of_tensor(tensor: Any) -> int | list[int]:
    header = tensors.parse_header(tensor.dtype, tensor.tensor_shape.SerializeToString())
    num_rows, *shape = header.shape or (1,)
    per_row = math.prod(shape)
    if header.dtype.kind != "O" or not per_row:
        return per_row * header.dtype.itemsize
    lengths = [len(one) for one in tensors.decode_strings(tensor.tensor_content, tensor.string_val, num_rows * per_row)]
    return [sum(lengths[row * per_row : (row + 1) * per_row]) for row in range(num_rows)]
