"""Chunks that episodes keep when their windows are encoded. The property of the step ring reads the requests."""

from __future__ import annotations

from collections.abc import Sequence

import reverb_writer as rw
from reverb_writer.steps import StepStructure
from reverb_writer.transport.in_flight import InsertRequest
from reverb_writer.writing.encoders import Encoder
from reverb_writer.writing.records import Chunk, OpenEpisode, Ready
from reverb_writer.writing.ring import StepRing
from reverb_writer.writing.step_layout import StepLayout
from reverb_writer.writing.stream_options import Books
from reverb_writer.writing.window_target import EpisodeEnd, WindowTarget

LAYOUT = StepLayout(StepStructure({"a": 0.0, "b": 0.0}), store_flags=False)


def chunk(key: int, start: int, stop: int) -> Chunk:
    return Chunk(key, start, stop, b"c" * key)


TARGET = WindowTarget(rw.WindowSpec(3), ("a",))


def ready(after: int, num_steps: int, *chunks: Chunk, end: EpisodeEnd | None = None) -> Ready:
    """Return the windows of an episode that end at step counts above `after` and up to `num_steps`."""
    episode = OpenEpisode(0, chunks=[*chunks])
    return Ready(TARGET, episode, after, num_steps, end, 0)


def end_at(num_steps: int) -> EpisodeEnd:
    return EpisodeEnd(num_steps, None, {}, 0, num_steps)


def encode(group: Sequence[Ready]) -> InsertRequest | None:
    ring = StepRing(LAYOUT.dtypes, LAYOUT.shapes, None, 4, TARGET)
    return Encoder(ring, LAYOUT, Books(), lambda _: 1.0, keeps_columns=False).request(group)


def test_each_episode_keeps_the_chunks_of_later_windows() -> None:
    group = [
        ready(2, 8, chunk(10, 0, 2), chunk(11, 2, 4), chunk(12, 4, 8)),
        ready(2, 2, chunk(31, 0, 2)),
        ready(4, 5, chunk(21, 0, 4), chunk(22, 4, 5), end=end_at(5)),
    ]
    encode(group)
    # A window of 3 steps that ends later than step 8 begins in the last chunk of the first episode.
    assert group[0].origin.chunks == [chunk(12, 4, 8)]
    assert group[1].origin.chunks == [chunk(31, 0, 2)]
    assert group[2].origin.chunks == []


def test_without_windows_there_is_no_request() -> None:
    group = [ready(2, 2, chunk(31, 0, 2)), ready(4, 4, chunk(21, 0, 4), end=end_at(4))]
    assert encode(group) is None
    assert [each.origin.chunks for each in group] == [[chunk(31, 0, 2)], []]
