"""The windows that an observer writes, their tables and their priority; the number of complete items.

Integers only. `WindowSpec` has the arithmetic of one episode.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from reverb_writer.arguments import check_priority
from reverb_writer.windows import STRIDE_GAP, UNALIGNED_TAIL, EndOfEpisode, WindowSpec

Priority = float | Callable[..., float] | Literal["max"]
"""A number, finite and >= 0; a function that computes it from a window, a nest of arrays [L, ...]; or "max".

A function of two arguments also gets the kinds of the rows, uint8 [L] (`reverb_writer.rows`). "max" is the largest
priority that this process, or the learner whose `Variables` it reads, has set so far in the tables, at first 1.0.
"""

NEVER = 1 << 62
"""A step count that no episode reaches."""

Integers = npt.NDArray[np.int64]


class EpisodeEnd(NamedTuple):
    """The last windows of an episode."""

    limit: int  # the step count up to which regular windows are complete, with padding
    closing: tuple[int, int] | None  # an additional window (start, stop) off the stride, or None
    dropped: dict[str, int]  # steps in no window, by reason
    num_items: int  # items of all windows of the episode
    covered_to: int  # step count at the end of the last window; 0 without a window


@dataclass(frozen=True, eq=False)
class WindowTarget:
    """The windows of an observer, their tables and their priority.

    Attributes:
        spec: arithmetic of the windows.
        tables: the tables that get each window, in this order.
        priority: number for each item; or a function of the window; or "max", the largest priority that this process
            has set in the tables.
        spans_episodes: whether windows cross the ends of episodes.
        max_steps: an episode with more steps is not written.
        length: steps of a window, `NEVER` for whole episodes.
        num_tables: number of tables.

    Raises:
        SpecError: the priority is not a finite number >= 0.
    """

    spec: WindowSpec
    tables: tuple[str, ...]
    priority: Priority = 1.0
    spans_episodes: bool = False
    max_steps: float = math.inf
    length: int = field(init=False)
    num_tables: int = field(init=False)

    def __post_init__(self) -> None:
        if not callable(self.priority) and self.priority != "max":
            check_priority(self.priority, ", a function or 'max'")
        object.__setattr__(self, "num_tables", len(self.tables))
        object.__setattr__(self, "length", self.spec.sequence_length or NEVER)

    @property
    def items_per_step(self) -> float:
        """Upper bound of the items that a step completes on average."""
        return self.num_tables / self.spec.stride_length

    def num_items(self, num_steps: Any) -> Any:
        """Return the number of items of the regular windows in the first `num_steps` of an episode; elementwise.

        >>> target = WindowTarget(WindowSpec(3, 2), ("a", "b"))
        >>> [target.num_items(count) for count in (2, 3, 5, 6)], target.num_items(np.array([2, 7]))
        ([0, 2, 4, 4], array([0, 6]))
        """
        return self.num_tables * self.spec.num_windows(num_steps)

    def windows(
        self, after: Integers, limits: Integers, closing: Sequence[tuple[int, int] | None]
    ) -> tuple[Integers, Integers, Integers]:
        """Return the windows in several episodes: number of the episode, first step, and end.

        An episode's windows end at step counts above its `after` and up to its limit; its closing window follows.
        """
        spec = self.spec
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

    # ---------------------------------------------------------------------------- what a row or an end completes

    def completed_by(self, num_steps: int) -> int:
        """Return the number of items that the step at this count completes, as a regular window.

        >>> [WindowTarget(WindowSpec(3, 2), ("a", "b")).completed_by(count) for count in range(1, 8)]
        [0, 0, 2, 0, 2, 0, 2]
        """
        past = num_steps - self.length
        return 0 if past < 0 or past % self.spec.stride_length else self.num_tables

    def completed_by_each(self, num_steps: Integers) -> int:
        """Return the number of items that steps at these counts complete, one of each environment."""
        past = num_steps - self.length
        if self.spec.stride_length == 1:
            return int(np.count_nonzero(past >= 0)) * self.num_tables
        return int(np.count_nonzero((past >= 0) & (past % self.spec.stride_length == 0))) * self.num_tables

    def completed_by_end(self, num_steps: int, *, align: bool = False) -> int:
        """Return the number of items that the end of an episode completes besides its regular windows.

        `align` is as for `episode_end`.

        >>> tiles = WindowTarget(WindowSpec(4, end_of_episode="tile"), ("a",))
        >>> tiles.completed_by_end(2), tiles.completed_by_end(9)
        (2, 3)
        """
        if num_steps == 0 or num_steps > self.max_steps:
            return 0
        return _num_at_end(self.spec, num_steps, align=align) * self.num_tables

    def steps_until(self, num_items: int, num_steps: int) -> int:
        """Return after how many steps of an open episode of `num_steps` at least `num_items` > 0 are complete.

        >>> WindowTarget(WindowSpec(3, 2), ("a",)).steps_until(2, num_steps=4)  # at 5 and 7
        3
        """
        number: int = self.spec.num_windows(num_steps) - 1 - (-num_items // self.num_tables)
        return self.length + number * self.spec.stride_length - num_steps

    def episode_end(self, n: int, *, align: bool = False, discard: str | None = None) -> EpisodeEnd:
        """Return the end of an episode of `n` steps.

        If `align`, the last L steps also become a window in DROP mode, unless a regular window has them. If `discard`
        is a reason, no window is added, and all steps without a window are counted under this reason.
        """
        spec, length = self.spec, self.spec.sequence_length
        if discard is not None:
            spec = WindowSpec(self.length, spec.stride_length)
        closing = None if discard is not None else _closing_window(spec, n, align=align)
        dropped: collections.Counter[str] = collections.Counter(spec.num_dropped(n))
        if closing is not None and UNALIGNED_TAIL in dropped:  # the reset's window, which `spec` does not have
            between = dropped.pop(UNALIGNED_TAIL) - self.length
            if between > 0:
                dropped[STRIDE_GAP] += between
        limit = n + spec.num_padding(n)
        num_windows = spec.num_windows(limit)
        last_regular = (length or 0) + (num_windows - 1) * spec.stride_length if num_windows else 0
        covered_to = max(last_regular, 0 if closing is None else closing[1])
        if discard is not None and dropped:
            dropped = collections.Counter({discard: sum(dropped.values())})
        num_items = (num_windows + (closing is not None)) * self.num_tables
        return EpisodeEnd(limit, closing, dict(dropped), num_items, covered_to)

    def can_reset(self, n: int) -> bool:
        """Return whether `reset()` without `discard` may end an episode of `n` steps: something of it is written."""
        return self.spec.end_of_episode is not EndOfEpisode.DROP or n >= (self.spec.sequence_length or 1)


def _closing_window(spec: WindowSpec, n: int, *, align: bool) -> tuple[int, int] | None:
    """Return the window off the stride at the end of an episode of `n` steps; `align` is as for `episode_end`."""
    length, stride = spec.sequence_length, spec.stride_length
    # Not by ALIGN_END: that mode does not allow S > L, but a reset does.
    if align and spec.end_of_episode is EndOfEpisode.DROP and length and n >= length and (n - length) % stride:
        return (n - length, n)
    return spec.closing_window(n)


@functools.lru_cache(4096)
def _num_at_end(spec: WindowSpec, n: int, *, align: bool) -> int:
    """Return the number of windows that the end of an episode of `n` steps adds to the regular ones."""
    num_padded: int = spec.num_windows(n + spec.num_padding(n)) - spec.num_windows(n)
    return num_padded + int(_closing_window(spec, n, align=align) is not None)
