"""The kinds of windows that an observer writes: which are complete, how many items they make. Integers only."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.windows import STRIDE_GAP, UNALIGNED_TAIL, EndOfEpisode, WindowSpec
from reverb_writer.writing.window_targets import NEVER, WindowTarget

Integers = npt.NDArray[np.int64]


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

    def with_priority(self, priority: Any) -> WindowKinds:
        """Return the same kinds with another priority."""
        targets = [replace(target, priority=priority) for target in self.targets]
        return WindowKinds(targets, spans_episodes=self.spans_episodes)

    def num_items(self, num_steps: Any) -> Any:
        """Return how many items the regular windows of so many steps of an episode make; elementwise of an array.

        >>> kinds = WindowKinds([WindowTarget(WindowSpec(3, 2), ("a", "b"))], spans_episodes=False)
        >>> [kinds.num_items(count) for count in (2, 3, 5, 6)], kinds.num_items(np.array([2, 7]))
        ([0, 2, 4, 4], array([0, 6]))
        """
        count: Any = num_steps * 0
        for target in self.targets:
            count = count + len(target.tables) * _num_windows(target.spec, num_steps)
        return count

    def windows(
        self, index: int, after: Integers, limits: Integers, closing: Sequence[tuple[int, int] | None]
    ) -> tuple[Integers, Integers, Integers]:
        """Return the windows of a kind, of several episodes: number of the episode, first step and end of each.

        Args:
            index: of the kind.
            after: step count of each episode after which the windows end.
            limits: step count of each episode up to which they do.
            closing: the window that is added to each, after its others; None for none.
        """
        spec = self.targets[index].spec
        before, upto = _num_windows(spec, after), _num_windows(spec, limits)
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

        Args:
            n: steps of the episode.
            align: whether DROP's windows get the last L steps too, if they are in no window yet.
            discard: the reason under which all steps without a window are counted, if nothing is added; None to add.
        """
        limits: list[int] = []
        all_closing: list[tuple[int, int] | None] = []
        dropped: collections.Counter[str] = collections.Counter()
        num_items = last = 0
        for target in self.targets:
            spec = target.spec if discard is None else _without_end(target.spec)
            closing, reasons = spec.closing_window(n), spec.num_dropped(n)
            length = spec.sequence_length
            # By hand, not by ALIGN_END: that mode does not go with S > L, a reset does.
            if (
                align
                and spec.end_of_episode is EndOfEpisode.DROP
                and length
                and n >= length
                and (n - length) % spec.stride_length
            ):
                closing = (n - length, n)
                between = reasons.pop(UNALIGNED_TAIL) - length
                if between > 0:
                    reasons[STRIDE_GAP] = reasons.get(STRIDE_GAP, 0) + between
            limit = n + spec.num_padding(n)
            num_windows = _num_windows(spec, limit)
            if num_windows:
                last = max(last, (length or 0) + (num_windows - 1) * spec.stride_length)
            if closing is not None:
                last = max(last, closing[1])
            num_items += (num_windows + (closing is not None)) * len(target.tables)
            limits.append(limit)
            all_closing.append(closing)
            dropped.update({discard: sum(reasons.values())} if discard and reasons else reasons)
        return EpisodeEnd(limits, all_closing, dropped, num_items, last)


def _num_windows(spec: WindowSpec, num_steps: Any) -> Any:
    """Return how many regular windows so many steps have; elementwise of an array."""
    length, stride = spec.sequence_length or NEVER, spec.stride_length
    return (num_steps - length + stride) // stride * (num_steps >= length)


def can_align(targets: Sequence[WindowTarget], n: int) -> bool:
    """Whether a reset after `n` steps has something to write, or nothing that it could lose."""
    return any(
        target.spec.end_of_episode is not EndOfEpisode.DROP or n >= (target.spec.sequence_length or 1)
        for target in targets
    )


def _without_end(spec: WindowSpec) -> WindowSpec:
    """Return the spec with nothing added at the end; a whole episode keeps nothing."""
    length = spec.sequence_length
    return WindowSpec(NEVER) if length is None else WindowSpec(length, spec.stride_length)
