"""Steps -> chunks -> windows -> insert stream.

A `SequenceWriter` holds one episode at a time. Steps are copied into a chunk, one array a leaf. A full chunk is
compressed and its arrays are used again. Which windows exist is a matter of integers (`windowing`): those that end at
a step of a finished chunk are due, and are encoded many at a time, as slices of chunks. So a step is stored and sent
once, however many windows and tables hold it.

    append(step) -> chunk arrays --full--> finished chunks --enough windows due--> InsertRequest -> InsertStream
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.chunks import Chunk, encode_windows
from reverb_writer.errors import SpecError, StructureError
from reverb_writer.priorities import Ending, Priority, StepPlan, WindowPriorities
from reverb_writer.steps import step_bytes, zeros
from reverb_writer.targets import Target, chunk_length_for
from reverb_writer.windowing import STRIDE_GAP, UNALIGNED_TAIL, EndOfEpisode, WindowSpec
from reverb_writer.wire import lifetime, tensors
from reverb_writer.wire.in_flight import InsertRequest, ItemRows
from reverb_writer.wire.insert_stream import InsertStream
from reverb_writer.wire.items import KEY_BITS, MAX_CHUNK_LENGTH, encode_chunk

__all__ = ["SequenceWriter", "check_dtypes"]

_REQUEST_BYTES = 1 << 20
_NEVER = 1 << 62


class SequenceWriter:
    """Write the windows of one stream of steps.

    Thread-safe. Several writers may share one insert stream, each with episodes of its own (vector environments). The
    writer does not own the stream: flush and close that.
    """

    def __init__(
        self,
        stream: InsertStream,
        dtypes: Sequence[np.dtype[Any]],
        shapes: Sequence[tuple[int, ...]],
        targets: Sequence[Target],
        *,
        padding_step: Sequence[Any] | None = None,
        pack: Callable[[Sequence[Any]], Any] = list,
        chunk_length: int | None = None,
        request_items: int = 1024,
        buffers: Sequence[npt.NDArray[Any]] | None = None,
        lock: threading.RLock | None = None,
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

        Raises:
            SpecError: there are no targets, or `chunk_length` is not in 1..16383.
            StructureError: Reverb cannot store one of the dtypes.
        """
        if not targets or not all(target.tables for target in targets):
            raise SpecError(f"`targets` must be at least one kind of window, each with a table, got {targets!r}.")
        if chunk_length is None:
            chunk_length = chunk_length_for([target.spec for target in targets], step_bytes(dtypes, shapes))
        if not 1 <= chunk_length <= MAX_CHUNK_LENGTH:
            raise SpecError(f"`chunk_length` must be in 1..{MAX_CHUNK_LENGTH}, got {chunk_length}.")
        for dtype in dtypes:
            tensors.dtype_number(dtype)
        self.stream = stream
        self.num_steps = 0  # of the episode so far, padding not counted
        self.num_items = 0
        self.num_chunks = 0
        self.chunk_length = chunk_length
        self._targets = tuple(targets)
        self._pads = list(map(zeros, dtypes, shapes) if padding_step is None else padding_step)
        self._pack = pack
        self._tables = frozenset(itertools.chain.from_iterable(target.tables for target in targets))
        self._layouts: dict[int, list[tuple[bytes, Callable[[Any], Any]]]] = {}  # by steps in the chunk
        items_a_step = sum(len(target.tables) / target.spec.stride_length for target in targets)
        self._request_steps = request_items / items_a_step
        self._random = random.Random()  # noqa: S311  # keys are no secret
        self._lock = lock or threading.RLock()
        self._buffers = list(buffers or map(np.zeros, [(chunk_length, *shape) for shape in shapes], dtypes))
        specs = [target.spec for target in targets]
        self._longest = max((spec.sequence_length or _NEVER) for spec in specs)
        # Windows that leave gaps or touch each other: each is one chunk, and so is each gap.
        only = specs[0] if len(set(specs)) == 1 else None
        length = only.sequence_length if only is not None else None
        self._cuts = (
            (only.stride_length, length)
            if only and length and length <= min(only.stride_length, chunk_length)
            else None
        )
        self._priorities: WindowPriorities | None = None
        if any(callable(target.priority) for target in targets):
            self._priorities = WindowPriorities(specs, [target.priority for target in targets], self._pads, pack)
        self._start_episode()

    def _start_episode(self) -> None:
        self.num_steps = 0
        self.fill = 0  # steps in the chunk that is being filled
        self._sealed = 0  # steps of the episode in finished chunks
        self._written = 0  # windows that end at or before this step count are written
        self._limits = [_NEVER] * len(self._targets)  # and none that ends after its target's limit exists
        self._chunks: list[Chunk] = []
        self._unsent_bytes = 0
        self._episode_id = self._draw()
        if self._priorities is not None:
            self._priorities.clear()
        self._stop = self._next_cut(0)

    def append(self, leaves: Sequence[Any], *, last: bool = False, plan: StepPlan | None = None) -> dict[str, int]:
        """Add a step to the episode; its leaves are copied. Never waits.

        Args:
            leaves: one for each dtype, of that dtype and shape.
            last: whether it ends the episode, as `end_episode` would.
            plan: what `plan` returned for this very step; None to make it here.

        Returns:
            What `end_episode` returns, if the step is the last one; nothing otherwise.

        Raises:
            SpecError: a `priority` function gave no finite number >= 0. Nothing changed.
            ClosedError: the stream is closed, or this is a forked child.
        """
        if self.stream.blocked:
            self.stream.check()
        with self._lock:
            ending = self._ending(self.num_steps + 1) if last else None
            if self._priorities is not None:
                self._priorities.commit(plan or self._priorities.plan(leaves, self.num_steps + 1, ending))
            fill = self.fill
            for buffer, leaf in zip(self._buffers, leaves):  # noqa: B905  # as many by contract, and the hottest line
                buffer[fill] = leaf
            self.advance()
            return {} if ending is None else self._finish(ending)

    def extend(self, columns: Sequence[Any]) -> int | None:
        """Add the steps [T, ...] that the chunk has room for; return how many, or None if a priority is a function."""
        self.stream.check()
        with self._lock:
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
        with lifetime.unless_forked(self.stream, self._lock):
            if self._priorities is None:
                return None
            n = self.num_steps + 1
            return self._priorities.plan(leaves, n, self._ending(n) if last else None)

    def advance(self, num_steps: int = 1) -> None:
        """Take the steps that were put at `fill` of the `buffers` given at construction as appended."""
        self.num_steps += num_steps
        self.fill += num_steps
        if self.fill == self._stop:
            self._seal()
            if self._sealed - self._written >= self._request_steps or self._unsent_bytes >= _REQUEST_BYTES:
                self._write()

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
        with lifetime.unless_forked(self.stream, self._lock):
            if not self.num_steps:
                return {}
            ending = self._ending(self.num_steps, align=align, discard=discard)
            if self._priorities is not None:
                self._priorities.commit(self._priorities.plan(None, self.num_steps, ending))
            return self._finish(ending)

    def _ending(self, n: int, *, align: bool = False, discard: bool = False) -> Ending:
        """Say what the end of an episode of `n` steps adds."""
        ending = Ending([], [], {})
        for target in self._targets:
            spec = _drop(target.spec) if discard else target.spec
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
            if discard and reasons:
                reasons = {"reset": sum(reasons.values())}
            ending.num_padding.append(spec.num_padding(n))
            ending.closing.append(closing)
            for reason, count in reasons.items():
                ending.dropped[reason] = ending.dropped.get(reason, 0) + count
        return ending

    def _finish(self, ending: Ending) -> dict[str, int]:
        n = self.num_steps
        self._limits = [n + k for k in ending.num_padding]
        for _ in range(max(ending.num_padding)):
            self._put(self._pads)
        stops = [window[1] for window in ending.closing if window is not None]
        if max([self._last_end(), *stops]) > self._sealed:
            self._seal()
        self._write(ending.closing)
        self._start_episode()
        return ending.dropped

    def set_priority(self, index: int, priority: Priority) -> None:
        """Set the priority of one kind of window, for those that are not complete yet.

        Raises:
            SpecError: it is no number >= 0, or a function for windows whose steps so far were not kept.
        """
        target = replace(self._targets[index], priority=priority)
        with lifetime.unless_forked(self.stream, self._lock):
            if callable(priority) and self._priorities is None:
                if self.num_steps:
                    raise SpecError("`priority` can become a function between episodes only.")
                functions = [other.priority for other in self._targets]
                self._priorities = WindowPriorities(
                    [other.spec for other in self._targets],
                    [*functions[:index], priority, *functions[index + 1 :]],
                    self._pads,
                    self._pack,
                )
            elif self._priorities is not None:
                self._priorities.functions[index] = priority
            self._targets = (*self._targets[:index], target, *self._targets[index + 1 :])

    def send(self) -> None:
        """Send the windows that are complete, without waiting for their chunk to fill."""
        with lifetime.unless_forked(self.stream, self._lock):
            if self._last_end() > self._sealed:
                self._seal()
            self._write()

    @property
    def num_due(self) -> int:
        """Items of windows that are complete and not yet in a request."""
        with lifetime.unless_forked(self.stream, self._lock):
            count = self._sealed + self.fill
            return sum(len(self._ends(i, count)) * len(target.tables) for i, target in enumerate(self._targets))

    def can_align(self) -> bool:
        """Whether `end_episode(align=True)` has something to write, or nothing that it could lose."""
        n = self.num_steps
        return any(
            target.spec.end_of_episode is not EndOfEpisode.DROP or n >= (target.spec.sequence_length or 1)
            for target in self._targets
        )

    def _draw(self) -> int:
        return self._random.getrandbits(KEY_BITS)

    def _put(self, leaves: Sequence[Any]) -> None:
        for buffer, leaf in zip(self._buffers, leaves, strict=True):
            buffer[self.fill] = leaf
        self.fill += 1
        if self.fill == self._stop:
            self._seal()

    def _seal(self) -> None:
        """Compress the steps since the last chunk into one of their own."""
        fill = self.fill
        if not fill:
            return
        columns = self._buffers if fill == self.chunk_length else [buffer[:fill] for buffer in self._buffers]
        layouts = self._layouts.get(fill)
        if layouts is None:
            layouts = self._layouts[fill] = [tensors.layout(column.dtype, column.shape) for column in columns]
        key, stop = self._draw(), self._sealed + fill
        data = encode_chunk(key, self._episode_id, self._sealed & 0x3FFFFFFF, columns, layouts)
        self._chunks.append(Chunk(key, self._sealed, stop, data))
        self.num_chunks += 1
        self._unsent_bytes += len(data)
        self._sealed = stop
        self.fill = 0
        self._stop = self._next_cut(stop)

    def _next_cut(self, start: int) -> int:
        """Return how many steps the chunk that begins at `start` shall have."""
        if self._cuts is None:
            return self.chunk_length
        stride, length = self._cuts
        phase = start % stride
        return min(self.chunk_length, (length if phase < length else stride) - phase)

    def _ends(self, index: int, upto: int) -> range:
        return self._targets[index].spec.ends(self._written, min(upto, self._limits[index]))

    def _last_end(self) -> int:
        """Return the last step count at which a window, not written yet, is complete; 0 if there is none."""
        count = self._sealed + self.fill
        return max((ends[-1] for ends in (self._ends(i, count) for i in range(len(self._targets))) if ends), default=0)

    def _write(self, closing: Sequence[tuple[int, int] | None] = ()) -> None:
        """Encode the windows that are due, queue them, and let go of the chunks that no window to come can hold."""
        rows: list[ItemRows] = []
        needed: dict[int, bytes] = {}
        first_key, num_items = self._draw(), 0
        for i, target in enumerate(self._targets):
            due = self._ends(i, self._sealed)
            ends = np.arange(due.start, due.stop, due.step, np.int64)
            starts = ends - (target.spec.sequence_length or 0)
            if closing and (window := closing[i]) is not None:
                starts, ends = np.append(starts, window[0]), np.append(ends, window[1])
            if len(ends):
                if callable(target.priority) and self._priorities is not None:
                    priorities = self._priorities.take(i, ends.tolist())
                else:
                    priorities = np.full(len(ends), target.priority, np.float64)
                key = first_key + num_items
                encoded, chunks = encode_windows(
                    self._chunks, starts, ends, priorities, target.tables, key, len(self._buffers)
                )
                rows += encoded
                needed |= chunks
                num_items += len(ends) * len(target.tables)
        first = self._sealed - self._longest  # a closing window may end where the last regular one did
        num_gone = len(self._chunks) if closing else sum(chunk.stop <= first for chunk in self._chunks)
        gone, self._chunks = self._chunks[:num_gone], self._chunks[num_gone:]
        release = [chunk.key for chunk in gone if chunk.held]
        if rows:
            hold = [chunk for chunk in self._chunks if not chunk.held]
            num_bytes = sum(row.nbytes for _, row in rows)
            for chunk in (*gone, *self._chunks):
                if not chunk.counted and chunk.key in needed:
                    chunk.counted = True
                    num_bytes += len(chunk.data)
            self.num_items += num_items
            request = InsertRequest(self._tables, first_key, rows, needed, num_bytes)
            self.stream.write(request, hold=[chunk.key for chunk in hold], release=release)
            for chunk in hold:
                chunk.held = True
        elif release:
            self.stream.write(None, release=release)
        self._written = self._sealed
        self._unsent_bytes = 0


def _drop(spec: WindowSpec) -> WindowSpec:
    """Return the spec with nothing added at the end; a whole episode keeps nothing."""
    length = spec.sequence_length
    return WindowSpec(_NEVER) if length is None else WindowSpec(length, spec.stride_length)


def check_dtypes(dtypes: Sequence[np.dtype[Any]], paths: Sequence[str]) -> None:
    """Refuse leaves that Reverb cannot store.

    Raises:
        StructureError: names the leaf.
    """
    for dtype, path in zip(dtypes, paths, strict=True):
        try:
            tensors.dtype_number(dtype)
        except StructureError as error:
            raise StructureError(f"leaf `{path}`: {error}") from None
