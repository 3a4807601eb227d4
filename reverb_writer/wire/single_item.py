"""One item with a chunk of its own, for what is not written step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from reverb_writer.errors import StructureError
from reverb_writer.wire import messages
from reverb_writer.wire.in_flight import InsertRequest
from reverb_writer.wire.items import KEY_LIMIT, encode_chunk

__all__ = ["column", "one_item"]


def column(path: Sequence[Any], leaf: Any) -> Any:
    """Return a leaf as a column [T, ...], checked."""
    array = np.asarray(leaf)
    if array.ndim == 0 or array.shape[0] == 0:
        name = "/".join(map(str, path))
        raise StructureError(
            f"leaf `{name}`: shape {array.shape}, expected [T, ...] with T >= 1. For a single value pass `value[None]`."
        )
    return array


def one_item(columns: Sequence[Any], priorities: Mapping[str, float], key: int | None = None) -> InsertRequest:
    """Encode one item a table over one chunk, the columns of which may differ in length; `key` is the item's."""
    random = np.random.default_rng()
    draw: Callable[[], int] = lambda: int(random.integers(KEY_LIMIT))  # noqa: E731  # a name for three draws
    chunk_key = draw()
    chunk = encode_chunk(chunk_key, draw(), 0, columns)
    slices = messages.FlatTrajectory(
        columns=[
            messages.FlatTrajectory.Column(
                chunk_slices=[
                    messages.FlatTrajectory.ChunkSlice(chunk_key=chunk_key, offset=0, length=len(column), index=index)
                ]
            )
            for index, column in enumerate(columns)
        ]
    )
    rows = []
    for table, priority in priorities.items():
        item_key = draw() if key is None else key
        item = messages.PrioritizedItem(key=item_key, table=table, priority=priority, flat_trajectory=slices)
        encoded = messages.InsertStreamRequest(items=[item]).SerializeToString()
        rows.append(([item.key], np.frombuffer(encoded, np.uint8)[None]))
    return InsertRequest(frozenset(priorities), rows, {chunk_key: chunk}, len(chunk))
