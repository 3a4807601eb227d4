"""The kinds of windows that an observer writes: suitable chunks, and the number of complete items.

Integers only. `WindowSpec` has the arithmetic of one kind and one episode.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from reverb_writer.arguments import check_priority
from reverb_writer.errors import SpecError
from reverb_writer.protocol.item_encoding import MAX_CHUNK_LENGTH
from reverb_writer.windows import STRIDE_GAP, UNALIGNED_TAIL, EndOfEpisode, WindowSpec

Priority = float | Callable[..., float] | Literal["max"]
"""A number, finite and >= 0; a function that computes it from a window, a nest of arrays [L, ...]; or "max".

A function of two arguments also gets the kinds of the rows, uint8 [L] (`reverb_writer.rows`). "max" is the largest
priority that this process has set so far in the tables, at first 1.0.
"""

NEVER = 1 << 62
"""A step count that no episode reaches."""

Integers = npt.NDArray[np.int64]

_EPISODE_CHUNK_LENGTH, _MAX_EPISODE_CHUNK_LENGTH = 100, 4000
_EPISODE_CHUNK_BYTES = 1 << 20
_TINY_CHUNK_BYTES = 2048
_SHORT_CHUNK_LENGTH = 16


@dataclass(frozen=True)
class WindowTarget:
    """One kind of window, its tables and its priority.

    Attributes:
        spec: arithmetic of the windows.
        tables: the tables that get each window, in this order; empty for one table with the window's own name.
        priority: number for each item; or a function of the window; or "max", the largest priority that this process
            has set in the tables.

    Raises:
        SpecError: a table's name is empty or repeated, or the priority is not a finite number >= 0.
    """

    spec: WindowSpec
    tables: tuple[str, ...] = ()
    priority: Priority = 1.0

    def __post_init__(self) -> None:
        given: Any = self.tables
        names = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
        if not all(isinstance(name, str) and name for name in names) or len(set(names)) != len(names):
            raise SpecError(f"`table` must be a name or several different ones, got {given!r}.")
        object.__setattr__(self, "tables", names)
        if not callable(self.priority) and self.priority != "max":
            check_priority(self.priority, ", a function or 'max'")


def window_targets(
    table: str | Sequence[str] | None,
    spec: WindowSpec | None,
    priority: Priority,
    windows: Mapping[str, WindowSpec | WindowTarget] | None = None,
) -> list[WindowTarget]:
    """Turn an observer's arguments into its kinds of windows."""
    targets = []
    if spec is not None:
        if not table:
            raise SpecError("`table` must be a name or several different ones, got none.")
        targets.append(WindowTarget(spec, cast("tuple[str, ...]", table), priority))  # checked there
    for name, window in (windows or {}).items():
        if isinstance(window, WindowSpec):
            targets.append(WindowTarget(window, (name,), priority))
        elif isinstance(window, WindowTarget):
            targets.append(replace(window, tables=window.tables or (name,)))
        else:
            raise SpecError(f"`windows[{name!r}]` must be a WindowSpec or a WindowTarget, got {type(window).__name__}.")
    return targets


# ------------------------------------------------------------------------------------------------------------- chunks


