"""Steps -> chunks -> windows -> insert stream.

A `SequenceWriter` holds one episode at a time. Its `ChunkBuilder` copies steps into a chunk, and encodes the chunk when
it is full. Its `WindowScheduler` knows which windows end at a step of a sealed chunk; they are encoded many at a time,
as slices of chunks. So a step is stored and sent once, however many windows and tables hold it.

    append(step) -> open chunk --full--> sealed chunks --enough windows complete--> InsertRequest -> InsertStream

KeyboardInterrupt, or another exception from outside, may interrupt a call anywhere. So state is committed by single
assignments, on one line each, after the work: that a step is appended, and ends its episode; that a chunk is sealed;
that windows are encoded. `finish_pending` does the work that committed state asks for, so the next call completes one
that was interrupted.
"""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from reverb_writer.client import largest_priorities
from reverb_writer.errors import StructureError
from reverb_writer.leaves import zeros
from reverb_writer.steps import step_bytes
from reverb_writer.transport import process_hooks
from reverb_writer.transport.insert_stream import InsertStream
from reverb_writer.writing.chunk_builder import Chunk, ChunkBuilder
from reverb_writer.writing.item_sizes import EpisodeSizes
from reverb_writer.writing.priorities import EpisodeEnd, PricedStep, Priority
from reverb_writer.writing.request_writer import REQUEST_BYTES, REQUEST_ITEMS, RequestWriter
from reverb_writer.writing.window_items import EpisodeWindows
from reverb_writer.writing.window_scheduler import WindowScheduler
from reverb_writer.writing.window_targets import WindowTarget, chunk_length_of


