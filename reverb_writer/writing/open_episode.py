"""One episode that is under way, its chunks, and the windows that are complete in those of several episodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reverb_writer.writing.chunk_encoder import Chunk, ChunkEncoder
from reverb_writer.writing.window_items import Windows
from reverb_writer.writing.window_kinds import EpisodeEnd, WindowKinds
from reverb_writer.writing.window_targets import NEVER

if TYPE_CHECKING:
    from reverb_writer.writing.destinations import Destination
    from reverb_writer.writing.priorities import WindowPriorities


class OpenEpisode:
    """An episode of one environment, or its stream of episodes where windows span them. Not thread-safe.

    Attributes:
        destination: the shard that it goes to; None until its first windows are encoded.
        chunks: those that windows still need, in order, without gaps.
        num_sealed: steps that are in chunks, padding included.
        boundary: step count at the last boundary step, where windows span episodes.
        capacity: steps of the chunk that comes next.
    """

    def __init__(self, encoder: ChunkEncoder, grid: Callable[[int], int]) -> None:
        """Begin without steps."""
        self._encoder, self._grid, self._key = encoder, grid, encoder.new_key()
        self.destination: Destination | None = None
        self.chunks: list[Chunk] = []
        self.num_sealed = self.boundary = 0
        self.capacity = grid(0)

    def seal(self, rows: Any, num_padding: int = 0) -> int:
        """Make a chunk of the next rows, None for none, and padding steps after them; return its bytes."""
        chunk = self._encoder.encode(self._key, self.num_sealed, rows, num_padding)
        self.chunks.append(chunk)
        self.num_sealed = chunk.stop
        self.capacity = self._grid(chunk.stop)
        return len(chunk.data)


class Ready(NamedTuple):
    """Windows of one episode that are complete in its chunks."""

    kinds: WindowKinds
    episode: OpenEpisode
    after: int  # windows that end at or before this step count were encoded before
    num_steps: int  # real steps of the episode; while it goes on, those in chunks
    end: EpisodeEnd | None  # None if the episode goes on
    num_items: int  # the windows whose priority function will fail count, too

    @property
    def needed_from(self) -> int:
        """Chunks that end at or before this step count are in no later window."""
        # A closing window may end where the last regular one did.
        return NEVER if self.end is not None else self.episode.num_sealed - self.kinds.longest


def ready_windows(episodes: Sequence[Ready], priorities: WindowPriorities) -> list[Windows]:
    """Return the windows of each kind, of several episodes of the same kinds; without those whose function failed."""
    kinds, found = episodes[0].kinds, []
    after = np.array([ready.after for ready in episodes], np.int64)
    for index, target in enumerate(kinds.targets):
        limits = [ready.num_steps if ready.end is None else ready.end.limits[index] for ready in episodes]
        closing = [None if ready.end is None else ready.end.closing[index] for ready in episodes]
        of, starts, ends = kinds.windows(index, after, np.array(limits, np.int64), closing)
        values = priorities.of(target, of, starts, ends, episodes)
        windows = Windows(target.tables, of, starts, ends, values)
        if callable(target.priority):
            good = ~np.isnan(values)
            windows = Windows(target.tables, of[good], starts[good], ends[good], values[good])
        found.append(windows)
    return found
