"""Windows of several episodes as one request, read back by the real protobuf parser."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import reverb_writer as rw
from reverb_writer.protocol.messages import InsertStreamRequest
from reverb_writer.steps import StepStructure
from reverb_writer.transport.in_flight import InFlight, InsertRequest
from reverb_writer.writing.encoders import Chunk, ChunkEncoder, ItemEncoder, OpenEpisode, Ready
from reverb_writer.writing.ring import StepRing
from reverb_writer.writing.step_layout import StepLayout
from reverb_writer.writing.window_kinds import EpisodeEnd, WindowKinds

Slices = list[tuple[int, int, int]]

LAYOUT = StepLayout(StepStructure({"a": 0.0, "b": 0.0}), mask=False)


def chunk(key: int, start: int, stop: int, *, counted: bool = False) -> Chunk:
    return Chunk(key, start, stop, b"c" * key, None, counted)


def kinds(*targets: tuple[str, int, float]) -> WindowKinds:
    """Return kinds of windows: a letter for each table, length and priority."""
    of = [rw.WindowTarget(rw.WindowSpec(length), tuple(tables), priority) for tables, length, priority in targets]
    return WindowKinds(of, spans_episodes=False)


def ready(of: WindowKinds, after: int, num_steps: int, *chunks: Chunk, end: EpisodeEnd | None = None) -> Ready:
    """Return the windows of an episode that end at step counts above `after` and up to `num_steps`."""
    episode = OpenEpisode(0, chunks=[*chunks], num_sealed=chunks[-1].stop)
    return Ready(of, episode, after, num_steps, end, 0)


def end_at(num_steps: int) -> EpisodeEnd:
    return EpisodeEnd([num_steps], [None], {}, 0, num_steps)


def encode(group: Sequence[Ready]) -> InsertRequest | None:
    ring = StepRing(LAYOUT.dtypes, LAYOUT.shapes, None, 4, spans_episodes=False)
    chunks = ChunkEncoder(ring, LAYOUT, keeps_columns=False)
    return ItemEncoder(chunks, lambda _: 1.0, collections.Counter()).encode(group)


def items(request: InsertRequest | None) -> list[tuple[str, int, float, Slices]]:
    """Return table, number of the key, priority and slices (chunk, offset, length) of the items, in their order."""
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
            item.key - request.first_key,
            item.priority,
            [(piece.chunk_key, piece.offset, piece.length) for piece in item.flat_trajectory.columns[0].chunk_slices],
        )
        for item in parsed
    ]


def three_episodes() -> list[Ready]:
    """Return windows of two episodes, the second of which has ended, and an episode between them that has none."""
    of = kinds(("a", 3, 0.5))
    return [
        ready(of, 2, 5, chunk(10, 0, 2), chunk(11, 2, 4), chunk(12, 4, 8)),
        ready(of, 2, 2, chunk(31, 0, 4)),
        ready(of, 4, 5, chunk(21, 0, 4), chunk(22, 4, 5), end=end_at(5)),
    ]


def test_windows_of_several_episodes_are_one_request_that_names_their_own_chunks() -> None:
    request = encode(three_episodes())
    assert items(request) == [
        ("a", 0, 0.5, [(10, 0, 2), (11, 0, 1)]),
        ("a", 1, 0.5, [(10, 1, 1), (11, 0, 2)]),
        ("a", 2, 0.5, [(11, 0, 2), (12, 0, 1)]),
        ("a", 3, 0.5, [(21, 2, 2), (22, 0, 1)]),
    ]
    assert request is not None
    assert list(request.chunks) == [10, 11, 12, 21, 22]
    assert request.num_bytes == 10 + 11 + 12 + 21 + 22 + sum(row.nbytes for row in request.rows)


def test_each_episode_keeps_the_chunks_of_later_windows() -> None:
    group = three_episodes()
    encode(group)
    # A window of 3 steps that ends later than step 8 begins in the last chunk of the first episode.
    assert group[0].episode.chunks == [chunk(12, 4, 8, counted=True)]
    assert group[1].episode.chunks == [chunk(31, 0, 4)]
    assert group[2].episode.chunks == []


def test_request_counts_only_chunks_that_no_request_in_flight_has() -> None:
    request = encode([ready(kinds(("a", 6, 1.0)), 5, 6, chunk(5, 0, 4, counted=True), chunk(6, 4, 8))])
    assert request is not None
    assert request.num_bytes == 6 + sum(row.nbytes for row in request.rows)


def test_items_of_several_kinds_and_tables_have_keys_that_follow_each_other() -> None:
    request = encode([ready(kinds(("ab", 2, 1.0), ("c", 3, 2.0)), 0, 3, chunk(9, 0, 4))])
    assert [(table, key) for table, key, _, _ in items(request)] == [
        ("a", 0), ("a", 1), ("b", 2), ("b", 3), ("c", 4),
    ]  # fmt: skip
    flight = InFlight()
    assert request is not None
    flight.add(request)
    assert flight.pending == 5


def test_without_windows_there_is_no_request() -> None:
    of = kinds(("a", 3, 1.0))
    group = [ready(of, 2, 2, chunk(31, 0, 4)), ready(of, 4, 4, chunk(21, 0, 4), end=end_at(4))]
    assert encode(group) is None
    assert [each.episode.chunks for each in group] == [[chunk(31, 0, 4)], []]
