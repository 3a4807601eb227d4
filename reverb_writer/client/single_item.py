"""One item with a chunk of its own, encoded; for what is not written step by step."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reverb_writer.errors import StructureError
from reverb_writer.protocol import messages
from reverb_writer.protocol.item_encoding import KEY_BITS, encode_chunk
from reverb_writer.transport.in_flight import InsertRequest


def column(path: str, leaf: Any) -> Any:
    """Return a leaf as a column [T, ...], checked."""
    array = np.asarray(leaf)
    if array.ndim == 0 or array.shape[0] == 0:
        raise StructureError(
            f"leaf `{path}`: shape {array.shape}, expected [T, ...] with T >= 1. For a single value pass `value[None]`."
        )
    return array


def one_item(
    columns: Sequence[Any],
    is_scalar: Sequence[bool],
    priorities: Mapping[str, float],
    spec: bytes = b"",
    key: int | None = None,
) -> InsertRequest:
    """Encode one item a table over one chunk, the columns of which may differ in length; scalar ones have one row.

    Columns are [T_i, ...]. `spec` is a `specs.spec_tensor`, or empty. `key` is of the item in the first table, the
    others have those that follow; None to draw it.
    """
    chunk_key, first_key, episode_id = (secrets.randbits(KEY_BITS) for _ in range(3))
    first_key = first_key if key is None else key
    chunk = encode_chunk(chunk_key, episode_id, 0, columns, spec=spec)
    slices = messages.FlatTrajectory(
        columns=[
            messages.FlatTrajectory.Column(
                chunk_slices=[
                    messages.FlatTrajectory.ChunkSlice(chunk_key=chunk_key, offset=0, length=len(column), index=index)
                ],
                squeeze=squeeze,
            )
            for index, (column, squeeze) in enumerate(zip(columns, is_scalar, strict=True))
        ]
    )
    rows = []
    for item_key, (table, priority) in enumerate(priorities.items(), first_key):
        item = messages.PrioritizedItem(key=item_key, table=table, priority=priority, flat_trajectory=slices)
        encoded = messages.InsertStreamRequest(items=[item]).SerializeToString()
        rows.append((item_key, np.frombuffer(encoded, np.uint8)[None]))
    return InsertRequest(frozenset(priorities), first_key, rows, {chunk_key: chunk}, len(chunk))
