"""Complete windows of one writer, or of several, become requests of the insert stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from reverb_writer.transport.insert_stream import InsertStream
from reverb_writer.writing.window_items import StreamUpdate, stream_update

if TYPE_CHECKING:
    from reverb_writer.writing.sequence_writer import SequenceWriter

REQUEST_ITEMS, REQUEST_BYTES = 1024, 1 << 20
"""A request that has as many items, or as many bytes of new chunks, gets no windows of further writers."""


class _Encoded(NamedTuple):
    """Windows that are encoded, until their writers and the stream know of it."""

    writers: Sequence[SequenceWriter]
    take_over: Sequence[Callable[[], None]]  # one for each writer
    update: StreamUpdate


class RequestWriter:
    """Encodes the complete windows of writers, and writes them to an insert stream.

    An interrupt loses and doubles nothing: that windows are encoded is committed by one assignment, and `finish` does
    what follows, as often as it is interrupted. Not thread-safe: its writers hold a lock.
    """

    def __init__(self, stream: InsertStream) -> None:
        """Begin with nothing to write."""
        self._stream = stream
        self._encoded: _Encoded | None = None

    def write(self, writers: Sequence[SequenceWriter]) -> None:
        """Encode the complete windows of sealed chunks and write them to the stream; never waits.

        The writers are of the same kinds of windows and columns.
        """
        self.finish()
        start, num_items, num_bytes = 0, 0, 0
        for stop, writer in enumerate(writers, 1):
            if stop < len(writers):
                num_items += writer.num_sealed_items
                num_bytes += writer.chunks.unsent_bytes
            if stop == len(writers) or num_items >= REQUEST_ITEMS or num_bytes >= REQUEST_BYTES:
                self._write(writers[start:stop])
                start, num_items, num_bytes = stop, 0, 0

    def _write(self, writers: Sequence[SequenceWriter]) -> None:
        first, episodes = writers[0], [writer.sealed_windows() for writer in writers]
        kept, update = stream_update(episodes, first.tables, first.chunks.new_key(), len(first.chunks.buffers))
        take_over = [
            writer.after_encoding(episode.num_items, chunks)
            for writer, episode, chunks in zip(writers, episodes, kept, strict=True)
        ]
        for writer in writers:
            writer.is_pending = True
        self._encoded = _Encoded(writers, take_over, update)
        self.finish()

    def finish(self) -> None:
        """Have the writers and the stream take over what was encoded last, if they have not."""
        if self._encoded is None:
            return
        writers, functions, (request, hold, release) = self._encoded
        for take_over in functions:
            take_over()
        if request is not None or release:
            self._stream.write(request, hold=hold, release=release)
        self._encoded = None
        for writer in writers:
            writer.is_pending = False
