"""Steps that are copied into chunks, read back by the real protobuf parser."""

from __future__ import annotations

from typing import Any

import cramjam
import numpy as np
import pytest

from reverb_writer.errors import StructureError
from reverb_writer.protocol.messages import InsertStreamRequest
from reverb_writer.windows import WindowSpec
from reverb_writer.writing.chunk_builder import Chunk, ChunkBuilder, chunk_grid

pytestmark = pytest.mark.filterwarnings("ignore:`stride_length`")

Array = np.ndarray[Any, np.dtype[Any]]


def builder(length: int = 3, *specs: WindowSpec) -> ChunkBuilder:
    dtypes: list[np.dtype[Any]] = [np.dtype("<i4"), np.dtype("<f8")]
    return ChunkBuilder(dtypes, [(), (2,)], specs or [WindowSpec(2)], length, [np.int32(-1), np.zeros(2)])


def put(chunks: ChunkBuilder, number: int) -> None:
    """Add the step `number`, [number, number + 0.5], and seal the chunk if it is full."""
    chunks.buffers[0][chunks.fill] = number
    chunks.buffers[1][chunks.fill] = [number, number + 0.5]
    chunks.fill += 1
    if chunks.fill == chunks.capacity:
        chunks.seal()


def parsed(chunk: Chunk) -> tuple[Any, list[Array]]:
    """Return the message and its two columns."""
    (message,) = InsertStreamRequest.FromString(chunk.data).chunks
    content = [cramjam.snappy.decompress_raw(tensor.tensor_content).read() for tensor in message.data.tensors]
    return message, [np.frombuffer(content[0], "<i4"), np.frombuffer(content[1], "<f8").reshape(-1, 2)]


def test_full_chunk_holds_the_steps_of_every_column_and_their_range() -> None:
    chunks = builder()
    for number in range(4):
        put(chunks, number)
    (chunk,) = chunks.sealed
    message, columns = parsed(chunk)
    assert columns[0].tolist() == [0, 1, 2]
    assert columns[1].tolist() == [[0, 0.5], [1, 1.5], [2, 2.5]]
    assert message.chunk_key == chunk.key
    assert (message.sequence_range.start, message.sequence_range.end) == (0, 2)
    assert (message.data_tensors_len, message.data_uncompressed_size) == (2, 3 * (4 + 16))
    assert (chunk.start, chunk.stop, chunk.held, chunk.counted) == (0, 3, False, False)
    assert (chunks.num_sealed, chunks.fill, chunks.num_chunks) == (3, 1, 1)
    assert chunks.unsent_bytes == len(chunk.data)


def test_open_chunk_can_be_sealed_before_it_is_full_and_an_empty_one_is_not() -> None:
    chunks = builder()
    for number in range(4):
        put(chunks, number)
    chunks.seal()
    chunks.seal()
    assert [(chunk.start, chunk.stop) for chunk in chunks.sealed] == [(0, 3), (3, 4)]
    assert parsed(chunks.sealed[1])[1][0].tolist() == [3]


def test_steps_written_after_a_seal_do_not_change_the_sealed_chunk() -> None:
    chunks = builder()
    for number in range(3):
        put(chunks, number)
    before = parsed(chunks.sealed[0])[1][0].tolist()
    chunks.buffers[0][:] = 99
    assert parsed(chunks.sealed[0])[1][0].tolist() == before == [0, 1, 2]


def test_padding_steps_fill_chunks_up_to_a_count() -> None:
    chunks = builder()
    put(chunks, 7)
    put(chunks, 8)
    chunks.pad(5)
    chunks.pad(5)
    chunks.seal()
    assert [parsed(chunk)[1][0].tolist() for chunk in chunks.sealed] == [[7, 8, -1], [-1, -1]]
    assert parsed(chunks.sealed[1])[1][1].tolist() == [[0, 0], [0, 0]]


def test_new_episode_has_a_key_of_its_own_and_starts_at_step_zero() -> None:
    chunks = builder()
    episodes = []
    for _ in range(2):
        chunks.begin_episode()
        for number in range(3):
            put(chunks, number)
        message, _ = parsed(chunks.sealed[0])
        episodes.append(message.sequence_range.episode_id)
        assert message.sequence_range.start == 0
    assert episodes[0] != episodes[1]
    assert (chunks.num_chunks, len(chunks.sealed)) == (2, 1)


def test_windows_that_leave_gaps_are_chunks_of_their_own() -> None:
    chunks = builder(5, WindowSpec(2, 3))
    for number in range(7):
        put(chunks, number)
    assert [(chunk.start, chunk.stop) for chunk in chunks.sealed] == [(0, 2), (2, 3), (3, 5), (5, 6)]


@pytest.mark.parametrize(
    ("windows", "length", "starts", "expected"),
    [
        ([(2, 1)], 4, (0, 4), (4, 4)),  # they overlap
        ([(3, 3)], 2, (0, 2), (2, 2)),  # longer than a chunk
        ([(3, 3)], 8, (0, 3, 4), (3, 3, 2)),
        ([(2, 7)], 3, (0, 2, 5), (2, 3, 2)),  # the gap of five is two chunks
        ([(2, 2), (4, 4)], 8, (0, 8), (8, 8)),  # of two kinds
        ([(None, 1)], 6, (0, 6), (6, 6)),
    ],
)
def test_chunks_begin_and_end_where_windows_do(
    windows: list[tuple[int | None, int]], length: int, starts: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert tuple(map(chunk_grid([WindowSpec(*window) for window in windows], length), starts)) == expected


def test_dtype_that_reverb_cannot_store_is_refused() -> None:
    with pytest.raises(StructureError, match="datetime64"):
        ChunkBuilder([np.dtype("M8[s]")], [()], [WindowSpec(2)], 3, [0])
