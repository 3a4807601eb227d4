"""The writers of environments that step together, filled by one copy a leaf."""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reverb_writer.writing.priorities import StepPlan
from reverb_writer.writing.sequence_writer import SequenceWriter

__all__ = ["VectorWriter"]


class _Step(NamedTuple):
    """A step of some lanes, which none, some or all of their writers have taken.

    Attributes:
        writers: of the lanes.
        before: of each, how many steps it had taken.
        last: of each, whether the step ends its episode; None if none does.
        plans: of each, what its priority functions said; None if there are none.
    """

    writers: list[SequenceWriter]
    before: list[int]
    last: list[bool] | None
    plans: list[StepPlan | None] | None


class VectorWriter:
    """Writers of N environments, each with episodes of its own.

    A step is committed for all lanes by one assignment; then they take it one after the other. A call that is cut off
    in between is completed by the next one.

    Attributes:
        num_calls: how often `append` was called.

    Thread-safe.
    """

    def __init__(
        self,
        writers: Sequence[SequenceWriter],
        blocks: Sequence[npt.NDArray[Any]],
        lock: threading.RLock,
        *,
        asks: bool,
    ) -> None:
        """Begin with empty episodes.

        Args:
            writers: of each lane, all with this `lock`; their `buffers` are those of the blocks.
            blocks: of each leaf the chunks that are being filled, [N, chunk_length, ...].
            lock: held while a step is taken.
            asks: whether a priority is a function.
        """
        self._writers, self._blocks, self._lock, self._asks = list(writers), list(blocks), lock, asks
        self._step: _Step | None = None
        self._is_settled = True
        self.num_calls = 0

    @property
    def num_taken(self) -> int:
        """Steps taken."""
        return sum(writer.num_taken for writer in self._writers)

    @property
    def num_episodes(self) -> int:
        """Episodes ended."""
        return sum(writer.num_episodes for writer in self._writers)

    @property
    def dropped(self) -> collections.Counter[str]:
        """Steps in no window, by reason."""
        return sum((writer.dropped for writer in self._writers), collections.Counter())

    @property
    def num_due(self) -> int:
        """Items of windows that are complete and not yet in a request."""
        with self._lock:
            self._settle()
            return sum(writer.num_due for writer in self._writers)

    def send(self) -> None:
        """Send the windows that are complete."""
        with self._lock:
            self._settle()
            self._is_settled = False
            for writer in self._writers:
                writer.send()
            self._is_settled = True

    def append(
        self, leaves: Sequence[Any], last: npt.NDArray[np.bool_], chosen: npt.NDArray[np.integer[Any]]
    ) -> dict[str, int]:
        """Add a step to the episodes of the chosen lanes.

        Args:
            leaves: [N, ...] each.
            last: [N], whose episodes it ends.
            chosen: numbers of the lanes, ascending.

        Returns:
            Steps of ended episodes that no window holds, by reason.

        Raises:
            SpecError: a priority function gave no finite number >= 0. Nothing changed.
        """
        with self._lock:
            self._settle()
            every = len(chosen) == len(self._writers)
            writers = self._writers if every else [self._writers[lane] for lane in chosen]
            marks = (last if every else last[chosen]).tolist()
            ends = marks if True in marks else None
            rows = [writer.fill for writer in writers]
            plans = None
            if self._asks:
                steps = ([leaf[lane] for leaf in leaves] for lane in chosen)
                asked = zip(writers, steps, ends or itertools.repeat(False), strict=False)
                plans = [writer.plan(step, last=end) for writer, step, end in asked]
            at = rows[0] if every and rows.count(rows[0]) == len(rows) else None
            for block, leaf in zip(self._blocks, leaves, strict=True):
                if at is None:
                    block[chosen, rows] = leaf[chosen]
                else:
                    block[:, at] = leaf
            step = _Step(writers, [writer.num_taken for writer in writers], ends, plans)
            self._step, self._is_settled = step, False
            dropped: dict[str, int] = {}
            if ends is None and plans is None:
                for writer in writers:
                    writer.advance()
            else:
                dropped = self._take(step)
            self._step, self._is_settled, self.num_calls = None, True, self.num_calls + 1
            return dropped

    def end_episodes(self, lanes: Iterable[int], *, align: bool = False, discard: bool = False) -> dict[str, int]:
        """End the episodes of some lanes here; those that are too short to `align` are dropped."""
        dropped: collections.Counter[str] = collections.Counter()
        with self._lock:
            self._settle()
            self._is_settled = False
            for lane in lanes:
                writer = self._writers[lane]
                dropped.update(writer.end_episode(align=align, discard=discard))
            self._is_settled = True
        return dropped

    def _settle(self) -> None:
        """Complete a call that was cut off."""
        if not self._is_settled:
            for writer in self._writers:
                writer.settle()
            if self._step is not None:
                self._take(self._step)
            self._step, self._is_settled = None, True

    def _take(self, step: _Step) -> dict[str, int]:
        """Have the writers take the step that have not yet; return what they drop."""
        dropped: collections.Counter[str] = collections.Counter()
        last, plans = step.last or itertools.repeat(False), step.plans or itertools.repeat(None)
        for writer, before, ends, plan in zip(step.writers, step.before, last, plans, strict=False):
            if writer.num_taken == before and (of_one := writer.advance(last=ends, plan=plan)):
                dropped.update(of_one)
        return dropped