def chunk_length_for(specs: Sequence[WindowSpec], step_bytes: float = math.inf, num_envs: int = 1) -> int:
    """Return the chunk length for windows of these kinds; `step_bytes` is the uncompressed size of a step.

    Windows that lie end to end (S = L) are one chunk each, or several share a chunk of up to 16 small steps. Chunks of
    other windows lie on the common grid of all starts and ends; if a window touches more than four of these chunks,
    the length is the shortest window's. Tiny chunks are doubled, and have 16 steps if steps are small. Whole episodes
    have chunks of 100 steps, and of up to 4,000 if these have at most 1 MiB in all environments together.
    `docs/decisions.md#chunk-length` has reasons and figures.

    >>> [chunk_length_for([WindowSpec(20, stride)]) for stride in (4, 5, 10, 20)]
    [20, 5, 10, 20]
    >>> [chunk_length_for([WindowSpec(20, stride)], step_bytes=52) for stride in (1, 10, 20)]
    [40, 20, 20]
    >>> [chunk_length_for([WindowSpec(2)], step_bytes) for step_bytes in (0, 52)]
    [16, 16]
    >>> [chunk_length_for([WindowSpec(length, length)], step_bytes=52) for length in (1, 3, 16)]
    [16, 15, 16]
    >>> [chunk_length_for([WindowSpec.whole_episode()], step_bytes) for step_bytes in (8, 2048, 28_224)]
    [4000, 512, 100]
    """
    finite = {(spec.sequence_length, spec.stride_length) for spec in specs if spec.sequence_length is not None}
    if not finite:
        by_bytes = int(_EPISODE_CHUNK_BYTES / max(step_bytes * num_envs, 1))
        return min(max(by_bytes, _EPISODE_CHUNK_LENGTH), _MAX_EPISODE_CHUNK_LENGTH)
    lengths = [length for length, _ in finite]
    grid = math.gcd(*lengths, *(stride for _, stride in finite))
    length = grid if grid * 4 >= max(lengths) else min(lengths)
    if length * step_bytes < _TINY_CHUNK_BYTES:
        most = min(_SHORT_CHUNK_LENGTH, int(_TINY_CHUNK_BYTES / max(step_bytes, 1)))
        length = max(most // length * length, length) if finite == {(length, length)} else max(2 * length, most)
    return min(length, MAX_CHUNK_LENGTH)


# -------------------------------------------------------------------------------------------------------------- items


@dataclass(frozen=True)
class EpisodeEnd:
    """The last windows of an episode; lists have one entry per kind of window."""

    limits: list[int]  # the step count up to which regular windows are complete, with padding
    closing: list[tuple[int, int] | None]  # an additional window (start, stop) off the stride, or None
    dropped: dict[str, int]  # steps in no window of a kind, by reason, summed over the kinds
    num_items: int  # items of all windows of the episode
    last: int  # step count at the end of the last window; 0 without a window


class WindowKinds:
    """The complete windows of an episode. Immutable.

    Attributes:
        targets: the kinds with their tables.
        tables: names of all tables that get windows.
        items_per_step: upper bound of the items that a step completes on average.
        longest: steps of the longest window.
        spans_episodes: whether windows cross the ends of episodes.
    """

    def __init__(self, targets: Sequence[WindowTarget], *, spans_episodes: bool) -> None:
        """Take the kinds of windows."""
        self.targets = tuple(targets)
        self.spans_episodes = spans_episodes
        self.tables = frozenset(itertools.chain.from_iterable(target.tables for target in targets))
        self.items_per_step = sum(len(target.tables) / target.spec.stride_length for target in targets)
        self.longest = max((target.spec.sequence_length or NEVER) for target in targets)
        # Upper bounds of the items that rows complete: once per environment, additionally per row, and in one row; and
        # whether the end of an episode may complete several windows of a kind at once.
        self._at_once, self._per_row, self._most_per_row, self._has_tail = 0, 0.0, 0, False
        for target in targets:
            length, stride, num_tables = target.spec.sequence_length, target.spec.stride_length, len(target.tables)
            mode = target.spec.end_of_episode
            self._most_per_row += num_tables
            if length is not None and mode is EndOfEpisode.DROP:
                self._at_once += num_tables
                # The most windows are in episodes of L + 1 steps that a reset ends: two if S > 1.
                self._per_row += num_tables / min(stride, (length + 1) / 2)
            else:
                self._per_row += num_tables
                if length is not None and mode is EndOfEpisode.TILE:
                    self._at_once += num_tables * (-(-(length - 1) // stride))
                    self._has_tail = True

    def num_items(self, num_steps: Any) -> Any:
        """Return the number of items of the regular windows in the first `num_steps` of an episode; elementwise.

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
        """Return the windows of kind `index` in several episodes: number of the episode, first step, and end.

        An episode's windows end at step counts above its `after` and up to its limit; its closing window follows.
        """
        spec = self.targets[index].spec
        before, upto = spec.num_windows(after), spec.num_windows(limits)
        counts = upto - before
        of = np.repeat(np.arange(len(counts)), counts)
        # The windows of an episode are numbered from `before` and are adjacent in the result.
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
        """Return the number of rows that may be written until `num_items` items are complete, at any ends of episodes.

        The last row may complete more, and so may the first reset. The result is at least one row if `num_items` > 0.

        >>> WindowKinds([WindowTarget(WindowSpec(20), ("a",))], spans_episodes=False).rows_within(400, 1)
        400
        >>> WindowKinds([WindowTarget(WindowSpec(20, 10), ("a",))], spans_episodes=False).rows_within(400, 1)
        3980
        >>> tiles = WindowTarget(WindowSpec(20, 10, "tile"), ("a",))  # two more when an episode ends
        >>> WindowKinds([tiles], spans_episodes=False).rows_within(400, 1)
        398
        """
        if num_items <= 0:
            return 0
        by_rate = 1 + int((num_items - 1 - self._at_once * num_envs) // self._per_row)
        by_row = 1 if self._has_tail else 1 + (num_items - 1) // self._most_per_row
        return max(by_rate, by_row, 1)

    def episode_end(self, n: int, *, align: bool = False, discard: str | None = None) -> EpisodeEnd:
        """Return the end of an episode of `n` steps.

        If `align`, the last L steps also become a window in DROP mode, unless a regular window has them. If `discard`
        is a reason, no window is added, and all steps without a window are counted under this reason.
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
            # Not by ALIGN_END: that mode does not allow S > L, but a reset does.
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
    """Return whether a reset may write `n` steps: some kind is not DROP, or its window has at most `n` steps."""
    return any(
        target.spec.end_of_episode is not EndOfEpisode.DROP or n >= (target.spec.sequence_length or 1)
        for target in targets
    )
