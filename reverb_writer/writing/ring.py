"""The ring between an observer and its sender: one thread writes rows, another one reads them, without a lock.

    observer: copies a step's leaves into the next rows -> `head` advances by one assignment
    sender:   reads rows below `head` -> seals chunks of rows -> `granted` bounds the observer's rows

A row is one step of one environment. A call of N environments writes N rows. A mark stands between two rows. Only the
observer assigns `head`, and only the sender assigns `granted`. So a step or a mark of an interrupted call is either
taken or not, never half.

Source: Lamport 1977, Proving the correctness of multiprocess programs (one producer, one consumer).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

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
        last: whether each row is the last step of an episode, [size].
        envs: number of the environment of each row, [size].
        marks: by number, each mark and the row before which it stands; the sender removes them.
        head: progress of the observer, assigned only by it: the rows written so far; the steps of the open episode, or
            of the stream if windows span episodes, an integer or an array [N] that is never changed in place; and the
            marks written so far.
        granted: rows below this may be written; a call that begins below it is not split. Only the sender assigns it.
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
        self.columns: list[npt.NDArray[Any]] = [
            np.zeros((size, *shape), dtype) for dtype, shape in zip(dtypes, shapes, strict=True)
        ]
        self._flags = bytearray(size)  # the memory of `last`: one flag is set faster here
        self.last = np.frombuffer(self._flags, np.bool_)
        self.envs = np.zeros(size, np.int32)
        self.marks: dict[int, tuple[int, Reset | float]] = {}
        self.head: tuple[int, Any, int] = (0, 0 if num_envs is None else np.zeros(num_envs, np.int64), 0)
        self.granted = 0
        self.wake_at = 0
        self._spans_episodes = spans_episodes

    # ------------------------------------------------------------------------------------------ the observer's side

    def write(self, leaves: Sequence[Any], *, last: bool) -> None:
        """Write a step of the only environment."""
        written, num_steps, num_marks = self.head
        row = written % self.size
        for column, leaf in zip(self.columns, leaves):  # noqa: B905  # equal in number, and the hottest line
            column[row] = leaf
        self._flags[row] = last
        self.head = (written + 1, 0 if last and not self._spans_episodes else num_steps + 1, num_marks)

    def write_block(self, columns: Sequence[Any], num_rows: int) -> None:
        """Write steps of the only environment, at most `size`; none ends the episode."""
        written, num_steps, num_marks = self.head
        rows = self.rows(written, written + num_rows)
        for own, column in zip(self.columns, columns, strict=True):
            own[rows] = column[:num_rows]
        self.last[rows] = False
        self.head = (written + num_rows, num_steps + num_rows, num_marks)

    def write_envs(
        self,
        leaves: Sequence[Any],
        last: npt.NDArray[np.bool_],
        env_ids: npt.NDArray[np.integer[Any]],
    ) -> None:
        """Write a step of each environment in `env_ids`; leaves [N, ...] and `last` [N] are of all environments."""
        written, num_steps, num_marks = self.head
        rows = self.rows(written, written + len(env_ids))
        if len(env_ids) == len(num_steps):
            counts = num_steps + 1
            for column, leaf in zip(self.columns, leaves):  # noqa: B905  # as above
                column[rows] = leaf
        else:
            last, counts = last[env_ids], num_steps.copy()
            counts[env_ids] += 1
            for column, leaf in zip(self.columns, leaves, strict=True):
                column[rows] = leaf[env_ids]
        if not self._spans_episodes:
            counts[env_ids[last]] = 0
        self.last[rows] = last
        self.envs[rows] = env_ids
        self.head = (written + len(env_ids), counts, num_marks)

    def mark(self, mark: Reset | float) -> None:
        """Write a mark; the next mark overwrites it if an interrupt comes before `head` is assigned.

        A number is the priority of the whole episodes that end after it.
        """
        written, num_steps, num_marks = self.head
        self.marks[num_marks] = (written, mark)
        if isinstance(mark, Reset):
            if isinstance(num_steps, int):
                num_steps = 0
            else:
                num_steps = num_steps.copy()
                num_steps[list(mark.env_ids)] = 0
        self.head = (written, num_steps, num_marks + 1)

    # -------------------------------------------------------------------------------------------- the sender's side

    def rows(self, start: int, stop: int) -> Any:
        """Return an index for the rows `start` to `stop`: a slice, unless they cross the end of the ring."""
        first = start % self.size
        if first + stop - start <= self.size:
            return slice(first, first + stop - start)
        return np.arange(start, stop) % self.size
