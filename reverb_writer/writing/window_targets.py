"""What an observer writes: which windows, cut into which chunks, to which tables, with which priority."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reverb_writer.arguments import check_priority
from reverb_writer.errors import SpecError
from reverb_writer.protocol.item_encoding import MAX_CHUNK_LENGTH
from reverb_writer.windows import EndOfEpisode, WindowSpec
from reverb_writer.writing.priorities import Priority

NEVER = 1 << 62
"""A step count that no episode comes to."""

_EPISODE_CHUNK_LENGTH = 100
_TINY_CHUNK_BYTES = 2048
_SHORT_CHUNK_LENGTH = 16


@dataclass(frozen=True)
class WindowTarget:
    """One kind of window and where it goes.

    Attributes:
        spec: which windows.
        tables: the table or tables that get each of them, in this order; empty for one of the window's own name.
        priority: of every item; a function of the window; or "max", the largest priority that this process has set in
            the tables.

    Raises:
        SpecError: a name of a table is empty or stands twice, or the priority is not a finite number >= 0.
    """

    spec: WindowSpec
    tables: tuple[str, ...] = ()
    priority: Priority = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "tables", (self.tables,) if isinstance(self.tables, str) else tuple(self.tables))
        if len(set(self.tables)) != len(self.tables) or not all(isinstance(t, str) and t for t in self.tables):
            raise SpecError(f"`table` must be a name or several different ones, got {self.tables!r}.")
        if not callable(self.priority) and self.priority != "max":
            check_priority(self.priority)


def table_names(table: str | Sequence[str]) -> tuple[str, ...]:
    """Return one name, or several, as a tuple."""
    names = (table,) if isinstance(table, str) else tuple(table)
    if not names:
        raise SpecError("`table` must be a name or several different ones, got none.")
    return names


def window_targets(
    table: str | Sequence[str] | None,
    sequence_length: int | None,
    stride_length: int,
    end_of_episode: EndOfEpisode | str,
    priority: Priority,
    windows: Mapping[str, WindowSpec | WindowTarget] | None,
) -> list[WindowTarget]:
    """Turn an observer's arguments into the kinds of windows it writes."""
    targets = []
    if table is not None or sequence_length is not None or not windows:
        if table is None or sequence_length is None:
            raise SpecError(
                f"`table` and `sequence_length` belong together, got {table!r} and {sequence_length!r}. Give both, or "
                "`windows` alone."
            )
        spec = WindowSpec(sequence_length, stride_length, end_of_episode)
        targets.append(WindowTarget(spec, table_names(table), priority))
    for name, window in (windows or {}).items():
        if isinstance(window, WindowSpec):
            targets.append(WindowTarget(window, (name,), priority))
        elif isinstance(window, WindowTarget):
            targets.append(WindowTarget(window.spec, window.tables or (name,), window.priority))
        else:
            raise SpecError(f"`windows[{name!r}]` must be a WindowSpec or a WindowTarget, got {type(window).__name__}.")
    return targets


def chunk_length_for(specs: Sequence[WindowSpec], step_bytes: float = math.inf) -> int:
    """Return the chunk length that suits windows of these kinds; `step_bytes` is the size of a step, uncompressed.

    A sampler gets whole chunks, so chunks should begin and end where windows do; but each chunk that a window touches
    costs bytes in every item, and short ones compress worse. So: windows that do not overlap are a chunk each; others
    get the common grid of all starts and ends, unless one would touch more than four chunks of it; then the shortest
    window's length (twice as many steps sent as used, at most three chunks touched). Chunks that would be tiny are
    twice as long, and have 16 steps if these are small: their headers outweigh the steps that are sent for nothing.
    The figures are in `docs/decisions.md#chunk-length`.

    >>> [chunk_length_for([WindowSpec(20, stride)]) for stride in (1, 10, 20)]
    [20, 10, 20]
    >>> [chunk_length_for([WindowSpec(20, stride)], step_bytes=52) for stride in (1, 10, 20)]
    [40, 20, 20]
    >>> chunk_length_for([WindowSpec(2)], step_bytes=52)
    16
    """
    finite = {(spec.sequence_length, spec.stride_length) for spec in specs if spec.sequence_length is not None}
    if not finite:
        return _EPISODE_CHUNK_LENGTH
    lengths = [length for length, _ in finite]
    if len(finite) == 1 and all(stride >= length for length, stride in finite):
        return min(lengths[0], MAX_CHUNK_LENGTH)
    grid = math.gcd(*lengths, *(stride for _, stride in finite))
    length = grid if grid * 4 >= max(lengths) else min(lengths)
    if length * step_bytes < _TINY_CHUNK_BYTES:
        length = max(2 * length, min(_SHORT_CHUNK_LENGTH, int(_TINY_CHUNK_BYTES / step_bytes)))
    return min(length, MAX_CHUNK_LENGTH)
