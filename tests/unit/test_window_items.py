"""Windows of several episodes as one request, read back by the real protobuf parser."""

from __future__ import annotations

import numpy as np

from reverb_writer.protocol.messages import InsertStreamRequest
from reverb_writer.transport.in_flight import InFlight, InsertRequest
from reverb_writer.writing.chunk_encoder import Chunk
from reverb_writer.writing.window_items import StreamUpdate, Windows, stream_update

Slices = list[tuple[int, int, int]]


def chunk(key: int, start: int, stop: int, *, held: bool = False, counted: bool = False) -> Chunk:
    return Chunk(key, start, stop, b"c" * key, None, held, counted)


def windows(tables: list[str], priority: float, *of: tuple[int, int], episode: int = 0) -> Windows:
    starts, ends = (np.array([window[i] for window in of], np.int64) for i in (0, 1))
    return Windows(tables, np.full(len(of), episode), starts, ends, np.full(len(of), priority))


def items(request: InsertRequest | None) -> list[tuple[str, int, float, Slices]]:
    """Return table, key, priority and slices (chunk, offset, length) of the items, in their order."""
    assert request is not None
    rows = b"".join(row.tobytes() for row in request.rows)
    parsed = InsertStreamRequest.FromString(rows).items
    for item in parsed:
        assert [[piece.index for piece in column.chunk_slices] for column in item.flat_trajectory.columns] == [
            [index] * len(column.chunk_slices) for index, column in enumerate(item.flat_trajectory.columns)
        ]
    return [
        (
            item.table,
            item.key,
            item.priority,
            [(piece.chunk_key, piece.offset, piece.length) for piece in item.flat_trajectory.columns[0].chunk_slices],
        )
        for item in parsed
    ]


def update_of_three() -> tuple[list[list[Chunk]], StreamUpdate]:
    """Encode windows of two episodes, and of one between them that has none."""
    of_one, of_other = windows(["a"], 1.0, (0, 3), (2, 5)), windows(["a"], 0.5, (1, 4), episode=2)
    joined = Windows(["a"], *(np.concatenate(parts) for parts in zip(of_one[1:], of_other[1:], strict=True)))
    chunks = [
        [chunk(11, 0, 4), chunk(12, 4, 8, held=True)],
        [chunk(31, 0, 4)],
        [chunk(21, 0, 4, held=True)],
    ]
    return stream_update([joined], chunks, [4, 0, 4], frozenset("a"), 100, 2)


def test_windows_of_several_episodes_are_one_request_that_names_their_own_chunks() -> None:
    _, (request, _, _) = update_of_three()
    assert items(request) == [
        ("a", 100, 1.0, [(11, 0, 3)]),
        ("a", 101, 1.0, [(11, 2, 2), (12, 0, 1)]),
        ("a", 102, 0.5, [(21, 1, 3)]),
    ]
    assert request is not None
    assert list(request.chunks) == [11, 12, 21]
    assert request.num_bytes == 11 + 12 + 21 + sum(row.nbytes for row in request.rows)


def test_each_episode_keeps_and_releases_its_own_chunks() -> None:
    kept, (_, hold, release) = update_of_three()
    assert kept == [[chunk(12, 4, 8, held=True, counted=True)], [chunk(31, 0, 4, held=True)], []]
    assert hold == [31]
    assert release == [21]


def test_request_counts_only_chunks_that_no_request_in_flight_has() -> None:
    chunks = [[chunk(5, 0, 4, counted=True), chunk(6, 4, 8)]]
    _, (request, _, _) = stream_update([windows(["a"], 1.0, (0, 6))], chunks, [0], frozenset("a"), 1, 1)
    assert request is not None
    assert request.num_bytes == 6 + sum(row.nbytes for row in request.rows)


def test_items_of_several_kinds_and_tables_have_keys_that_follow_each_other() -> None:
    kinds = [windows(["a", "b"], 1.0, (0, 2), (1, 3)), windows(["c"], 2.0, (0, 3))]
    _, (request, _, _) = stream_update(kinds, [[chunk(9, 0, 4)]], [0], frozenset("abc"), 7, 1)
    assert [(table, key) for table, key, _, _ in items(request)] == [
        ("a", 7), ("a", 8), ("b", 9), ("b", 10), ("c", 11),
    ]  # fmt: skip
    flight = InFlight()
    assert request is not None
    flight.add(request)
    assert flight.pending == 5


def test_without_windows_only_held_chunks_are_released() -> None:
    chunks = [[chunk(31, 0, 4)], [chunk(21, 0, 4, held=True)]]
    kept, update = stream_update([windows(["a"], 1.0)], chunks, [0, 4], frozenset("a"), 7, 1)
    assert kept == [[chunk(31, 0, 4)], []]
    assert update == (None, [], [21])
