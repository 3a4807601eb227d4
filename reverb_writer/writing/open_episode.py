"""One episode that is under way, its chunks, and the windows that are complete in those of several episodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from reverb_writer.writing.chunk_encoder import Chunk
from reverb_writer.writing.window_items import Windows
from reverb_writer.writing.window_kinds import EpisodeEnd, WindowKinds
from reverb_writer.writing.window_targets import NEVER

if TYPE_CHECKING:
    from reverb_writer.writing.destinations import Destination
    from reverb_writer.writing.priorities import WindowPriorities


@dataclass(eq=False, slots=True)
class OpenEpisode:
    """An episode of one environment, or its stream of episodes where windows span them."""

    key: int
    destination: Destination | None = None  # the shard that it goes to; None until its first windows are encoded
    chunks: list[Chunk] = field(default_factory=list)  # those that windows still need, in order, without gaps
    num_sealed: int = 0  # steps that are in chunks, padding included
    boundary: int = 0  # step count at the last boundary step, where windows span episodes


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
