"""Steps -> chunks -> windows -> insert stream.

A `SequenceWriter` holds one episode at a time. Steps are copied into a chunk, one array a leaf. A full chunk is
compressed and its arrays are used again. Which windows exist is a matter of integers (`windowing`): those that end at
a step of a finished chunk are due, and are encoded many at a time, as slices of chunks. So a step is stored and sent
once, however many windows and tables hold it.

    append(step) -> chunk arrays --full--> finished chunks --enough windows due--> InsertRequest -> InsertStream

An exception from outside, such as KeyboardInterrupt, may cut off a call anywhere. So state is committed by single
assignments, on one line each, after the work: that a step is taken, and ends its episode; that a chunk is finished;
that windows are encoded. `settle` does what is left to do, so the next call completes one that was cut off.
"""

from __future__ import annotations

import collections
import itertools
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.errors import StructureError
from reverb_writer.leaves import zeros
from reverb_writer.protocol.item_encoding import KEY_BITS
from reverb_writer.steps import step_bytes
from reverb_writer.transport import process_hooks
from reverb_writer.transport.insert_stream import InsertStream
from reverb_writer.writing.priorities import EpisodeEnd, Priority, StepPlan, WindowPriorities
from reverb_writer.writing.window_items import Chunk, ChunkEncoder, Handover, Windows, hand_over
from reverb_writer.writing.window_targets import NEVER, WindowTarget, chunk_cuts, chunk_length_of, ending_of

__all__ = ["SequenceWriter"]

_REQUEST_BYTES = 1 << 20


