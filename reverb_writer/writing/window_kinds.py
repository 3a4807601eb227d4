"""The kinds of windows that an observer writes: which chunks suit them, and which of their items are complete.

Integers only. `WindowSpec` has the arithmetic of one kind and one episode.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from reverb_writer.arguments import check_priority
from reverb_writer.errors import SpecError
from reverb_writer.protocol.item_encoding import MAX_CHUNK_LENGTH
from reverb_writer.windows import STRIDE_GAP, UNALIGNED_TAIL, EndOfEpisode, WindowSpec

Priority = float | Callable[..., float] | Literal["max"]
"""A number, finite and >= 0; a function that makes one of a window, a nest of arrays [L, ...]; or "max".

A function with a parameter `mask` gets it by name: [L] bool, True for real steps and False for padding. "max" is the
largest priority that this process has set so far in the tables, 1.0 before it has set any.
"""

NEVER = 1 << 62
"""A step count that no episode comes to."""

Integers = npt.NDArray[np.int64]

_EPISODE_CHUNK_LENGTH = 100
_TINY_CHUNK_BYTES = 2048
_SHORT_CHUNK_LENGTH = 16


@dataclass(frozen=True)
class WindowTarget:
    """One kind of window and where it goes.

    Attributes:
        spec: which windows.
        tables: the table or tables that get each window, in this order; empty for one of the window's own name.
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


def window_targets(
    table: str | Sequence[str] | None,
    spec: WindowSpec | None,
    priority: Priority,
    windows: Mapping[str, WindowSpec | WindowTarget] | None = None,
) -> list[WindowTarget]:
    """Turn an observer's arguments into the kinds of windows that it writes."""
    targets = []
    if spec is not None:
        if not table:
            raise SpecError("`table` must be a name or several different ones, got none.")
        targets.append(WindowTarget(spec, (table,) if isinstance(table, str) else tuple(table), priority))
    for name, window in (windows or {}).items():
        if isinstance(window, WindowSpec):
            targets.append(WindowTarget(window, (name,), priority))
        elif isinstance(window, WindowTarget):
            targets.append(replace(window, tables=window.tables or (name,)))
        else:
            raise SpecError(f"`windows[{name!r}]` must be a WindowSpec or a WindowTarget, got {type(window).__name__}.")
    return targets


# ------------------------------------------------------------------------------------------------------------- chunks


