"""The ring between an observer and its sender: one thread writes rows, another one reads them, without a lock.

    observer: copies a step's leaves into the next rows -> `head` advances by one assignment
    sender:   reads rows below `head` -> seals chunks of rows -> `granted` bounds the observer's rows

A row is one step of one environment. A call of N environments writes N rows, and up to N boundary rows. A mark stands
between two rows. Only the observer assigns `head`, and only the sender assigns `granted`. So a call that an interrupt
ends is either taken or not, never half.

Source: Lamport 1977, Proving the correctness of multiprocess programs (one producer, one consumer).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reverb_writer.writing.step_kinds import START, Boundary, Kinds

_MAX_ROWS = 1024
_MIN_ROWS = 4


class Reset(NamedTuple):
    """A mark: the episodes of some environments end here."""

    env_ids: Sequence[int]
    discard: bool  # write only windows that are complete now; if False, DROP also writes a window of the last L steps


def ring_rows(row_bytes: float, num_envs: int, chunk_length: int, max_bytes: int) -> int:
    """Return the number of rows of a ring: at least two chunks per environment, unless they need too much memory.

    >>> ring_rows(52, 1, 40, 128 << 20), ring_rows(28_224, 256, 20, 128 << 20)
    (1024, 4755)
    """
    wanted = max(_MAX_ROWS, 2 * (chunk_length + 1) * num_envs)
    return max(min(wanted, int(max_bytes // max(row_bytes, 1))), _MIN_ROWS * num_envs)


class StepRing:
    """Rows of steps. The observer's thread calls `write...` and `mark`; the sender's thread calls the rest.

    Attributes:
        size: number of rows.
        num_envs: number of environments, 1 also for steps without a batch dimension.
        columns: arrays [size, ...], one per leaf.
        kinds: the kind of each row, uint8 [size].
        last: whether an episode ends with each row, [size].
        envs: number of the environment of each row, [size].
        marks: by number, each mark and the row before which it stands; the sender removes them.
        rows_per_call: most rows that one call writes.
        head: progress of the observer, assigned only by it: the rows written so far; the steps of the open episode, or
            of the stream if windows span episodes, an integer or an array [N] that is never changed in place; the
            marks written so far; and the state after the last row (`step_kinds`), an integer or an array [N].
        granted: rows below this may be written; a call that begins below it is not split. Only the sender assigns it.
        free, granted_ends: where each episode is one item, rows below `free` may be written, and an end of an episode
            while `num_ends` is below `granted_ends`. Only the sender assigns them.
        num_ends: ends of episodes written so far; a call that an interrupt ends may be missing.
        wake_at: the call that writes this row or a later one wakes the sender. Only the sender assigns it.
    """

    def __init__(
        self,
        dtypes: Sequence[np.dtype[Any]],
        shapes: Sequence[tuple[int, ...]],
        num_envs: int | None,
        size: int,
        *,
        spans_episodes: bool,
    ) -> None:
        """Allocate the rows; if windows span episodes, steps are counted across ends of episodes."""
        self.size, self.num_envs = size, num_envs or 1
        self.rows_per_call = 2 * self.num_envs
        self.columns: list[npt.NDArray[Any]] = [
            np.zeros((size, *shape), dtype) for dtype, shape in zip(dtypes, shapes, strict=True)
        ]
        self._flags, self._kinds = bytearray(size), bytearray(size)  # their memory: one element is set faster here
        self.last, self.kinds = np.frombuffer(self._flags, np.bool_), np.frombuffer(self._kinds, np.uint8)
        self.envs = np.zeros(size, np.int32)
        self.marks: dict[int, tuple[int, Reset | float]] = {}
        self.head: tuple[int, Any, int, Any] = (0, 0, 0, START)
        if num_envs is not None:
            self.head = 0, np.zeros(num_envs, np.int64), 0, np.full(num_envs, START, np.uint8)
        self.granted = self.free = self.granted_ends = self.num_ends = 0
        self.wake_at = 0
        self._spans_episodes = spans_episodes

    # ------------------------------------------------------------------------------------------ the observer's side

    def write(
        self, leaves: Sequence[Any], kind: int, state: int, boundary: Boundary | None = None, *, last: bool
    ) -> None:
        """Write a row of the only environment, and its boundary row; `last`: whether the episode ends with the row."""
        written, num_steps, num_marks, _ = self.head
        row = written % self.size
        for column, leaf in zip(self.columns, leaves):  # noqa: B905  # equal in number, and the hottest line
            column[row] = leaf
        self._kinds[row], self._flags[row] = kind, last
        count = 1
        if boundary is not None:
            last_row = (written + 1) % self.size
            for column, leaf in zip(self.columns, boundary.leaves, strict=True):
                column[last_row] = leaf
            self._kinds[last_row], self._flags[last_row] = state, last = boundary.kind, True
            count = 2
        steps = 0 if last and not self._spans_episodes else num_steps + count
        self.head = written + count, steps, num_marks, state
        self.num_ends += last

    def write_block(self, columns: Sequence[Any], kinds: Kinds, state: int, *, last: bool = False) -> None:
        """Write rows of the only environment, at most `size`; `last`: whether the episode ends with the last one."""
        written, num_steps, num_marks, _ = self.head
        num_rows = len(kinds)
        rows = self.rows(written, written + num_rows)
        for own, column in zip(self.columns, columns, strict=True):
            own[rows] = column[:num_rows]
        self.kinds[rows] = kinds
        self.last[rows] = False
        self._flags[(written + num_rows - 1) % self.size] = last
        steps = 0 if last and not self._spans_episodes else num_steps + num_rows
        self.head = written + num_rows, steps, num_marks, state
        self.num_ends += last

    def write_envs(
        self,
        leaves: Sequence[Any],
        kinds: Kinds,
        states: Kinds,
        env_ids: npt.NDArray[np.integer[Any]],
        boundary: Boundary | None = None,
        *,
        last: npt.NDArray[np.bool_],
    ) -> None:
        """Write a row of each environment in `env_ids`, then the boundary rows.

        Leaves [N, ...], kinds, states and `last` [N] are of all environments.
        """
        written, counts, num_marks, before = self.head
        counts, after = counts.copy(), np.array(states, np.uint8)
        if len(env_ids) != len(counts):
            after = before.copy()
            after[env_ids] = states[env_ids]
        parts = [(leaves, kinds, env_ids, last)]
        if boundary is not None and boundary.env_ids is not None:
            parts.append((boundary.leaves, boundary.kind, boundary.env_ids, np.ones(len(counts), bool)))
            after[boundary.env_ids] = boundary.kind[boundary.env_ids]
        for of_leaves, of_kinds, ids, is_last in parts:
            rows = self.rows(written, written + len(ids))
            is_all = len(ids) == len(counts)
            for column, leaf in zip(self.columns, of_leaves):  # noqa: B905  # as above
                column[rows] = leaf if is_all else leaf[ids]
            self.kinds[rows], self.last[rows], self.envs[rows] = of_kinds[ids], is_last[ids], ids
            counts[ids] += 1
            if not self._spans_episodes:
                counts[ids[is_last[ids]]] = 0
            written += len(ids)
        self.head = written, counts, num_marks, after

    def mark(self, mark: Reset | float) -> None:
        """Write a mark; the next mark overwrites it if an interrupt comes before `head` is assigned.

        A number is the priority of the whole episodes that end after it.
        """
        written, num_steps, num_marks, state = self.head
        self.marks[num_marks] = (written, mark)
        if isinstance(mark, Reset):
            if isinstance(num_steps, int):
                num_steps, state = 0, START
            else:
                num_steps, state = num_steps.copy(), state.copy()
                num_steps[list(mark.env_ids)], state[list(mark.env_ids)] = 0, START
        self.head = (written, num_steps, num_marks + 1, state)

    # -------------------------------------------------------------------------------------------- the sender's side

    def room(self, row: int) -> int:
        """Return the number of rows that may be written from `row`; not positive for none."""
        return self.granted - row

    @property
    def is_due(self) -> bool:
        """Whether the sender must be awake."""
        return self.head[0] > self.wake_at

    def rows(self, start: int, stop: int) -> Any:
        """Return an index for the rows `start` to `stop`: a slice, unless they cross the end of the ring."""
        first = start % self.size
        if first + stop - start <= self.size:
            return slice(first, first + stop - start)
        return np.arange(start, stop) % self.size
