"""The ring between an observer and its sender: one thread writes rows, another one reads them, without a lock.

    observer: copies a step's leaves into the next rows -> `head` advances by one assignment
    sender:   reads rows below `head` -> seals chunks of rows -> `granted` bounds the observer's rows and items

A row is one step of one environment. A call of N environments writes N rows, and up to N boundary rows. A mark stands
between two rows. The observer counts the items that its rows and marks complete. Only the observer assigns `head`, and
only the sender assigns `granted`. So a call that an interrupt ends is either taken or not, never half.

Source: Lamport 1977, Proving the correctness of multiprocess programs (one producer, one consumer).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reverb_writer.writing.step_kinds import START, Kinds, Row
from reverb_writer.writing.window_target import WindowTarget

END = 32
"""A bit beside the kind of a row in the ring: the windows of the episode end with the row, even if it is not LAST."""

_END = np.uint8(END)
_MAX_PHASES = 4096
_MAX_ROWS = 1024
_MIN_ROWS = 4
_FIRST_ROWS = 64  # of an environment, before the size of its strings is known


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


def steps_of(num_steps: Any) -> Any:
    """Return the steps in `head`, an integer or an array [N]."""
    if isinstance(num_steps, int):
        return num_steps
    calls, begun = num_steps
    return calls - begun


class _ItemsOfAll:
    """Counts the items that a step of all N environments completes.

    `calls` counts steps of all environments, and `begun` [N] is `calls` less the steps of each open episode. So such a
    step changes one integer, and the array only changes when an episode ends. Results that depend on the array alone
    are kept if it is used twice.
    """

    def __init__(self, target: WindowTarget) -> None:
        """Set the target."""
        self._target, self._length, self._stride = target, target.length, target.spec.stride_length
        self._begun: Any = None
        self._bounds: tuple[int, int] | None = None  # the least and the largest `begun`
        self._phases: Any = None
        self._per_phase: list[int] = []  # environments by phase

    def completed(self, calls: int, begun: Any) -> int:
        """Return the items that the step with which there are `calls` completes."""
        if begun is not self._begun:
            self._bounds, self._begun = None, begun
            return self._target.completed_by_each(calls - begun)
        if self._bounds is None:
            self._phases = begun % self._stride
            is_short = self._stride <= _MAX_PHASES
            self._per_phase = np.bincount(self._phases, minlength=self._stride).tolist() if is_short else []
            self._bounds = int(begun.min()), int(begun.max())
        first, latest = self._bounds
        upto = calls - self._length  # an episode that began here has its first window now
        if upto < first:
            return 0
        phase = upto % self._stride
        if upto >= latest and self._per_phase:
            return self._per_phase[phase] * self._target.num_tables
        is_due = begun <= upto if self._stride == 1 else (begun <= upto) & (self._phases == phase)
        return int(np.count_nonzero(is_due)) * self._target.num_tables


class StepRing:
    """Rows of steps. The observer's thread calls `write...` and `mark`; the sender's thread calls the rest.

    Attributes:
        size: number of rows.
        capacity: most rows that may be held, less than `size` if strings are long. Only the sender assigns it.
        num_envs: number of environments, 1 also for steps without a batch dimension.
        columns: arrays [size, ...], one per leaf.
        kinds: the kind of each row, and `END` if the windows of its episode end with it, uint8 [size].
        envs: number of the environment of each row, [size].
        marks: by number, each mark and the row before which it stands; the sender removes them.
        rows_per_call: most rows that one call writes.
        head: progress of the observer, assigned only by it: the rows written so far; the steps of the open episode, or
            of the stream if windows span episodes, an integer, or for N environments a pair (calls, begun) of which
            `num_steps` makes the steps; the marks written so far; the state after the last row (`step_kinds`), an
            integer or an array [N]; and the items completed so far. Arrays are never changed in place.
        granted, granted_items: a call may be written while fewer rows are written and fewer items complete; it is not
            split. Only the sender assigns them.
        wake_after: rows and items after which a call wakes the sender. Only the sender assigns it.
    """

    def __init__(
        self,
        dtypes: Sequence[np.dtype[Any]],
        shapes: Sequence[tuple[int, ...]],
        num_envs: int | None,
        size: int,
        target: WindowTarget,
        max_bytes: float = math.inf,
    ) -> None:
        """Allocate the rows, which complete windows of `target`; strings in them may have about `max_bytes`."""
        self.size, self.num_envs = size, num_envs or 1
        self.rows_per_call = 2 * self.num_envs
        self.columns: list[npt.NDArray[Any]] = [
            np.zeros((size, *shape), dtype) for dtype, shape in zip(dtypes, shapes, strict=True)
        ]
        self._strings = [column for column in self.columns if column.dtype.hasobject]
        self.capacity = min(size, _FIRST_ROWS * self.num_envs) if self._strings else size
        self._max_bytes, self._most_row_bytes, self._released = max_bytes, 1.0, 0
        self._kinds = bytearray(size)  # the memory of `kinds`: one element is set faster here
        self.kinds = np.frombuffer(self._kinds, np.uint8)
        self.envs = np.zeros(size, np.intp)
        self.marks: dict[int, tuple[int, Reset | float]] = {}
        self.head: tuple[int, Any, int, Any, int] = (0, 0, 0, START, 0)
        if num_envs is not None:
            self.head = 0, (0, np.zeros(num_envs, np.int64)), 0, np.full(num_envs, START, np.uint8), 0
        self.granted = self.granted_items = 0
        self.wake_after: tuple[float, float] = (-1, -1)
        self._target, self._spans_episodes = target, target.spans_episodes
        self._length, self._stride, self._num_tables = target.length, target.spec.stride_length, target.num_tables
        self._items_of_all = _ItemsOfAll(target)
        self._completed_by_end = functools.lru_cache(4096)(target.completed_by_end)

    # ------------------------------------------------------------------------------------------ the observer's side

    def write(self, leaves: Sequence[Any], of_row: Row) -> tuple[float, float] | None:
        """Write a row of the only environment, and its boundary row if it has one. Return `due()`."""
        kind, state, last, boundary, _ = of_row
        written, num_steps, num_marks, _, num_items = self.head
        row = written % self.size
        for column, leaf in zip(self.columns, leaves):  # noqa: B905  # equal in number, and the hottest line
            column[row] = leaf
        self._kinds[row] = kind | END if last else kind
        written, steps = written + 1, num_steps + 1
        if steps >= self._length and not (steps - self._length) % self._stride:  # `completed_by`, without a call
            num_items += self._num_tables
        if boundary is not None:
            row = written % self.size
            for column, leaf in zip(self.columns, boundary.leaves, strict=True):
                column[row] = leaf
            state, last = boundary.kind, True
            self._kinds[row] = state | END
            written, steps = written + 1, steps + 1
            num_items += self._target.completed_by(steps)
        if last and not self._spans_episodes:
            num_items += self._completed_by_end(steps)
            steps = 0
        self.head = written, steps, num_marks, state, num_items
        wake_after = self.wake_after  # as in `due`
        return wake_after if written > wake_after[0] or num_items > wake_after[1] else None

    def write_block(self, columns: Sequence[Any], kinds: Kinds, state: int, last: Any) -> None:
        """Write rows of the only environment, at most `size`; `last`: whether the episode ends with the last one."""
        written, num_steps, num_marks, _, num_items = self.head
        num_rows = len(kinds)
        rows = self.rows(written, written + num_rows)
        for own, column in zip(self.columns, columns, strict=True):
            own[rows] = column[:num_rows]
        self.kinds[rows] = kinds
        if last:
            self._kinds[(written + num_rows - 1) % self.size] |= END
        steps = num_steps + num_rows
        num_items += self._target.num_items(steps) - self._target.num_items(num_steps)
        if last and not self._spans_episodes:
            num_items += self._completed_by_end(steps)
            steps = 0
        self.head = written + num_rows, steps, num_marks, state, num_items

    def write_envs(
        self, leaves: Sequence[Any], of_rows: Row, env_ids: npt.NDArray[np.integer[Any]]
    ) -> tuple[float, float] | None:
        """Write a row of each environment in `env_ids`, then the boundary rows. Return `due()`.

        Leaves [N, ...], kinds, states and `is_last` [N] are of all environments. The ring keeps the array of states.
        """
        kinds, states, last, boundary, _ = of_rows
        written, (calls, begun), num_marks, before, num_items = self.head
        if last is not None:
            kinds = kinds | last * _END
        if len(env_ids) == self.num_envs:
            self._put(written, leaves, kinds, env_ids)
            calls += 1
            num_items += self._items_of_all.completed(calls, begun)
        else:
            begun, of_all, states = begun.copy(), states, before.copy()
            self._put(written, [leaf[env_ids] for leaf in leaves], kinds[env_ids], env_ids)
            states[env_ids] = of_all[env_ids]
            begun[env_ids] -= 1
            num_items += self._target.completed_by_each(calls - begun[env_ids])
        written += len(env_ids)
        if last is not None and not self._spans_episodes and len(ended := env_ids[last[env_ids]]):
            num_items += sum(map(self._completed_by_end, (calls - begun[ended]).tolist()))
            begun = begun.copy()
            begun[ended] = calls
        if boundary is not None and boundary.env_ids is not None:
            ids, of_ids = boundary.env_ids, boundary.kind[boundary.env_ids]
            self._put(written, [leaf[ids] for leaf in boundary.leaves], of_ids | _END, ids)
            written, begun, states = written + len(ids), begun.copy(), states.copy()
            begun[ids] -= 1
            states[ids] = of_ids
            counts = (calls - begun[ids]).tolist()
            num_items += sum(map(self._target.completed_by, counts))
            if not self._spans_episodes:
                num_items += sum(map(self._completed_by_end, counts))
                begun[ids] = calls
        self.head = written, (calls, begun), num_marks, states, num_items
        return self.due()

    def _put(self, start: int, leaves: Sequence[Any], kinds: Any, env_ids: npt.NDArray[Any]) -> None:
        """Write the rows of these environments from `start` on."""
        rows = self.rows(start, start + len(env_ids))
        for column, leaf in zip(self.columns, leaves):  # noqa: B905  # as above
            column[rows] = leaf
        self.kinds[rows], self.envs[rows] = kinds, env_ids

    def mark(self, mark: Reset | float) -> None:
        """Write a mark; the next mark overwrites it if an interrupt comes before `head` is assigned.

        A number is the priority of the whole episodes that end after it.
        """
        written, num_steps, num_marks, state, num_items = self.head
        self.marks[num_marks] = (written, mark)
        if isinstance(mark, Reset):
            ended = list(dict.fromkeys(mark.env_ids))
            if not mark.discard:
                counts = np.atleast_1d(self.num_steps())[ended].tolist()
                num_items += sum(self._target.completed_by_end(count, align=True) for count in counts)
            if isinstance(num_steps, int):
                num_steps, state = 0, START
            else:
                (calls, begun), state = num_steps, state.copy()
                begun = begun.copy()
                begun[ended], state[ended] = calls, START
                num_steps = calls, begun
        self.head = (written, num_steps, num_marks + 1, state, num_items)

    def num_steps(self) -> Any:
        """Return the steps of the open episode, or of the stream if windows span episodes: an integer or [N]."""
        return steps_of(self.head[1])

    def free_steps(self) -> int:
        """Return how many steps of the only environment may be written at once; not positive for none."""
        written, num_steps, _, _, num_items = self.head
        if num_items >= self.granted_items:
            return 0
        return min(self.granted - written, self._target.steps_until(self.granted_items - num_items, num_steps))

    def due(self) -> tuple[float, float] | None:
        """Return `wake_after` if what is written has passed it, None otherwise."""
        written, _, _, _, num_items = self.head
        wake_after = self.wake_after  # read once, because the sender may assign it at any time
        return wake_after if written > wake_after[0] or num_items > wake_after[1] else None

    # -------------------------------------------------------------------------------------------- the sender's side

    def measure(self, start: int, stop: int) -> None:
        """Set the capacity by the strings in the rows `start` to `stop`, which are new."""
        if self._strings and start != stop:
            index = self.rows(start, stop)
            num_bytes = sum(sum(map(len, column[index].flat)) for column in self._strings)
            self._most_row_bytes = max(self._most_row_bytes, num_bytes / (stop - start))
            fitting = int(min(self._max_bytes / self._most_row_bytes, self.size))
            self.capacity = max(fitting, _MIN_ROWS * self.num_envs)

    def release(self, stop: int) -> None:
        """Forget the strings of all rows before `stop`: chunks have them, or no window does."""
        if self._strings and stop > self._released:
            index = self.rows(self._released, stop)
            for column in self._strings:
                column[index] = None
        self._released = stop

    def room(self) -> tuple[int, int]:
        """Return the numbers of rows and of items for which there is room; a call is granted if both are positive."""
        written, _, _, _, num_items = self.head
        return self.granted - written, self.granted_items - num_items

    def ends(self, rows: Any) -> npt.NDArray[np.bool_]:
        """Return whether the windows of an episode end with each of these rows; `rows` is an index."""
        ends: npt.NDArray[np.bool_] = (self.kinds[rows] & _END) != 0
        return ends

    def rows(self, start: int, stop: int) -> Any:
        """Return an index for the rows `start` to `stop`: a slice, unless they cross the end of the ring."""
        first = start % self.size
        if first + stop - start <= self.size:
            return slice(first, first + stop - start)
        return np.arange(start, stop) % self.size
