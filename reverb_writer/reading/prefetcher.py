"""The thread of a table, which fetches batches ahead of their use.

    Mixer -> BatchAssembler -> BatchMaker -> batches that are ready -> pop(), which frees room for more

At most `max_in_flight_batches` batches are in flight, being assembled, or ready. All work on samples is done in the
thread, user functions included. Who takes a batch takes no lock, and waits for none of it.

The room for samples is counted each time, not taken from a record of changes: an interrupt of the main thread between
a change and its record would lose room for good.
"""

from __future__ import annotations

import collections
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

from reverb_writer.background import Flag, LateThread
from reverb_writer.client.same_process import send_due
from reverb_writer.decoding.batch_assembler import BatchAssembler
from reverb_writer.decoding.table_structure import TableStructure
from reverb_writer.errors import FormatError, IncompleteError, ReverbWriterError, SpecError, UnsafeDataError
from reverb_writer.reading.mixer import Mixer
from reverb_writer.reading.read_options import ReadOptions
from reverb_writer.reading.stats import DatasetStats
from reverb_writer.slices.batch import Batch

_LOG = logging.getLogger(__package__)


class BatchMaker:
    """Makes batches of assembled samples, in the thread that fetches."""

    calls_user = False
    """Whether it calls a user's function, which may take its time."""

    def make(self, assembler: BatchAssembler, server: str) -> Iterator[tuple[Batch | None, bool]]:
        """Yield batches of all samples that an assembler holds, each when it is asked for; and whether it is the last.

        The last one is None if the samples fill no batch. Then the assembler has begun its next batch.
        """
        raise NotImplementedError

    def rest(self) -> Batch | None:
        """Return a last, smaller batch of what earlier samples have left; None if there is nothing."""
        return None


@dataclass(eq=False)
class _Entry:
    """A batch, or an error in its place, and how many samples are delivered with it."""

    num_samples: int
    item: Batch | Exception | None = None
    is_of_stream: bool = False  # an error that has ended a stream