class SequenceWriter:
    """Write the windows of one stream of steps.

    Attributes:
        num_taken, num_episodes, num_items, num_chunks: steps appended or skipped, episodes, items, finished chunks.
        dropped: of the steps taken, those in no window, by reason, summed over the kinds of windows.
        num_steps, num_skipped: steps of the episode so far, padding not counted, and those that `skip` left out.

    Thread-safe. Several writers may share one insert stream, each with episodes of its own (vector environments). The
    writer does not own the stream: flush and close that.
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
        request_items: int = 1024,
        buffers: Sequence[npt.NDArray[Any]] | None = None,
        lock: threading.RLock | None = None,
        spans_episodes: bool = False,
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
            request_items: due windows at which a request is encoded; a smaller one may be sent for its bytes or age.
            buffers: arrays [chunk_length, ...] for the chunk that is being filled, one a leaf; None for own ones.
            lock: shared by the writers whose `buffers` are filled together; None for an own one.
            spans_episodes: whether the last step of an episode only sends what is due, and windows go on.

        Raises:
            SpecError: there are no targets, or `chunk_length` is not in 1..16383.
            StructureError: Reverb cannot store one of the dtypes.
        """
        specs = [target.spec for target in targets]
        self.chunk_length = chunk_length = chunk_length_of(targets, chunk_length, step_bytes(dtypes, shapes))
        self.stream = stream
        self.num_taken = self.num_episodes = self.num_items = self.num_chunks = 0
        self.dropped: collections.Counter[str] = collections.Counter()
        self._targets = tuple(targets)
        self._spans_episodes = spans_episodes
        self._pads = list(map(zeros, dtypes, shapes) if padding_step is None else padding_step)
        self._pack = pack
        self._tables = frozenset(itertools.chain.from_iterable(target.tables for target in targets))
        self._encoder = ChunkEncoder(dtypes)
        self._request_steps = request_items / sum(len(each.tables) / each.spec.stride_length for each in targets)
        self._random = random.Random()  # noqa: S311  # keys are no secret
        self._lock = lock or threading.RLock()
        self._buffers = list(buffers or map(np.zeros, [(chunk_length, *shape) for shape in shapes], dtypes))
        self._num_columns = len(self._buffers)
        self._longest = max((spec.sequence_length or NEVER) for spec in specs)
        self._next_cut = chunk_cuts(specs, chunk_length)
        self._priorities = self._priorities_of(self._targets)
        self._handover: Handover | None = None  # a request that the stream may not have yet
        self._is_settled = True
        self._begin_episode()

    def _begin_episode(self) -> None:
        self._id = self._draw()
        self.num_steps = self.num_skipped = 0
        self.fill = 0  # steps in the chunk that is being filled
        self._stop = self._next_cut(0)  # steps that this chunk shall have
        self._sealed = 0  # steps in finished chunks
        self._written = 0  # windows that end at or before this step count are written
        self._boundary = 0  # step count at the last boundary step, where windows span episodes
        self._chunks: list[Chunk] = []
        self._unsent_bytes = 0
        if self._priorities is not None:
            self._priorities.clear()
        self._ending: EpisodeEnd | None = None  # how it ends, once its last step is taken
        self._is_over = False  # whether that is written

    def append(self, leaves: Sequence[Any], *, last: bool = False, plan: StepPlan | None = None) -> dict[str, int]:
        """Add a step to the episode; its leaves are copied. Never waits.

        Args:
            leaves: one for each dtype, of that dtype and shape.
            last: whether it ends the episode, as `end_episode` would.
            plan: what `plan` returned for this very step; None to make it here.

        Returns:
            What `end_episode` returns, if the step is the last one; nothing otherwise.

        Raises:
            StructureError: there are more or fewer leaves than dtypes. Nothing changed.
            SpecError: a `priority` function gave no finite number >= 0. Nothing changed.
            ClosedError: the stream is closed, or this is a forked child.
        """
        if self.stream.blocked:
            self.stream.check()
        if len(leaves) != self._num_columns:
            raise StructureError(f"a step has {len(leaves)} leaves, expected {self._num_columns}, one for each dtype.")
        with self._lock:
            if not self._is_settled:
                self.settle()
            if self._priorities is not None:
                plan = plan or self.plan(leaves, last=last)
            fill = self.fill
            for buffer, leaf in zip(self._buffers, leaves):  # noqa: B905  # they are as many, and the hottest line
                buffer[fill] = leaf
            fill += 1
            if last or plan is not None or fill == self._stop:
                return self.advance(last=last, plan=plan)
            self.num_taken, self.num_steps, self.fill = self.num_taken + 1, self.num_steps + 1, fill
            return {}

    def extend(self, columns: Sequence[Any]) -> int | None:
        """Add the steps [T, ...] that the chunk has room for; return how many, or None if a priority is a function."""
        self.stream.check()
        with self._lock:
            self.settle()
            if self._priorities is not None:
                return None
            fill, stop = self.fill, min(self.fill + len(columns[0]), self._stop)
            for buffer, column in zip(self._buffers, columns, strict=True):
                buffer[fill:stop] = column[: stop - fill]
            self.advance(stop - fill)
            return stop - fill

    def plan(self, leaves: Sequence[Any], *, last: bool = False) -> StepPlan | None:
        """Ask the `priority` functions about a step without adding it; None if there are none.

        Raises:
            SpecError: a function gave no finite number >= 0.
        """
        with process_hooks.unless_forked(self.stream, self._lock):
            self.settle()
            if self._priorities is None:
                return None
            n = self.num_steps + 1
            ending = ending_of(self._targets, n) if last and not self._spans_episodes else None
            return self._priorities.plan(leaves, n, ending)

    def advance(self, num_steps: int = 1, *, last: bool = False, plan: StepPlan | None = None) -> dict[str, int]:
        """Take the steps that were put at `fill` of the `buffers` given at construction as appended; see `append`."""
        fill = self.fill + num_steps
        if fill != self._stop and not last and plan is None:
            self.num_taken, self.num_steps, self.fill = self.num_taken + num_steps, self.num_steps + num_steps, fill
            return {}
        if plan is not None and self._priorities is not None:
            self._priorities.commit(plan)
        taken, steps = self.num_taken + num_steps, self.num_steps + num_steps
        dropped: dict[str, int] = {}
        if last and self._spans_episodes:
            episodes = self.num_episodes + 1
            self.num_taken, self.num_steps, self.fill, self.num_episodes, self._boundary, self._is_settled = (
                taken, steps, fill, episodes, steps, False)  # fmt: skip
        else:
            ending = ending_of(self._targets, steps) if last else None
            dropped = {} if ending is None else ending.dropped
            self.num_taken, self.num_steps, self.fill, self._ending, self._is_settled = (
                taken,
                steps,
                fill,
                ending,
                False,
            )
        self.settle()
        return dropped

    def skip(self, *, last: bool = False) -> dict[str, int]:
        """Leave a step out, and thereby all of its episode; return what `append` does."""
        with process_hooks.unless_forked(self.stream, self._lock):
            self.settle()
            taken, skipped = self.num_taken + 1, self.num_skipped + 1
            ending = self._discarding(skipped) if last else None
            self.num_taken, self.num_skipped, self._ending, self._is_settled = taken, skipped, ending, False
            self.settle()
            return {} if ending is None else ending.dropped

    def end_episode(self, *, align: bool = False, discard: bool = False) -> dict[str, int]:
        """End the episode: pad as the windows ask for, and send what is due.

        Args:
            align: give DROP's windows the last L steps too, if they are in no window yet (a reset in mid-episode).
            discard: write nothing more than the windows that were complete already.

        Returns:
            Steps that a kind of window does not hold, by reason, summed over the kinds.

        Raises:
            SpecError: a `priority` function gave no finite number >= 0. Nothing changed; the episode goes on.
        """
        with process_hooks.unless_forked(self.stream, self._lock):
            self.settle()
            if not self.num_steps:
                return {}
            if discard or self.num_skipped:
                ending = self._discarding(self.num_skipped)
            else:
                ending = ending_of(self._targets, self.num_steps, align=align)
            if self._priorities is not None:
                self._priorities.commit(self._priorities.plan(None, self.num_steps, ending))
            self._ending, self._is_settled = ending, False
            self.settle()
            return ending.dropped

    def _discarding(self, num_skipped: int) -> EpisodeEnd:
        """Return the end of an episode that adds nothing, with so many steps left out."""
        ending = ending_of(self._targets, self.num_steps, discard="overflow" if num_skipped else "reset")
        if num_skipped:
            ending.dropped["overflow"] = ending.dropped.get("overflow", 0) + num_skipped
        return ending

    def settle(self) -> None:
        """Do what the steps taken ask for: finish a full chunk, end the episode, write, hand over. Never waits."""
        with self._lock:
            if self._is_settled:
                return
            if self._handover is not None:
                self._hand_over()
            if self._is_over:
                self._begin_episode()
            elif self._ending is not None:
                self._pad(self._ending)
                stops = [window[1] for window in self._ending.closing if window is not None]
                if max([self._last_end(), *stops]) > self._sealed:
                    self._seal()
                self._write()
            else:
                if self.fill == self._stop:
                    self._seal()
                if self.num_steps == self._boundary:
                    self._send()
                elif self._sealed - self._written >= self._request_steps or self._unsent_bytes >= _REQUEST_BYTES:
                    self._write()
            self._is_settled = True

    def _pad(self, ending: EpisodeEnd) -> None:
        for _ in range(self.num_steps + max(ending.num_padding) - self._sealed - self.fill):
            if self.fill == self._stop:
                self._seal()
            for buffer, leaf in zip(self._buffers, self._pads, strict=True):
                buffer[self.fill] = leaf
            self.fill += 1

    def set_priority(self, index: int, priority: Priority) -> None:
        """Set the priority of one kind of window, for those that are not complete yet.

        Raises:
            SpecError: it is no number >= 0, or a function for windows whose steps were not kept. Nothing changed.
        """
        target = replace(self._targets[index], priority=priority)
        targets = (*self._targets[:index], target, *self._targets[index + 1 :])
        with process_hooks.unless_forked(self.stream, self._lock):
            self.settle()
            priorities = self._priorities_of(targets)
            if priorities is not None:
                priorities.take_over(self._priorities, self.num_steps)
            self.send()
            self._targets, self._priorities = targets, priorities

    def _priorities_of(self, targets: Sequence[WindowTarget]) -> WindowPriorities | None:
        asked = [target.priority for target in targets]
        specs = [target.spec for target in targets]
        return WindowPriorities(specs, asked, self._pads, self._pack) if any(map(callable, asked)) else None

    def send(self) -> None:
        """Send the windows that are complete, without waiting for their chunk to fill."""
        with process_hooks.unless_forked(self.stream, self._lock):
            self.settle()
            self._send()

    def _send(self) -> None:
        if self._last_end() > self._sealed:
            self._seal()
        self._write()

    @property
    def num_due(self) -> int:
        """Items of windows that are complete and not yet in a request."""
        with process_hooks.unless_forked(self.stream, self._lock):
            self.settle()
            count = self._sealed + self.fill
            return sum(len(self._ends(i, count)) * len(target.tables) for i, target in enumerate(self._targets))

    def _draw(self) -> int:
        return self._random.getrandbits(KEY_BITS)

    def _seal(self) -> None:
        """Compress the steps since the last chunk into one of their own."""
        fill = self.fill
        if not fill:
            return
        columns = self._buffers if fill == self.chunk_length else [buffer[:fill] for buffer in self._buffers]
        key, stop = self._draw(), self._sealed + fill
        data = self._encoder.encode(key, self._id, self._sealed, columns)
        self._chunks, self._unsent_bytes, self.num_chunks, self._sealed, self.fill, self._stop = (
            [*self._chunks, Chunk(key, self._sealed, stop, data)],
            self._unsent_bytes + len(data),
            self.num_chunks + 1,
            stop,
            0,
            self._next_cut(stop),
        )

    def _ends(self, index: int, upto: int) -> range:
        if self._ending is not None:
            upto = min(upto, self.num_steps + self._ending.num_padding[index])
        return self._targets[index].spec.ends(self._written, upto)

    def _last_end(self) -> int:
        """Return the last step count at which a window, not written yet, is complete; 0 if there is none."""
        count = self._sealed + self.fill
        return max((ends[-1] for ends in (self._ends(i, count) for i in range(len(self._targets))) if ends), default=0)

    def _write(self) -> None:
        """Encode the windows that are due, hand them over, and let go of the chunks that no window to come can hold."""
        self._hand_over()
        ending, sealed = self._ending, self._sealed
        windows: list[Windows] = []
        for i, target in enumerate(self._targets):
            due = self._ends(i, sealed)
            ends = np.arange(due.start, due.stop, due.step, np.int64)
            starts = ends - (target.spec.sequence_length or 0)
            if ending is not None and (window := ending.closing[i]) is not None:
                starts, ends = np.append(starts, window[0]), np.append(ends, window[1])
            if callable(target.priority) and self._priorities is not None:
                priorities = self._priorities.known(i, ends.tolist())
            else:
                priorities = np.full(len(ends), target.priority, np.float64)
            windows.append(Windows(target.tables, starts, ends, priorities))
        first = sealed - self._longest  # a closing window may end where the last regular one did
        num_gone = len(self._chunks) if ending else sum(chunk.stop <= first for chunk in self._chunks)
        kept, handover = hand_over(self._chunks, num_gone, windows, self._tables, self._draw(), self._num_columns)
        num_items = self.num_items + (handover.request.num_items if handover.request is not None else 0)
        if ending is None:
            self._chunks, self._written, self._unsent_bytes, self.num_items, self._handover, self._is_settled = (
                kept, sealed, 0, num_items, handover, False,
            )  # fmt: skip
        else:
            num_episodes = self.num_episodes + (self.num_steps + self.num_skipped > self._boundary)
            dropped = self.dropped + collections.Counter(ending.dropped)
            self.num_items, self.num_episodes, self.dropped, self._handover, self._is_over, self._is_settled = (
                num_items, num_episodes, dropped, handover, True, False,
            )  # fmt: skip
            self._begin_episode()
        self._hand_over()
        if self._priorities is not None:
            self._priorities.forget(self._written)
        self._is_settled = True

    def _hand_over(self) -> None:
        """Queue the request that was encoded last; the stream takes it once, however often this is begun."""
        request, hold, release = self._handover or (None, [], [])
        if request is not None or release:
            self.stream.write(request, hold=hold, release=release)
        self._handover = None
