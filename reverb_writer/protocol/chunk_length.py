"""The number of steps in a chunk that suits the windows of a stream. Integers only."""

from __future__ import annotations

import math

from reverb_writer.protocol.item_encoding import MAX_CHUNK_LENGTH
from reverb_writer.windows import WindowSpec

_EPISODE_CHUNK_LENGTH, _MAX_EPISODE_CHUNK_LENGTH = 100, 4000
_EPISODE_CHUNK_BYTES = 1 << 20
_TINY_CHUNK_BYTES = 2048
_SHORT_CHUNK_LENGTH = 16


def chunk_length_for(spec: WindowSpec, step_bytes: float = math.inf, num_envs: int = 1) -> int:
    """Return the chunk length for windows of this kind; `step_bytes` is the uncompressed size of a step.

    Windows that lie end to end (S = L) are one chunk each, or several share a chunk of up to 16 small steps. Chunks of
    other windows lie on the common grid of all starts and ends; if a window touches more than four of these chunks,
    the length is the window's. Tiny chunks are doubled, and have 16 steps if steps are small. Whole episodes have
    chunks of 100 steps, and of up to 4,000 if these have at most 1 MiB in all environments together.
    `docs/decisions.md#chunk-length` has reasons and figures.

    >>> [chunk_length_for(WindowSpec(20, stride)) for stride in (4, 5, 10, 20)]
    [20, 5, 10, 20]
    >>> [chunk_length_for(WindowSpec(20, stride), step_bytes=52) for stride in (1, 10, 20)]
    [40, 20, 20]
    >>> [chunk_length_for(WindowSpec(2), step_bytes) for step_bytes in (0, 52)]
    [16, 16]
    >>> [chunk_length_for(WindowSpec(length, length), step_bytes=52) for length in (1, 3, 16)]
    [16, 15, 16]
    >>> [chunk_length_for(WindowSpec.whole_episode(), step_bytes) for step_bytes in (8, 2048, 28_224)]
    [4000, 512, 100]
    """
    if spec.sequence_length is None:
        by_bytes = int(_EPISODE_CHUNK_BYTES / max(step_bytes * num_envs, 1))
        return min(max(by_bytes, _EPISODE_CHUNK_LENGTH), _MAX_EPISODE_CHUNK_LENGTH)
    grid = math.gcd(spec.sequence_length, spec.stride_length)
    length = grid if grid * 4 >= spec.sequence_length else spec.sequence_length
    if length * step_bytes < _TINY_CHUNK_BYTES:
        most = min(_SHORT_CHUNK_LENGTH, int(_TINY_CHUNK_BYTES / max(step_bytes, 1)))
        is_end_to_end = spec.stride_length == spec.sequence_length
        length = max(most // length * length, length) if is_end_to_end else max(2 * length, most)
    return min(length, MAX_CHUNK_LENGTH)
