"""Which windows of an episode are complete but not written, where they go, and their priorities."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from reverb_writer.writing.priorities import EpisodeEnd, Priority, WindowPriorities
from reverb_writer.writing.window_items import Integers, Windows
from reverb_writer.writing.window_targets import NEVER, WindowTarget, episode_end


class WindowScheduler:
    """Decides which windows of one episode to write next; integers, but for functions as priorities.

    Not thread-safe: its writer holds a lock.
    """

    def __init__(
        self,
        targets: Sequence[WindowTarget],
        padding_step: Sequence[Any],
        pack: Callable[[Sequence[Any]], Any],
        largest: Callable[[Sequence[str]], float],
    ) -> None:
        """Begin an empty episode."""
        # names of all tables that get windows
        self.tables = frozenset(itertools.chain.from_iterable(target.tables for target in targets))
        # items that a step adds in the long run
        self.items_per_step = sum(len(target.tables) / target.spec.stride_length for target in targets)
        self.longest = max((target.spec.sequence_length or NEVER) for target in targets)  # steps of the longest window
        self.written = 0  # windows that end at or before this step count are written
        self._padding_step, self._pack, self._largest = padding_step, pack, largest
        self.targets = tuple(targets)  # the kinds of windows
        # asks the functions among the priorities; None if there are none
        self.priorities = self._priorities_of(self.targets)

    def _priorities_of(self, targets: Sequence[WindowTarget]) -> WindowPriorities | None:
        if not any(callable(target.priority) for target in targets):
            return None
        specs, functions = [target.spec for target in targets], [target.priority for target in targets]
        return WindowPriorities(specs, functions, self._padding_step, self._pack)

    def begin_episode(self) -> None:
        """Forget the windows of the last episode."""
        self.written = 0
        if self.priorities is not None:
            self.priorities.clear()

    def with_priority(
        self, index: int, priority: Priority, num_steps: int
    ) -> tuple[tuple[WindowTarget, ...], WindowPriorities | None]:
        """Return the `targets` and `priorities` to set for a new priority of one kind after `num_steps` steps."""
        target = replace(self.targets[index], priority=priority)
        targets = (*self.targets[:index], target, *self.targets[index + 1 :])
        priorities = self._priorities_of(targets)
        if priorities is not None:
            priorities.take_over(self.priorities, num_steps)
        return targets, priorities

    def episode_end(self, num_steps: int, *, align: bool = False, discard: str | None = None) -> EpisodeEnd:
        """Return what the end of an episode of so many steps adds; see the function of the same name."""
        return episode_end(self.targets, num_steps, align=align, discard=discard)

    def window_ends(self, index: int, count: int, end: EpisodeEnd | None) -> range:
        """Return the step counts, up to `count`, at which unwritten windows of a kind are complete."""
        if end is not None:
            count = min(count, end.num_steps + end.num_padding[index])
        return self.targets[index].spec.ends(self.written, count)

    def last_window_end(self, count: int, end: EpisodeEnd | None) -> int:
        """Return the last step count, up to `count`, at which an unwritten window is complete; 0 if there is none."""
        all_ends = (self.window_ends(i, count, end) for i in range(len(self.targets)))
        return max((ends[-1] for ends in all_ends if ends), default=0)

    def num_items(self, count: int, end: EpisodeEnd | None) -> int:
        """Return how many items the unwritten windows make that are complete at step count `count`."""
        return sum(len(self.window_ends(i, count, end)) * len(target.tables) for i, target in enumerate(self.targets))

    def num_regular_items(self, counts: Integers) -> int:
        """Return how many items the regular windows make that are complete at these step counts of episodes, [N]."""
        return sum(
            len(target.tables) * int(np.maximum((counts - length) // target.spec.stride_length + 1, 0).sum())
            for target in self.targets
            if (length := target.spec.sequence_length) is not None
        )

    def steps_until(self, num_items: int, counts: Integers) -> int:
        """Return a lower bound, >= 1, of the steps after which `num_items` more items are complete.

        Args:
            num_items: items of regular windows, of all episodes together, >= 1.
            counts: step counts of the episodes, [N]; each takes as many steps.
        """
        nearest = min(
            (
                int(np.maximum(length - counts, 1 + (length - counts - 1) % target.spec.stride_length).min())
                for target in self.targets
                if (length := target.spec.sequence_length) is not None
            ),
            default=NEVER,
        )
        # In `nearest` + k steps, a kind of window makes at most k / stride_length + 1 items per episode and table.
        at_once = len(counts) * sum(len(target.tables) for target in self.targets)
        return nearest + max(0, int((num_items - at_once) / (len(counts) * self.items_per_step)))

    def windows(self, count: int, end: EpisodeEnd | None) -> list[Windows]:
        """Return the unwritten windows that are complete at step count `count`, and closing windows, by kind."""
        windows = []
        for i, target in enumerate(self.targets):
            numbers = self.window_ends(i, count, end)
            ends = np.arange(numbers.start, numbers.stop, numbers.step, np.int64)
            starts = ends - (target.spec.sequence_length or 0)
            if end is not None and (closing := end.closing[i]) is not None:
                starts, ends = np.append(starts, closing[0]), np.append(ends, closing[1])
            if callable(target.priority) and self.priorities is not None:
                priorities = self.priorities.known(i, ends.tolist())
            else:
                priority = self._largest(target.tables) if target.priority == "max" else target.priority
                priorities = np.full(len(ends), priority, np.float64)
            windows.append(Windows(target.tables, starts, ends, priorities))
        return windows
