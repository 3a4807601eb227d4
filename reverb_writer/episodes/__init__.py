"""Episodes: what an actor holds before it writes.

indexing   which rows an index means
columns    rows in arrays that grow by doubling
spaces     what must be known of Gymnasium's spaces
filling    rows to fill with
buffer     one column, with its look-back
data       what an episode holds, and its getters and setters
chunks     cut, concatenate, slice
steps      what observers write of it, and back
encoding   plain data as what JSON has
column_state  a column as what JSON has
state      an episode as what JSON has
episode    `Episode`: how it grows
"""

from __future__ import annotations

from reverb_writer.episodes.autoreset import AutoresetMode
from reverb_writer.episodes.episode import Episode
from reverb_writer.episodes.episode_batch import EpisodeBatch
from reverb_writer.episodes.lookback_buffer import InfiniteLookbackBuffer

__all__ = ["AutoresetMode", "Episode", "EpisodeBatch", "InfiniteLookbackBuffer"]