class Prefetcher:
    """Fetches the batches of one table. `start`, `pop` and what follows them are thread-safe.

    Attributes:
        woken: set whenever a batch or an error is ready, and at the end.
        too_short: why the samples that were made to batches last have given none; None if they have.
    """

    def __init__(
        self, mixer: Mixer, maker: BatchMaker, batch_size: int, options: ReadOptions, structure: TableStructure
    ) -> None:
        """Prepare to make batches of `batch_size` samples each; those of another structure are left out."""
        self._mixer, self._maker, self._batch_size = mixer, maker, batch_size
        self._table = structure.table
        self._transform = options.transform
        self._calls_user = maker.calls_user or options.transform is not None
        self._skip_unsafe, self._max_ready = options.skip_unsafe, options.max_in_flight_batches
        self._assembler = BatchAssembler(options.max_cache_bytes, options.max_sample_bytes, structure=structure)
        self._changed, self.woken = mixer.changed, Flag()
        self.too_short: IncompleteError | None = None
        self._says_too_short = True
        self._ready: collections.deque[_Entry] = collections.deque()
        self._making: _Entry | None = None  # samples of which batches are made
        self._batches: Iterator[tuple[Batch | None, bool]] = iter(())
        self._num_skipped = 0
        self._is_busy = False  # with a user's function, for a batch that `pop_rest` did not ask for
        self._is_awaited = False  # whether the reader waits for a batch that is not ready
        self._request: Flag | None = None  # of samples that have come, full batch or not; set when they are ready
        self._end: tuple[float, float] | None = None  # see `stop`
        self._discards = False
        self._ended = Flag()
        self._thread = LateThread(self._run, "reverb-writer-prefetch")

    # ------------------------------------------------------------------------------------- for the reader

    def start(self) -> None:
        """Start to fetch, if it has not begun; an interrupt of this may be followed by another call."""
        if self._end is None:
            self._thread.start()

    def pop(self, *, waits: bool = False) -> Batch | Exception | None:
        """Return the next batch if it is ready, or the error in its place.

        A reader that `waits` if there is none has the observers of this process send what they hold, but not before
        the thread has made what it can of the samples that have come: to send few windows costs about as much as to
        send many.
        """
        self._is_awaited = waits and not self._ready
        try:
            return self._ready.popleft().item
        except IndexError:
            return None
        finally:
            self._changed.set()  # also if there is none, because an interrupt may have kept an earlier call from this

    def pop_rest(self) -> Batch | Exception | None:
        """Return the next batch, or a smaller one of the samples that have come; None if there are none.

        Waits for the batches that the thread makes, but not for a batch that a user's function works on already.
        """
        request = self._request = Flag()
        self._changed.set()
        try:
            self.woken.clear()
            while not (request.is_set() or self._ready or self._is_busy or self.has_ended):
                self.woken.wait()
                self.woken.clear()
        finally:
            self._request = None
        return self.pop()

    @property
    def has_ended(self) -> bool:
        """Whether no more batches will be ready than are."""
        return self._ended.is_set() or (self._end is not None and not self._thread.has_begun)

    @property
    def num_for_batch(self) -> int:
        """Samples that have come for the next batch, at most as many as it has."""
        waiting = max((len(source.waiting) for source in self._mixer.sources), default=0)
        return min(self._assembler.num_samples + waiting, self._batch_size)

    @property
    def is_making(self) -> bool:
        """Whether a batch is being made of its samples."""
        return self._making is not None

    def count(self, stats: DatasetStats) -> None:
        """Add the counters so far."""
        self._mixer.count(stats)
        is_lost = self.has_ended and not self._mixer.removes_items  # no one will get what waits
        stats.ready_samples = self._num_held() + (0 if is_lost else self._mixer.num_waiting)
        stats.cache_bytes = self._assembler.cache_bytes
        stats.decoded_chunks = self._assembler.num_decoded_chunks
        stats.foreign_items = self._assembler.num_foreign
        stats.skipped_samples = self._num_skipped

    def stop(self, max_silence_s: float = 0.0, until: float = -math.inf, *, discards: bool = False) -> None:
        """Request no more samples and have the thread end, without waiting for it. Idempotent.

        If sampling removes items, samples in flight are read first: until `until` of `time.monotonic()`, or until none
        has come for `max_silence_s` seconds. The samples that have come can be popped when it has ended, unless it
        `discards` them.
        """
        self._discards = discards
        if self._end is None:
            self._end = until, max_silence_s
        self._changed.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end after `stop`; after `timeout_s` seconds it counts as ended, and ends by itself."""
        if self._thread.has_begun:
            self._ended.wait(timeout_s)
        self._ended.set()

    # ----------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            self._fetch()
            self._mixer.close()
            if not self._discards:
                while self._advance(time.monotonic(), rest=True, bounded=False):
                    pass
                self._put_rest()
        except Exception as error:  # noqa: BLE001  # the reader raises it: a dataset that just ends looks complete
            if not isinstance(error, ReverbWriterError):
                _LOG.exception("The thread that fetches samples of `%s` has ended.", self._table)
            self._ready.append(_Entry(0, error))
        finally:
            self._mixer.close()
            self._ended.set()  # before the reader wakes: the thread is alive for a moment more
            self.woken.set()

    def _fetch(self) -> None:
        """Fetch until the dataset is closed, or everything that was to be fetched has been taken."""
        began_to_end_at = math.inf
        while True:
            self._changed.clear()
            now, end = time.monotonic(), self._end
            if end is not None:
                self._mixer.stop_requests()
                began_to_end_at = min(began_to_end_at, now)
            next_at = math.inf
            if end is not None or not any(entry.is_of_stream for entry in self._ready.copy()):
                next_at, errors = self._mixer.proceed(now, self._num_held())
                for error in errors:  # nothing is read until it is, so that damage costs little
                    self._refuse(error, is_of_stream=True)
            request = self._request
            rest, bounded = request is not None or self._mixer.is_done, request is None and end is None
            if self._advance(now, rest=rest, bounded=bounded):
                continue
            if end is not None:
                until, max_silence_s = end
                next_at = min(until, max(self._mixer.heard_at, began_to_end_at) + max_silence_s)
                if next_at <= now or not (self._mixer.removes_items and self._mixer.num_in_flight):
                    return
            elif self._mixer.is_done and self._making is None:
                return
            if request is not None:
                self._put_rest()
                request.set()
                self.woken.set()
            self._wait(next_at)

    def _wait(self, until: float) -> None:
        """Wait until there is something to do: at `until` of `time.monotonic()`, or earlier."""
        if self._is_awaited and not (self._ready or self._changed.is_set()):
            self._is_awaited = False
            send_due()
        self._changed.wait(None if until == math.inf else until - time.monotonic())

    def _advance(self, now: float, *, rest: bool, bounded: bool) -> bool:
        """Do the next piece of work on samples that have come; return whether there was one.

        With `rest`, samples are made to a batch that they do not fill; without `bounded`, also if enough are ready.
        """
        if self._making is not None:
            if bounded and len(self._ready) >= self._max_ready:
                return False
            self._make(self._making)
            return True
        assembler = self._assembler
        samples = self._mixer.take(self._batch_size - assembler.num_samples, now, any_server=rest)
        for error in assembler.add(samples) if samples else ():
            self._refuse(error)
        num_samples = assembler.num_samples
        if num_samples >= self._batch_size or (num_samples and not samples and (rest or self._mixer.is_starved)):
            self._making = _Entry(num_samples)
            self._batches = self._maker.make(assembler, self._mixer.server)
            self._mixer.begin_batch()
            return True
        return bool(samples)

    def _make(self, making: _Entry) -> None:
        """Make the next batch of the samples that were assembled."""
        if self._calls_user and self._request is None:
            self._is_busy = True
        num_done = 0
        try:
            batch, is_last = next(self._batches)
        except Exception as error:  # noqa: BLE001  # of a user's function, for example; the reader raises it
            is_last = True
            if isinstance(error, IncompleteError):  # the reader raises it if its time-out comes before other samples
                if self._says_too_short:
                    _LOG.warning("Table `%s`: %s Such samples are left out.", self._table, error)
                self.too_short, self._says_too_short = error, False
            else:
                making.item = error
            if self._assembler.num_samples:
                self._assembler.begin_next()
        else:
            if batch is not None:
                num_done, self.too_short = len(batch.info), None
                making.item = self._transformed(batch)
        self._is_busy = False
        num_left = 0 if is_last else max(making.num_samples - num_done, 0)
        if making.item is not None:
            self._ready.append(making)
        self._making = None if is_last else _Entry(num_left)
        making.num_samples -= num_left
        self.woken.set()

    def _refuse(self, error: ReverbWriterError, *, is_of_stream: bool = False) -> None:
        """Skip and count a sample or a message, or have the reader raise its error."""
        if self._skip_unsafe and isinstance(error, UnsafeDataError | FormatError):
            self._num_skipped += 1
        else:
            self._put(_Entry(0, error, is_of_stream))

    def _put(self, entry: _Entry) -> None:
        self._ready.append(entry)
        self.woken.set()

    def _put_rest(self) -> None:
        batch = self._maker.rest()
        if batch is not None:
            self._put(_Entry(len(batch.info), self._transformed(batch)))

    def _transformed(self, batch: Batch) -> Batch | Exception:
        """Return what the learner's function makes of a batch, or the error that it raises."""
        if self._transform is None:
            return batch
        try:
            found = self._transform(batch)
        except Exception as error:  # noqa: BLE001  # whatever it is, the reader raises it
            return error
        if isinstance(found, Batch):
            return found
        return SpecError(
            f"`transform` must return a Batch, such as `dataclasses.replace(batch, data=...)`, got "
            f"{type(found).__name__}."
        )

    def _num_held(self) -> int:
        """Return how many samples were taken from the mixer and have not been popped, with the errors."""
        making = self._making
        entries = {id(entry): entry for entry in (*self._ready.copy(), *([making] if making else []))}
        num_held = sum(entry.num_samples or isinstance(entry.item, Exception) for entry in entries.values())
        return num_held + (self._assembler.num_samples if making is None else 0)
