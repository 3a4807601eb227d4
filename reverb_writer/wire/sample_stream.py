"""Read samples from one table: request, reassemble, decode.

A sample may be split over several entries until `end_of_sequence`; each brings the chunks that it needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from reverb_writer.errors import FormatError, ReplayTimeoutError, ServerUnavailableError, StructureError
from reverb_writer.wire import messages, tensors
from reverb_writer.wire.channel import Channel, describe

__all__ = ["SampleInfo", "sample"]

_MAX_SAMPLE_BYTES = 1 << 31


@dataclass(frozen=True)
class SampleInfo:
    """What the server tells about a sample.

    Attributes:
        key: of the item, for `mutate_priorities`.
        priority: of the item when it was sampled.
        probability: with which it was chosen.
        table_size: items in the table at that moment.
        times_sampled: how often the item has been sampled, this time included.
    """

    key: int
    priority: float
    probability: float
    table_size: int
    times_sampled: int


def sample(
    channel: Channel, table: str, num_samples: int, timeout_s: float
) -> Iterator[tuple[list[npt.NDArray[Any]], SampleInfo]]:
    """Sample items one after the other.

    Yields:
        The columns of an item, each [T, ...] (or [...] where it was written squeezed), owned by the caller; its info.

    Raises:
        ReplayTimeoutError: not all came within `timeout_s` seconds.
        ServerUnavailableError: the server is gone.
        StructureError: there is no such table.
        UnsafeDataError, FormatError: what came must not or cannot be decoded.
    """
    request = messages.SampleStreamRequest(table=table, num_samples=num_samples).SerializeToString()
    call = channel.stream(messages.SAMPLE_STREAM, iter([request]), timeout_s=timeout_s)
    entries: list[Any] = []
    missing = num_samples
    try:
        for reply in call:
            for entry in messages.SampleStreamResponse.FromString(reply).entries:
                entries.append(entry)
                if entry.end_of_sequence:
                    yield _assemble(entries)
                    entries = []
                    missing -= 1
            if not missing:
                return
        raise FormatError(f"table `{table}`: the server ended the stream {missing} samples early.")
    except grpc.RpcError as error:
        text = f"table `{table}`: {missing} of {num_samples} samples did not come ({describe(error)})."
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise ReplayTimeoutError(f"{text} The time-out was {timeout_s:.1f} s.") from error
        if error.code() is grpc.StatusCode.NOT_FOUND:
            raise StructureError(f"table `{table}` is not on the server at {channel.address}.") from error
        raise ServerUnavailableError(text) from error
    finally:
        call.cancel()


def _assemble(entries: list[Any]) -> tuple[list[npt.NDArray[Any]], SampleInfo]:
    info = entries[0].info
    chunks = {chunk.chunk_key: chunk for entry in entries for chunk in entry.data}
    decoded: dict[tuple[int, int], npt.NDArray[Any]] = {}
    columns = []
    budget = _MAX_SAMPLE_BYTES
    for column in info.item.flat_trajectory.columns:
        parts = []
        for piece in column.chunk_slices:
            at = (piece.chunk_key, piece.index)
            if at not in decoded:
                decoded[at] = _decode(chunks.get(piece.chunk_key), piece, budget)
                budget -= decoded[at].nbytes
            array = decoded[at]
            if piece.offset < 0 or piece.length < 1 or piece.offset + piece.length > array.shape[0]:
                raise FormatError(f"an item names steps {piece.offset}+{piece.length} of a chunk of {array.shape[0]}.")
            parts.append(array[piece.offset : piece.offset + piece.length])
        if not parts or any(part.shape[1:] != parts[0].shape[1:] or part.dtype != parts[0].dtype for part in parts):
            raise FormatError("the chunks of a column are none, or differ in dtype or shape.")
        rows = np.concatenate(parts) if len(parts) > 1 else parts[0].copy()
        if column.squeeze and len(rows) != 1:
            raise FormatError(f"a squeezed column has {len(rows)} rows, not 1.")
        columns.append(rows[0] if column.squeeze else rows)
    return columns, SampleInfo(
        info.item.key, info.item.priority, info.probability, info.table_size, info.item.times_sampled
    )


def _decode(chunk: Any, piece: Any, budget: int) -> npt.NDArray[Any]:
    if chunk is None or not 0 <= piece.index < len(chunk.data.tensors):
        raise FormatError(f"an item names chunk {piece.chunk_key}, tensor {piece.index}, which did not come with it.")
    array = tensors.decode(chunk.data.tensors[piece.index], delta_encoded=chunk.delta_encoded, max_bytes=max(budget, 0))
    if array.ndim == 0:
        raise FormatError("a tensor of a chunk has no time dimension.")
    return array
