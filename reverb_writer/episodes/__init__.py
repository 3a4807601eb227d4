"""Episodes in an actor's memory, before they are written to a table.

episode           `Episode`: add steps, cut, slice and concatenate
episode_data      the columns of an episode, and their getters and setters
lookback_buffer   one column, with its look-back
rows              rows of one form, as lists or arrays
indexing          which rows an index or a slice means
spaces            leaves of spaces, one-hot vectors, fill values
episode_steps     the steps that observers write of an episode, and back
episode_batch     the episodes of environments that step together, of recorded steps
"""

from __future__ import annotations

from reverb_writer.episodes.episode import Episode
from reverb_writer.episodes.episode_batch import EpisodeBatch
from reverb_writer.episodes.lookback_buffer import InfiniteLookbackBuffer

__all__ = ["Episode", "EpisodeBatch", "InfiniteLookbackBuffer"]
