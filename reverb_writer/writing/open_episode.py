"""One episode that is under way: its chunks, and the windows that are complete in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from reverb_writer.writing.chunk_encoder import Chunk, ChunkEncoder
from reverb_writer.writing.window_items import EpisodeWindows, Windows
from reverb_writer.writing.window_kinds import EpisodeEnd, WindowKinds

if TYPE_CHECKING:
    from reverb_writer.writing.destinations import Destination
    from reverb_writer.writing.priorities import WindowPriorities


class OpenEpisode:
    """An episode of one environment, or its stream of episodes where windows span them. Not thread-safe.

    Attributes:
        destination: the shard that it goes to; None until its first windows are encoded.
        chunks: those that windows still need, in order, without gaps.
        num_sealed: steps that are in chunks, padding included.
        num_skipped: steps that were skipped, because the episode is too long.
        boundary: step count at the last boundary step, where windows span episodes.
        capacity: steps of the chunk that comes next.
    """

    def __init__(
        self, encoder: ChunkEncoder, kinds: WindowKinds, priorities: WindowPriorities, grid: Callable[[int], int]
    ) -> None:
        """Begin without steps."""
        self._encoder, self._kinds, self._priorities, self._grid = encoder, kinds, priorities, grid
        self._key = encoder.new_key()
        self.destination: Destination | None = None
        self.chunks: list[Chunk] = []
        self.num_sealed = self.num_skipped = self.boundary = 0
        self.capacity = grid(0)

    def seal(self, rows: Any, num_padding: int = 0) -> int:
        """Make a chunk of the next rows, None for none, and padding steps after them; return its bytes."""
        chunk = self._encoder.encode(self._key, self.num_sealed, rows, num_padding)
        self.chunks.append(chunk)
        self.num_sealed = chunk.stop
        self.capacity = self._grid(chunk.stop)
        return len(chunk.data)

    def windows(self, encoded: int, num_steps: int, end: EpisodeEnd | None) -> tuple[EpisodeWindows, int]:
        """Return the windows that are complete in the chunks, and their number of items.

        Windows whose priority function failed are left out, but counted.

        Args:
            encoded: windows that end at or before this step count were returned before.
            num_steps: real steps of the episode so far.
            end: how the episode ends; None if it goes on.
        """
        windows, num_items = [], 0
        for index, target in enumerate(self._kinds.targets):
            starts, ends = self._kinds.bounds(index, encoded, self.num_sealed, end)
            num_items += len(ends) * len(target.tables)
            priorities = self._priorities.of(target, starts, ends, self.chunks, num_steps)
            if callable(target.priority) and np.isnan(priorities).any():
                good = ~np.isnan(priorities)
                starts, ends, priorities = starts[good], ends[good], priorities[good]
            windows.append(Windows(target.tables, starts, ends, priorities))
        first = self.num_sealed - self._kinds.longest  # a closing window may end where the last regular one did
        num_released = len(self.chunks) if end else sum(chunk.stop <= first for chunk in self.chunks)
        return EpisodeWindows(windows, self.chunks, num_released), num_items
