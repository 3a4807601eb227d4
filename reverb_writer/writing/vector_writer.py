"""The writers of environments that step together: one copy for each leaf, and work only where a chunk is full."""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reverb_writer.writing.priorities import PricedStep
from reverb_writer.writing.sequence_writer import SequenceWriter


class _Pending(NamedTuple):
    """Environments whose writers must commit their last step: their chunk is full, or their episode ends."""

    env_ids: list[int]  # numbers of the environments
    last: list[bool]  # of each, whether the step ends its episode
    # of each, the priorities that the step completes; None if no priority is a function
    priced: list[PricedStep | None] | None


class VectorWriter:
    """Writers of N environments, each with episodes of its own.

    A step is copied into the open chunks of all environments together, and committed for all by one assignment. Their
    writers learn of it later: when a chunk is full, when an episode ends, and before windows are sent. If a call is
    interrupted in between, the next one completes it.

    Thread-safe.
    """

    def __init__(self, writers: Sequence[SequenceWriter], cut: set[int]) -> None:
        """Begin with empty episodes.

        Args:
            writers: new ones for the same steps, for the use of this object alone.
            cut: gets the numbers of the environments whose episodes `leave` gives up.
        """
        self._writers = list(writers)
        self._cut = cut
        self._lock = threading.RLock()
        self._blocks = [
            np.zeros((len(self._writers), *buffer.shape), buffer.dtype) for buffer in self._writers[0].chunks.buffers
        ]
        self._requests = self._writers[0].requests
        for env, writer in enumerate(self._writers):
            writer.chunks.buffers = [block[env] for block in self._blocks]
            writer.requests = self._requests
        self._steps = np.zeros(len(self._writers), np.int64)  # of each environment, in all its episodes
        self._first = self._steps.copy()  # of each, its steps before its open chunk
        self._full = self._steps.copy()  # of each, its steps when its open chunk is full
        self._in_episode = self._steps.copy()  # of each, steps of its episode that precede its open chunk
        self._written = self._steps.copy()  # of each, the step count in its episode up to which windows are written
        self._look_at = 0  # number of calls at which complete windows may fill the stream
        self._pending: _Pending | None = None
        self._is_behind = True  # whether the writers must be brought up to date, whatever `_pending` says
        self.num_calls = 0  # how often `append` was called
        self._catch_up()

    @property
    def total_steps(self) -> int:
        """Steps appended."""
        return int(self._steps.sum())

    @property
    def num_episodes(self) -> int:
        """Episodes ended."""
        return sum(writer.num_episodes for writer in self._writers)

    @property
    def dropped(self) -> collections.Counter[str]:
        """Steps in no window, by reason."""
        return sum((writer.dropped for writer in self._writers), collections.Counter())

    @property
    def num_unsent_items(self) -> int:
        """Items of windows that are complete and not yet in a request."""
        with self._lock:
            self._is_behind = True
            self._catch_up()
            return sum(writer.num_unsent_items for writer in self._writers)

    def send(self) -> None:
        """Send the windows that are complete."""
        with self._lock:
            self._is_behind = True
            self._catch_up()
            self._is_behind = True
            self._requests.write([writer for writer in self._writers if writer.seal_complete()])
            self._catch_up()

    def send_if_full(self) -> None:
        """Send the windows that are complete if the stream has no room for more; it is `blocked` then."""
        if self.num_calls < self._look_at:
            return
        stream, windows = self._writers[0].stream, self._writers[0].windows
        with self._lock:
            if self._is_behind or self._pending is not None:
                self._catch_up()
            counts = self._steps - self._first + self._in_episode
            room = stream.room - windows.num_regular_items(counts) + windows.num_regular_items(self._written)
            if room <= 0:
                self.send()
            self._look_at = self.num_calls + (windows.steps_until(room, counts) if room > 0 else 0)

    def append(
        self, leaves: Sequence[Any], last: npt.NDArray[np.bool_], env_ids: npt.NDArray[np.integer[Any]]
    ) -> dict[str, int]:
        """Add a step, leaves [N, ...], to the episodes of some environments, and end those of `last`, [N].

        Returns:
            Steps of ended episodes that no window holds, by reason.
        """
        with self._lock:
            if self._is_behind or self._pending is not None:
                self._catch_up()
            rows, steps = self._steps - self._first, self._steps + 1
            row = int(rows[0])
            if len(env_ids) != len(steps):
                chosen = np.zeros(len(steps), bool)
                chosen[env_ids] = True
                steps, last = np.where(chosen, steps, self._steps), last & chosen
                rows = rows[env_ids]
                for block, leaf in zip(self._blocks, leaves, strict=True):
                    block[env_ids, rows] = leaf[env_ids]
            elif (at := rows.tolist()).count(row) == len(at):
                for block, leaf in zip(self._blocks, leaves, strict=True):
                    block[:, row] = leaf
            else:
                for block, leaf in zip(self._blocks, leaves, strict=True):
                    block[env_ids, rows] = leaf
            pending = None
            if self._writers[0].evaluates:
                ends = last[env_ids].tolist()
                rows_of = ([leaf[env] for leaf in leaves] for env in env_ids)
                priced = [
                    self._writers[env].evaluate(step, last=end)
                    for env, step, end in zip(env_ids, rows_of, ends, strict=True)
                ]
                pending = _Pending(env_ids.tolist(), ends, priced)
            else:
                busy = np.flatnonzero((steps == self._full) | last)
                if len(busy):
                    pending = _Pending(busy.tolist(), last[busy].tolist(), None)
            self._steps, self._pending, self.num_calls = steps, pending, self.num_calls + 1
            return {} if pending is None else self._commit(pending)

    def end_episodes(self, env_ids: Iterable[int], *, align: bool = False, discard: bool = False) -> dict[str, int]:
        """End the episodes of some environments here; those that are too short to `align` are dropped."""
        dropped: collections.Counter[str] = collections.Counter()
        with self._lock:
            self._is_behind = True
            self._catch_up()
            self._is_behind, self._look_at = True, 0
            for env in env_ids:
                dropped.update(self._writers[env].end_episode(align=align, discard=discard))
            self._catch_up()
        return dropped

    def between_episodes(self) -> list[bool]:
        """Return of each environment whether its next step would be the first of an episode."""
        with self._lock:
            self._is_behind = True
            self._catch_up()
            return [flag for writer in self._writers for flag in writer.between_episodes()]

    def leave(self) -> dict[str, int]:
        """End all streams of steps, and give up the episodes that are under way; return what was dropped."""
        dropped: collections.Counter[str] = collections.Counter()
        with self._lock:
            is_between = self.between_episodes()
            self._cut.update(env for env, flag in enumerate(is_between) if not flag)
            self._is_behind = True
            for writer in self._writers:
                dropped.update(writer.leave())
            self._catch_up()
        return dropped

    def _catch_up(self) -> None:
        """Complete a call that was interrupted; bring all writers up to date if they are behind."""
        if self._pending is not None:
            self._commit(self._pending)
        if self._is_behind:
            self._commit(_Pending([*range(len(self._writers))], [False] * len(self._writers), None))
            self._is_behind = False

    def _commit(self, pending: _Pending) -> dict[str, int]:
        """Have writers commit the steps that they do not know of yet; return what they drop."""
        dropped: collections.Counter[str] = collections.Counter()
        self._requests.finish()
        writers = [self._writers[env] for env in pending.env_ids]
        steps = self._steps[pending.env_ids]
        priced = itertools.repeat(None) if pending.priced is None else pending.priced
        complete = []
        for writer, num_steps, last, of_env in zip(writers, steps.tolist(), pending.last, priced, strict=False):
            if (missing := num_steps - writer.total_steps) and (
                lost := writer.commit(missing, last=last, priced=of_env)
            ):
                dropped.update(lost)
            if writer.is_pending and writer.seal_pending():
                complete.append(writer)
        self._requests.write(complete)
        for writer in writers:
            writer.is_pending = False
        first = steps - [writer.chunks.fill for writer in writers]
        self._first[pending.env_ids] = first
        self._full[pending.env_ids] = first + [writer.chunks.capacity for writer in writers]
        self._in_episode[pending.env_ids] = [writer.chunks.num_sealed for writer in writers]
        self._written[pending.env_ids] = [writer.windows.written for writer in writers]
        if any(pending.last):
            self._look_at = 0  # the end of an episode may complete more windows than steps do
        self._pending = None
        return dropped
