"""Records of an observer's items on their way: chunks, the episodes that have them, and complete windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy.typing as npt

from reverb_writer.writing.window_target import EpisodeEnd, WindowTarget


@dataclass(slots=True)
class Chunk:
    """Steps `start` to `stop` of an episode, all columns, encoded."""

    key: int  # the chunk's
    start: int  # step count before its first step
    stop: int  # step count after its last step
    data: bytes  # as `encode_chunk` makes it
    # columns and kinds owned by the chunk, if a priority is a function
    columns: Sequence[npt.NDArray[Any]] | None = None


@dataclass(eq=False, slots=True)
class OpenEpisode:
    """An episode of one environment, or its stream of episodes if windows span them."""

    key: int
    receiver: Any = None  # as of `Origin`
    num_sent: int = 0
    # chunks that later windows need, in order, without gaps; of an open episode, at least the last one
    chunks: list[Chunk] = field(default_factory=list)


class Ready(NamedTuple):
    """Windows of one episode that are complete in its chunks."""

    target: WindowTarget
    origin: OpenEpisode
    after: int  # windows that end at or before this step count were encoded before
    num_steps: int  # real steps of an ended episode; real steps in chunks of an open one
    end: EpisodeEnd | None  # None if the episode is open
    num_items: int  # includes windows whose priority function will fail