def chunk_length_for(specs: Sequence[WindowSpec], step_bytes: float = math.inf) -> int:
    """Return the chunk length that suits windows of these kinds; `step_bytes` is the size of a step, uncompressed.

    Windows that do not overlap are a chunk each. Others get the common grid of all starts and ends, unless one would
    touch more than four chunks of it; then the shortest window's length. Chunks that would be tiny are twice as long,
    and have 16 steps if these are small. The reasons and figures are in `docs/decisions.md#chunk-length`.

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


def chunk_grid(specs: Sequence[WindowSpec], chunk_length: int) -> Callable[[int], int]:
    """Return a function that gives the number of steps of the chunk that begins at a step count.

    If windows do not overlap, each window is one chunk, and so is each gap between two.

    >>> steps_of_chunk = chunk_grid([WindowSpec(2, 2)], 5)
    >>> steps_of_chunk(0), steps_of_chunk(3)
    (2, 1)
    """
    length, stride = specs[0].sequence_length, specs[0].stride_length
    if len(set(specs)) != 1 or length is None or length > min(stride, chunk_length):
        return lambda _: chunk_length
    covered = length

    def steps_of_chunk(start: int) -> int:
        phase = start % stride
        return min(chunk_length, (covered if phase < covered else stride) - phase)

    return steps_of_chunk


# -------------------------------------------------------------------------------------------------------------- items


@dataclass(frozen=True)
class EpisodeEnd:
    """How an episode ends, for each kind of window."""

    limits: list[int]  # the step count up to which regular windows are complete, with padding
    closing: list[tuple[int, int] | None]  # the window (start, stop) that is added off the rule, or None
    dropped: dict[str, int]  # steps that no window of a kind holds, by reason, summed over the kinds
    num_items: int  # of all windows of the episode
    last: int  # step count at which the last window ends; 0 if there is none


class WindowKinds:
    """Which windows of an episode are complete. Immutable.

    Attributes:
        targets: the kinds, and where their windows go.
        tables: names of all tables that get windows.
        items_per_step: items that a step completes in the long run, at most.
        longest: steps of the longest window.
        spans_episodes: whether windows go on after the end of an episode.
    """

    def __init__(self, targets: Sequence[WindowTarget], *, spans_episodes: bool) -> None:
        """Take the kinds of windows."""
        self.targets = tuple(targets)
        self.spans_episodes = spans_episodes
        self.tables = frozenset(itertools.chain.from_iterable(target.tables for target in targets))
        self.items_per_step = sum(len(target.tables) / target.spec.stride_length for target in targets)
        self.longest = max((target.spec.sequence_length or NEVER) for target in targets)
        # Bounds of the items that rows complete, whichever episodes end: at once in each environment, besides that for
        # each row, and in any single row; and whether the end of an episode may complete several of a kind at once.
        self._at_once, self._per_row, self._most_per_row, self._has_tail = 0, 0.0, 0, False
        for target in targets:
            length, stride, num_tables = target.spec.sequence_length, target.spec.stride_length, len(target.tables)
            mode = target.spec.end_of_episode
            self._most_per_row += num_tables
            if length is not None and (mode is EndOfEpisode.DROP or spans_episodes):
                self._at_once += num_tables
                self._per_row += num_tables / min(stride, length)
            else:
                self._per_row += num_tables
                if length is not None and mode is EndOfEpisode.TILE:
                    self._at_once += num_tables * (-(-(length - 1) // stride))
                    self._has_tail = True

    def num_items(self, num_steps: Any) -> Any:
        """Return how many items the regular windows of so many steps of an episode make; elementwise of an array.

        >>> kinds = WindowKinds([WindowTarget(WindowSpec(3, 2), ("a", "b"))], spans_episodes=False)
        >>> [kinds.num_items(count) for count in (2, 3, 5, 6)], kinds.num_items(np.array([2, 7]))
        ([0, 2, 4, 4], array([0, 6]))
        """
        count: Any = num_steps * 0
        for target in self.targets:
            count = count + len(target.tables) * target.spec.num_windows(num_steps)
        return count

    def windows(
        self, index: int, after: Integers, limits: Integers, closing: Sequence[tuple[int, int] | None]
    ) -> tuple[Integers, Integers, Integers]:
        """Return the windows of kind `index`, of several episodes: number of the episode, first step and end of each.

        An episode's windows end at step counts above its `after` and up to its limit; its closing window follows them.
        """
        spec = self.targets[index].spec
        before, upto = spec.num_windows(after), spec.num_windows(limits)
        counts = upto - before
        of = np.repeat(np.arange(len(counts)), counts)
        # Those of an episode are numbered from `before` on, and all others come before or after them.
        numbers = np.arange(len(of)) + np.repeat(upto - np.cumsum(counts), counts)
        starts = numbers * spec.stride_length
        ends = starts + (spec.sequence_length or 0)
        added = [(number, *window) for number, window in enumerate(closing) if window is not None]
        if added:
            parts = zip((of, starts, ends), np.array(added).T, strict=True)
            of, starts, ends = (np.concatenate(each) for each in parts)
            order = np.argsort(of, kind="stable")
            of, starts, ends = of[order], starts[order], ends[order]
        return of, starts, ends

    def rows_within(self, num_items: int, num_envs: int) -> int:
        """Return how many rows may be written until so many items are complete, whatever episodes end meanwhile.

        The last of these rows may complete more. At least one row, if any item may be complete.

        >>> WindowKinds([WindowTarget(WindowSpec(20), ("a",))], spans_episodes=False).rows_within(400, 1)
        400
        >>> WindowKinds([WindowTarget(WindowSpec(20, 10), ("a",))], spans_episodes=False).rows_within(400, 1)
        3980
        """
        if num_items <= 0:
            return 0
        by_rate = 1 + int((num_items - 1 - self._at_once * num_envs) // self._per_row)
        by_row = 1 if self._has_tail else 1 + (num_items - 1) // self._most_per_row
        return max(by_rate, by_row, 1)

    def episode_end(self, n: int, *, align: bool = False, discard: str | None = None) -> EpisodeEnd:
        """Return what the end of an episode of `n` steps adds.

        If `align`, DROP's windows get the last L steps, too, unless they are in a window already. With `discard`, a
        reason, nothing is added, and all steps without a window are counted under it.
        """
        limits: list[int] = []
        all_closing: list[tuple[int, int] | None] = []
        dropped: collections.Counter[str] = collections.Counter()
        num_items = last = 0
        for target in self.targets:
            spec, length, stride = target.spec, target.spec.sequence_length, target.spec.stride_length
            if discard is not None:
                spec = WindowSpec(length or NEVER, stride)
            closing, reasons = spec.closing_window(n), spec.num_dropped(n)
            # By hand, not by ALIGN_END: that mode does not go with S > L, a reset does.
            if align and spec.end_of_episode is EndOfEpisode.DROP and length and n >= length and (n - length) % stride:
                closing = (n - length, n)
                between = reasons.pop(UNALIGNED_TAIL) - length
                if between > 0:
                    reasons[STRIDE_GAP] = reasons.get(STRIDE_GAP, 0) + between
            limit = n + spec.num_padding(n)
            num_windows = spec.num_windows(limit)
            if num_windows:
                last = max(last, (length or 0) + (num_windows - 1) * stride)
            if closing is not None:
                last = max(last, closing[1])
            num_items += (num_windows + (closing is not None)) * len(target.tables)
            limits.append(limit)
            all_closing.append(closing)
            dropped.update({discard: sum(reasons.values())} if discard and reasons else reasons)
        return EpisodeEnd(limits, all_closing, dropped, num_items, last)


def can_align(targets: Sequence[WindowTarget], n: int) -> bool:
    """Return whether a reset after `n` steps has something to write, or nothing that it could lose."""
    return any(
        target.spec.end_of_episode is not EndOfEpisode.DROP or n >= (target.spec.sequence_length or 1)
        for target in targets
    )
