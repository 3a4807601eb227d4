"""Episodes in an actor's memory, before they are written to a table."""

from __future__ import annotations

from reverb_writer.episodes.episode import Episode
from reverb_writer.episodes.episode_batch import EpisodeBatch
from reverb_writer.episodes.lookback_buffer import InfiniteLookbackBuffer

__all__ = ["Episode", "EpisodeBatch", "InfiniteLookbackBuffer"]