class SequenceWriter:
    """Write the windows of one stream of steps.

    Attributes:
        stream: where items go. The writer does not own it: flush and close it yourself.
        chunks: the chunks of the episode; `chunks.length` steps each at most, `chunks.num_chunks` in all episodes.
        requests: what encodes windows; writers that are written together share it.
        total_steps, num_episodes, num_items: steps appended or skipped, episodes and items in all episodes.
        dropped: of these steps, those in no window, by reason, summed over the kinds of windows.
        num_steps: steps of this episode so far, padding not counted.
        num_skipped: steps of this episode that `skip` left out.
        is_pending: whether `finish_pending` has something to do.
        evaluates: whether `evaluate` must be asked about every step before it is appended.

    Thread-safe. Several writers may share one insert stream.
    """

    def __init__(
        self,
        stream: InsertStream,
        dtypes: Sequence[np.dtype[Any]],
        shapes: Sequence[tuple[int, ...]],
        targets: Sequence[WindowTarget],
        *,
        padding_step: Sequence[Any] | None = None,
        pack: Callable[[Sequence[Any]], Any] = list,
        chunk_length: int | None = None,
        request_items: int = REQUEST_ITEMS,
        spans_episodes: bool = False,
        wait_for_room: Callable[[], None] | None = None,
        sizes: EpisodeSizes | None = None,
        spec: bytes = b"",
    ) -> None:
        """Make a writer; nothing is sent yet.

        Args:
            stream: where items go.
            dtypes: of each leaf; `object` for strings.
            shapes: of each leaf of one step.
            targets: the kinds of windows to cut, and where they go.
            padding_step: leaves of a padding step; zeros if None.
            pack: makes the nest of a window's leaves, for a `priority` that is a function.
            chunk_length: steps in a chunk; None for `chunk_length_for` the targets' windows.
            request_items: complete windows at which a request is encoded; one with fewer may be sent for its bytes or
                age.
            spans_episodes: whether windows go on after the last step of an episode, which only sends complete windows.
            wait_for_room: called before a step if the stream is blocked; None to append it unless the stream is closed.
            sizes: refuses steps by which an item would be too large; None to append any.
            spec: the `specs.spec_tensor` of a step, which each chunk carries; empty for items of flat columns.

        Raises:
            SpecError: there are no targets, or `chunk_length` is not in 1..16383.
            StructureError: Reverb cannot store one of the dtypes.
        """
        length = chunk_length_of(targets, chunk_length, step_bytes(dtypes, shapes))
        padding_step = list(map(zeros, dtypes, shapes)) if padding_step is None else padding_step
        self.stream = stream
        self.chunks = ChunkBuilder(dtypes, shapes, [target.spec for target in targets], length, padding_step, spec)
        self.requests = RequestWriter(stream)
        self.total_steps = 0
        largest = functools.partial(largest_priorities.current, stream.channel.address)
        self._windows = WindowScheduler(targets, padding_step, pack, largest)
        self._request_steps = request_items / self._windows.items_per_step
        self._spans_episodes, self._num_columns = spans_episodes, len(dtypes)
        self._wait_for_room = wait_for_room or stream.check
        self._sizes = sizes
        self.evaluates = sizes is not None or self._windows.priorities is not None
        self._lock = threading.RLock()
        self.is_pending = False
        self._begin_episode(0, 0, collections.Counter())

    def __repr__(self) -> str:
        counts = f"{self.total_steps} steps, {self.num_episodes} episodes, {self.num_items} items"
        return f"<SequenceWriter to {self.stream.channel.address}: {counts}>"

    def _begin_episode(self, num_items: int, num_episodes: int, dropped: collections.Counter[str]) -> None:
        self.num_items, self.num_episodes, self.dropped = num_items, num_episodes, dropped
        self.chunks.begin_episode()
        self._windows.begin_episode()
        self.num_steps = self.num_skipped = 0
        self._boundary = 0  # step count at the last boundary step, where windows span episodes
        self._end: EpisodeEnd | None = None  # how the episode ends, once its last step is appended

    def append(self, leaves: Sequence[Any], *, last: bool = False) -> dict[str, int]:
        """Add a step to the episode; its leaves are copied. Waits only in `wait_for_room`.

        Args:
            leaves: one for each dtype, of that dtype and shape.
            last: whether it ends the episode, as `end_episode` would.

        Returns:
            What `end_episode` returns, if the step is the last one; nothing otherwise.

        Raises:
            StructureError: there are more or fewer leaves than dtypes, or an item with the step would be too large.
                Nothing changed.
            SpecError: a `priority` function gave no finite number >= 0. Nothing changed.
            ClosedError: the stream is closed, or this is a forked child.
        """
        if self.stream.blocked:
            self._wait_for_room()
        if len(leaves) != self._num_columns:
            raise StructureError(f"a step has {len(leaves)} leaves, expected {self._num_columns}, one for each dtype.")
        with self._lock:
            if self.is_pending:
                self.finish_pending()
            priced = self.evaluate(leaves, last=last) if self.evaluates else None
            chunks = self.chunks
            fill = chunks.fill
            for buffer, leaf in zip(chunks.buffers, leaves):  # noqa: B905  # they are as many, and the hottest line
                buffer[fill] = leaf
            fill += 1
            if last or fill == chunks.capacity or priced is not None:
                dropped = self.commit(1, last=last, priced=priced)
                self.finish_pending()
                return dropped
            self.total_steps, self.num_steps, chunks.fill = self.total_steps + 1, self.num_steps + 1, fill
            return {}

    def extend(self, columns: Sequence[Any]) -> int | None:
        """Add the steps of `columns`, [T, ...], that the chunk has room for; return how many; None if `evaluates`."""
        self.stream.check()
        with self._lock:
            self.finish_pending()
            if self.evaluates:
                return None
            chunks = self.chunks
            fill, stop = chunks.fill, min(chunks.fill + len(columns[0]), chunks.capacity)
            for buffer, column in zip(chunks.buffers, columns, strict=True):
                buffer[fill:stop] = column[: stop - fill]
            self.commit(stop - fill)
            self.finish_pending()
            return stop - fill

    def evaluate(self, leaves: Sequence[Any], *, last: bool = False) -> PricedStep | None:
        """Ask the `priority` functions about a step without appending it; None if there are none.

        `leaves` are those of the step, and `last` tells whether it ends its episode.

        Raises:
            SpecError: a function gave no finite number >= 0.
            StructureError: an item with the step would be too large.
        """
        with process_hooks.unless_forked(self.stream, self._lock):
            self.finish_pending()
            n = self.num_steps + 1
            if self._sizes is not None:
                self._sizes.check(leaves, n)
            if self._windows.priorities is None:
                return None
            end = self._windows.episode_end(n) if last and not self._spans_episodes else None
            return self._windows.priorities.evaluate(leaves, n, end)

    def commit(self, num_steps: int, *, last: bool = False, priced: PricedStep | None = None) -> dict[str, int]:
        """Append the steps that stand in the open chunk after its `fill`; `finish_pending` does what follows.

        Args:
            num_steps: how many; the chunk has room for them.
            last: whether the last of them ends the episode.
            priced: what `evaluate` returned for the step.
        """
        chunks = self.chunks
        if priced is not None and self._windows.priorities is not None:
            self._windows.priorities.commit(priced)
        total, steps, fill = self.total_steps + num_steps, self.num_steps + num_steps, chunks.fill + num_steps
        if not last:
            self.total_steps, self.num_steps, chunks.fill, self.is_pending = total, steps, fill, True
            return {}
        if self._spans_episodes:
            episodes = self.num_episodes + 1
            self.total_steps, self.num_steps, chunks.fill, self.num_episodes, self._boundary, self.is_pending = (
                total, steps, fill, episodes, steps, True)  # fmt: skip
            return {}
        end = self._windows.episode_end(steps)
        self.total_steps, self.num_steps, chunks.fill, self._end, self.is_pending = total, steps, fill, end, True
        return end.dropped

    def skip(self, *, last: bool = False) -> dict[str, int]:
        """Leave a step out, and with it all of its episode, which it ends if `last`; return what `append` does."""
        with process_hooks.unless_forked(self.stream, self._lock):
            self.finish_pending()
            total, skipped = self.total_steps + 1, self.num_skipped + 1
            end = self._discarding(skipped) if last else None
            self.total_steps, self.num_skipped, self._end, self.is_pending = total, skipped, end, True
            self.finish_pending()
            return {} if end is None else end.dropped

    def end_episode(self, *, align: bool = False, discard: bool = False) -> dict[str, int]:
        """End the episode: pad as the windows ask for, and send complete windows.

        Args:
            align: give DROP's windows the last L steps too, if they are in no window yet (a reset in mid-episode).
            discard: write nothing more than the windows that were complete already.

        Returns:
            Steps that a kind of window does not hold, by reason, summed over the kinds.

        Raises:
            SpecError: a `priority` function gave no finite number >= 0. Nothing changed; the episode goes on.
        """
        with process_hooks.unless_forked(self.stream, self._lock):
            self.finish_pending()
            if not self.num_steps:
                return {}
            if discard or self.num_skipped:
                end = self._discarding(self.num_skipped)
            else:
                end = self._windows.episode_end(self.num_steps, align=align)
            priorities = self._windows.priorities
            if priorities is not None:
                priorities.commit(priorities.evaluate(None, self.num_steps, end))
            self._end, self.is_pending = end, True
            self.finish_pending()
            return end.dropped

    def between_episodes(self) -> list[bool]:
        """Return whether the next step would be the first of an episode: one boolean, for there is one environment."""
        return [not (self.is_pending or self.num_skipped) and self.num_steps == self._boundary]

    def leave(self) -> dict[str, int]:
        """End the stream of steps, and give up an episode that is under way; return what was dropped.

        Does nothing if it is called again, as after an interrupt or an error of a `priority` function.
        """
        try:
            return self.end_episode(discard=not self.between_episodes()[0])
        except Exception:
            self.end_episode(discard=True)
            raise

    def _discarding(self, num_skipped: int) -> EpisodeEnd:
        """Return the end of an episode that adds nothing, with so many steps left out."""
        end = self._windows.episode_end(self.num_steps, discard="overflow" if num_skipped else "reset")
        if num_skipped:
            end.dropped["overflow"] = end.dropped.get("overflow", 0) + num_skipped
        return end

    def finish_pending(self) -> None:
        """Do what committed steps ask for: seal a full chunk, end the episode, write windows. Never waits."""
        with self._lock:
            if not self.is_pending:
                return
            self.requests.finish()
            if self.is_pending and self.seal_pending():
                self.requests.write([self])
            self.is_pending = False

    def seal_pending(self) -> bool:
        """Seal the chunks that committed steps ask for; return whether `requests` must write windows now."""
        chunks, end = self.chunks, self._end
        if end is not None:
            chunks.pad(self.num_steps + max(end.num_padding))
            stops = [window[1] for window in end.closing if window is not None]
            if max([self._last_window_end(), *stops]) > chunks.num_sealed:
                chunks.seal()
            return True
        if chunks.fill == chunks.capacity:
            chunks.seal()
        if self.num_steps == self._boundary:
            return self.seal_complete()
        num_unwritten = chunks.num_sealed - self._windows.written
        return num_unwritten >= self._request_steps or chunks.unsent_bytes >= REQUEST_BYTES

    def seal_complete(self) -> bool:
        """Seal the open chunk if a complete window ends in it; return whether there are windows to write."""
        last = self._last_window_end()
        if last > self.chunks.num_sealed:
            self.chunks.seal()
        return last > 0

    def set_priority(self, index: int, priority: Priority) -> None:
        """Set the `priority` of the kind of window at `index` of the targets, for those that are not complete yet.

        Raises:
            SpecError: it is not a number >= 0, or it is a function for windows whose steps were not kept.
                Nothing changed.
        """
        with process_hooks.unless_forked(self.stream, self._lock):
            self.finish_pending()
            windows = self._windows
            targets, priorities = windows.with_priority(index, priority, self.num_steps)
            self.send()
            windows.targets, windows.priorities = targets, priorities
            self.evaluates = self._sizes is not None or priorities is not None

    def send(self) -> None:
        """Send the windows that are complete, without waiting for their chunk to fill."""
        with process_hooks.unless_forked(self.stream, self._lock):
            self.finish_pending()
            if self.seal_complete():
                self.requests.write([self])

    def _last_window_end(self) -> int:
        return self._windows.last_window_end(self.chunks.num_sealed + self.chunks.fill, self._end)

    @property
    def num_unsent_items(self) -> int:
        """Items of windows that are complete and not yet in a request."""
        with process_hooks.unless_forked(self.stream, self._lock):
            self.finish_pending()
            return self._windows.num_items(self.chunks.num_sealed + self.chunks.fill, self._end)

    @property
    def num_sealed_items(self) -> int:
        """Of them, those whose steps are in sealed chunks."""
        return self._windows.num_items(self.chunks.num_sealed, self._end)

    @property
    def tables(self) -> frozenset[str]:
        """Names of all tables that get windows."""
        return self._windows.tables

    def sealed_windows(self) -> EpisodeWindows:
        """Return the complete windows whose steps are in sealed chunks, and that are not yet in a request."""
        end, chunks, windows = self._end, self.chunks, self._windows
        first = chunks.num_sealed - windows.longest  # a closing window may end where the last regular one did
        num_released = len(chunks.sealed) if end else sum(chunk.stop <= first for chunk in chunks.sealed)
        return EpisodeWindows(windows.windows(chunks.num_sealed, end), chunks.sealed, num_released)

    def after_encoding(self, num_items: int, kept: list[Chunk]) -> Callable[[], None]:
        """Return what to do once `sealed_windows` are encoded: a function that may be called several times.

        Args:
            num_items: items that they make.
            kept: the chunks that later windows need.
        """
        end, num_items = self._end, self.num_items + num_items
        if end is None:
            return functools.partial(self._set_written, self.chunks.num_sealed, num_items, kept)
        num_episodes = self.num_episodes + (self.num_steps + self.num_skipped > self._boundary)
        dropped = self.dropped + collections.Counter(end.dropped) if end.dropped else self.dropped
        return functools.partial(self._begin_episode, num_items, num_episodes, dropped)

    def _set_written(self, num_steps: int, num_items: int, kept: list[Chunk]) -> None:
        self._windows.written, self.num_items, self.chunks.sealed, self.chunks.unsent_bytes = (
            num_steps, num_items, kept, 0
        )  # fmt: skip
        if self._windows.priorities is not None:
            self._windows.priorities.forget(num_steps)
