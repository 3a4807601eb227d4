"""Rows of the ring become chunks and complete windows, per episode, for one environment or many.

Integers and arrays only; no I/O and no thread. An environment without an event costs no Python code: a few operations
on arrays count the rows of all environments.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.protocol.chunk_length import chunk_length_for
from reverb_writer.transport.in_flight import InsertRequest
from reverb_writer.windows import SHORT_EPISODE
from reverb_writer.writing.encoders import Encoder
from reverb_writer.writing.records import OpenEpisode, Ready
from reverb_writer.writing.ring import Reset, StepRing, ring_rows
from reverb_writer.writing.source import REQUEST_ITEMS, Origin
from reverb_writer.writing.step_layout import StepLayout
from reverb_writer.writing.stream_options import Books, StreamOptions
from reverb_writer.writing.window_target import NEVER, Integers, WindowTarget

_LOG = logging.getLogger(__package__)

_CHUNKS_AHEAD = 4  # chunks of whole episodes for which a ring has room twice: `extend` then seldom waits


class Cutter:
    """The episodes of all environments of an observer. Not thread-safe: only the sender uses it.

    The attributes are those of `Source`.
    """

    def __init__(self, encoder: Encoder, target: WindowTarget, chunk_length: int) -> None:
        """Begin an episode in each environment."""
        self._encoder, self._target = encoder, target
        self.ring, self.books = encoder.ring, encoder.books
        self.tables = frozenset(target.tables)
        self._chunk_length = chunk_length
        self.taken = self.num_counted = self.num_unencoded = self.unsent_bytes = 0
        self.has_new, self.is_prompt, self.is_endless = False, False, target.spans_episodes
        self.items_per_call: float = target.items_per_step * self.ring.num_envs
        self._num_marks = 0  # marks taken so far
        self._num_encoded = 0  # encoded items of open episodes
        self._ended: list[Ready] = []
        count = self.ring.num_envs
        self._episodes = [OpenEpisode(encoder.new_key()) for _ in range(count)]
        # Per environment: steps of its episode, open steps (in no chunk), and the first open row; the step count up to
        # which its windows are encoded, and at the last end of an episode in a longer stream.
        self._steps, self._open, self._first, self._encoded, self._boundary = np.zeros((5, count), np.int64)

    def release_rows(self) -> int:
        """Release rows that are in chunks or in no window; return the row below which rows may be written.

        The rows are released first, because the observer may overwrite them at once.
        """
        self.ring.release(self.first_needed)
        return self.first_needed + self.ring.capacity - self.ring.rows_per_call + 1

    def note_in_flight(self, num_bytes: int) -> None:
        """Do nothing, because all rows have one size and the ring bounds their number."""

    @property
    def first_needed(self) -> int:
        """The first row that is in no chunk yet: earlier rows may be overwritten."""
        rows = self._first[self._open > 0]
        return int(rows.min()) if len(rows) else self.taken

    # ------------------------------------------------------------------------------------------------- rows to steps

    def take(self) -> None:
        """Take the rows and marks that were written since the last call."""
        written, _, num_marks, _, self.num_counted = self.ring.head
        if written == self.taken and num_marks == self._num_marks:
            return
        self.has_new = True
        while self._num_marks < num_marks:
            row, mark = self.ring.marks.pop(self._num_marks)
            self._num_marks += 1
            self._take_steps(row)
            if isinstance(mark, Reset):
                for env in mark.env_ids:
                    self._end_open(env, "reset" if mark.discard else None)
            else:
                self._target = replace(self._target, priority=mark)
        self._take_steps(written)
        self._tally()
        half = self.ring.capacity // 2
        if written - self.first_needed > half:
            # The ring needs these rows.
            self._seal_where((self._open > 0) & (self._first < written - half))

    def _take_steps(self, stop: int) -> None:
        start, self.taken = self.taken, stop
        self.ring.measure(start, stop)
        if start == stop:
            return
        index = self.ring.rows(start, stop)
        is_last, envs = self.ring.ends(index), self.ring.envs[index]
        new = np.bincount(envs, minlength=len(self._episodes))
        firsts = np.zeros(len(new), np.int64)
        firsts[envs[::-1]] = np.arange(stop - 1, start - 1, -1)  # the last assignment to an index counts
        np.copyto(self._first, firsts, where=(self._open == 0) & (new > 0))
        has_end = np.zeros(len(new), bool)
        has_end[envs[is_last]] = True
        self._count(slice(None), np.where(has_end, 0, new))
        for env, rows in self._open_rows((has_end | (self._open >= self._chunk_length)).nonzero()[0]):
            start = self._advance(env, rows, int(self._open[env])) if has_end[env] else 0
            sealed = self._seal_full(env, rows, start)
            if sealed < len(rows):
                self._first[env] = rows[sealed]

    def _count(self, env: Any, num_new: Any) -> None:
        """Count new steps of one environment or of all."""
        self._steps[env] += num_new
        self._open[env] += num_new

    def _tally(self) -> None:
        """Count the items that are complete and not encoded."""
        num_open = int(self._target.num_items(self._steps).sum()) - self._num_encoded
        self.num_unencoded = num_open + sum(ready.num_items for ready in self._ended)

    def _open_rows(self, env_ids: Integers) -> list[tuple[int, Integers]]:
        """Return each given environment with its rows that are in no chunk, in the order of steps."""
        if not len(env_ids):
            return []
        first = int(self._first[env_ids].min())
        if len(self._episodes) == 1:
            return [(0, np.arange(first, self.taken))]
        envs = self.ring.envs[self.ring.rows(first, self.taken)]
        # Only the rows of these environments are sorted: few of many have a full chunk at the same time.
        is_wanted = np.zeros(len(self._episodes), bool)
        is_wanted[env_ids] = True
        offsets = is_wanted[envs].nonzero()[0]
        rows, envs = first + offsets, envs[offsets]
        is_open = rows >= self._first[envs]
        rows, envs = rows[is_open], envs[is_open]
        order = np.argsort(envs, kind="stable")
        rows, stops = rows[order], np.searchsorted(envs[order], env_ids[1:])
        return list(zip(env_ids.tolist(), np.split(rows, stops), strict=True))

    def _advance(self, env: int, rows: Integers, num_counted: int) -> int:
        """Count the open rows after the first `num_counted`, end their episodes; return the number of sealed rows."""
        is_last = self.ring.ends(rows % self.ring.size)
        sealed, known = 0, num_counted
        for stop in (is_last[known:].nonzero()[0] + known + 1).tolist():
            self._count(env, stop - known)
            sealed = self._seal_full(env, rows[:stop], sealed)
            if self._target.spans_episodes:
                self._boundary[env] = self._steps[env]
                self.books.counts["episodes"] += 1
            else:
                self._end(env, rows[sealed:stop])
                sealed = stop
            known = stop
        self._count(env, len(rows) - known)
        return sealed

    # ------------------------------------------------------------------------------------------------ steps to chunks

    def _seal_full(self, env: int, rows: Integers, start: int) -> int:
        """Make full chunks of the rows from `start`; return the index of the first open row."""
        while len(rows) - start >= self._chunk_length:
            self._seal(env, rows[start : start + self._chunk_length])
            start += self._chunk_length
        return start

    def _seal(self, env: int, rows: Integers, num_padding: int = 0) -> None:
        episode = self._episodes[env]
        index: Any = None
        if len(rows):
            is_run = rows[-1] - rows[0] == len(rows) - 1
            index = self.ring.rows(int(rows[0]), int(rows[-1]) + 1) if is_run else rows % self.ring.size
        if self._steps[env] > self._target.max_steps:
            episode.chunks = []
        else:
            start = episode.chunks[-1].stop if episode.chunks else 0
            chunk = self._encoder.chunk(episode.key, start, index, num_padding)
            episode.chunks.append(chunk)
            self.unsent_bytes += len(chunk.data)
        self._open[env] -= len(rows)

    def seal_open(self, before: int = NEVER) -> None:
        """Seal the open rows of each environment if they complete an item.

        Leave out environments whose open rows begin at row `before` or later, unless an episode has ended in them.
        """
        has_boundary = self._boundary > self._steps - self._open
        self._seal_where((self._num_open_items() > 0) & ((self._first < before) | has_boundary))

    def seal_fullest(self, keep: int) -> None:
        """Seal as `seal_open`, fullest environments first, until at most `keep` complete items are in open rows."""
        num_items = self._num_open_items()
        fullest_first = np.argsort(-num_items, kind="stable")
        num_left = np.empty(len(num_items), np.int64)  # before each environment is sealed
        num_left[fullest_first] = np.cumsum(num_items[fullest_first][::-1])[::-1]
        self._seal_where(num_left > keep)

    def _num_open_items(self) -> Integers:
        """Return the number of items that the open rows of each environment complete."""
        num_items: Integers = self._target.num_items(self._steps) - self._target.num_items(self._steps - self._open)
        return num_items

    def _seal_where(self, is_chosen: npt.NDArray[np.bool_]) -> None:
        for env, rows in self._open_rows(is_chosen.nonzero()[0]):
            self._seal(env, rows)

    # ---------------------------------------------------------------------------------------------- ends of episodes

    def _end_open(self, env: int, discard: str | None) -> None:
        """End the open episode of an environment, if it has steps.

        If `discard` is a reason, write only windows that are complete now, and count the other steps under this reason.
        """
        if self._steps[env]:
            rows = self._open_rows(np.array([env]))[0][1] if self._open[env] else np.zeros(0, np.int64)
            self._end(env, rows, align=discard is None, discard=discard)
            self._tally()

    def _end(self, env: int, rows: Integers, *, align: bool = False, discard: str | None = None) -> None:
        episode, num_steps = self._episodes[env], int(self._steps[env])
        reason = "overflow" if num_steps > self._target.max_steps else discard
        end = self._target.episode_end(num_steps, align=align, discard=reason)
        num_sealed = num_steps - len(rows)
        while num_sealed < end.covered_to:
            size = min(self._chunk_length, end.limit - num_sealed)
            num_real = min(size, len(rows))
            self._seal(env, rows[:num_real], size - num_real)
            rows = rows[num_real:]
            num_sealed += size
        encoded = int(self._encoded[env])
        num_encoded = self._target.num_items(encoded)
        self._num_encoded -= num_encoded
        num_items = end.num_items - num_encoded
        if num_items:
            self._ended.append(Ready(self._target, episode, encoded, num_steps, end, num_items))
        self.books.counts["episodes"] += int(num_steps > self._boundary[env])
        self._note_dropped(end.dropped)
        self._episodes[env] = OpenEpisode(self._encoder.new_key())
        self._steps[env] = self._open[env] = self._encoded[env] = self._boundary[env] = 0

    def _note_dropped(self, dropped: Mapping[str, int]) -> None:
        """Count steps that are in no window, by reason; log each reason once."""
        for reason in dropped.keys() - self.books.dropped_steps.keys():
            if reason == SHORT_EPISODE:
                text = (
                    "An episode of %d steps is shorter than a window (`sequence_length` %s): nothing of it is "
                    "written. Make windows shorter, or pad (`end_of_episode`). Further ones are counted in "
                    "stats().dropped_steps."
                )
                _LOG.warning(text, dropped[reason], self._target.spec.sequence_length)
            else:
                text = "%d steps are in no window (%s). Further ones are counted in stats().dropped_steps."
                _LOG.info(text, dropped[reason], reason)
        self.books.dropped_steps.update(dropped)

    def open_origins(self) -> Sequence[OpenEpisode]:
        """Return the open episodes, one per environment."""
        return self._episodes

    def cut(self, is_cut: Callable[[Origin], bool], reason: str) -> None:
        """End the open episodes that `is_cut` names; windows that are complete now are written."""
        for env, episode in enumerate(self._episodes):
            if is_cut(episode):
                self._end_open(env, reason)

    # --------------------------------------------------------------------------------------------- chunks to windows

    def take_ready(self) -> list[Ready]:
        """Return the windows that are complete in chunks, ended episodes first; the caller encodes them now."""
        ready, self._ended = self._ended, []
        sealed = self._steps - self._open
        num_items = self._target.num_items(sealed) - self._target.num_items(self._encoded)
        env_ids = num_items.nonzero()[0]
        columns = (column[env_ids].tolist() for column in (self._encoded, sealed, num_items))
        for env, after, num_steps, count in zip(env_ids.tolist(), *columns, strict=True):
            ready.append(Ready(self._target, self._episodes[env], after, num_steps, None, count))
        self._encoded[env_ids] = sealed[env_ids]
        self._num_encoded += int(num_items.sum())
        num_taken = sum(each.num_items for each in ready)
        self.num_unencoded -= num_taken
        self.unsent_bytes = 0
        self.books.counts["items"] += num_taken
        return ready

    def requests(self, batches: Sequence[Ready]) -> Iterator[InsertRequest]:
        """Make requests of windows; all windows of a request have the same target, so the same priority."""
        start = 0
        while start < len(batches):
            stop, num_items, target = start, 0, batches[start].target
            while stop < len(batches) and num_items < REQUEST_ITEMS and batches[stop].target is target:
                num_items += batches[stop].num_items
                stop += 1
            request = self._encoder.request(batches[start:stop])
            if request is not None:
                yield request
            start = stop

    def needed_chunks(self) -> list[int]:
        """Return the keys of the chunks that later windows may refer to."""
        episodes = [*self._episodes, *[ready.origin for ready in self._ended]]
        return [chunk.key for episode in episodes for chunk in episode.chunks]


def window_source(
    layout: StepLayout,
    target: WindowTarget,
    options: StreamOptions,
    books: Books,
    largest_priority: Callable[[Sequence[str]], float],
    *,
    num_envs: int | None,
) -> Cutter:
    """Make the ring, the encoder and the cutter of an observer; count in `books`.

    `largest_priority` returns the largest priority set in the given tables.
    """
    count = num_envs or 1
    columns = zip(layout.dtypes, layout.shapes, strict=True)
    row_bytes = sum(dtype.itemsize * math.prod(shape) for dtype, shape in columns)  # a string counts as a pointer
    chunk_length = options.chunk_length or chunk_length_for(target.spec, row_bytes, count)
    num_ahead = _CHUNKS_AHEAD * chunk_length if target.spec.sequence_length is None else chunk_length
    size = ring_rows(row_bytes, count, num_ahead, options.max_in_flight_bytes)
    chunk_length = min(chunk_length, max(size // (2 * count), 1))
    structure = layout.structure
    ring = StepRing(structure.dtypes, structure.shapes, num_envs, size, target, options.max_in_flight_bytes)
    encoder = Encoder(ring, layout, books, largest_priority, keeps_columns=callable(target.priority))
    return Cutter(encoder, target, chunk_length)
