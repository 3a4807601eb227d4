"""The thread of a dataset, which fetches batches ahead of their use.

    Feed -> BatchAssembler -> BatchMaker -> transform -> form of the reader's last call -> pop(), which frees room

At most `max_in_flight_batches` batches are in flight, being assembled, or ready. The thread does all work on samples,
and also calls user functions. The reader of a batch takes no lock and does not wait for this work.

The room for samples is counted each time, because an interrupt of the main thread between a change and its record would
lose room for ever.
"""

from __future__ import annotations

import collections
import logging
import math
import time
from typing import Any, NamedTuple

import numpy as np

from reverb_writer.background import Flag, LateThread
from reverb_writer.client.same_process import send_due
from reverb_writer.decoding.batch_assembler import BatchAssembler
from reverb_writer.decoding.table_structure import TableStructure
from reverb_writer.errors import FormatError, IncompleteError, ReverbWriterError, SpecError, UnsafeDataError
from reverb_writer.reading.batch_maker import BatchMaker
from reverb_writer.reading.feed import Feed
from reverb_writer.reading.read_options import ReadOptions
from reverb_writer.reading.stats import DatasetStats
from reverb_writer.reading.views.forms import Form, in_form
from reverb_writer.rows import ACTION, LAST
from reverb_writer.slices.batch import Batch

_LOG = logging.getLogger(__package__)


class Ready(NamedTuple):
    """A batch for the reader, or an error in its place.

    Attributes:
        num_samples: samples that are delivered with it; 0 for the error of a message.
        error: None for a batch.
        batch: the result of `transform`.
        batch_size: samples, or slices, of the batch before the transform.
        received_at: `time.monotonic()` when the first of its samples arrived.
        versions: versions of its samples; None if they have none.
        form: the form of `made`.
        made: the batch in this form.
    """

    num_samples: int
    error: Exception | None = None
    batch: Any = None
    batch_size: int = 0
    received_at: float = 0.0
    versions: Any = None
    form: Form = ()
    made: Any = None

    def in_form(self, form: Form) -> Any:
        """Return the batch in a form; it is made now if another form was made ahead."""
        return self.made if form == self.form else in_form(self.batch, form)


class Prefetcher:
    """Fetches the batches of one table. `start`, `pop` and the methods after them are thread-safe.

    Attributes:
        woken: set whenever a batch or an error is ready, and at the end.
        too_short: the reason why the last samples gave no batch; None if they gave one.
    """

    def __init__(
        self, feed: Feed, maker: BatchMaker, batch_size: int, options: ReadOptions, structure: TableStructure
    ) -> None:
        """Prepare to make batches of `batch_size` samples each; samples of another structure are left out."""
        self._feed, self._maker, self._batch_size = feed, maker, batch_size
        self._table = structure.table
        self._transform = options.transform
        self._skip_unsafe, self._max_ready = options.skip_unsafe, options.max_in_flight_batches
        reads_once = feed.tables[0].max_times_sampled == 1
        self._assembler = BatchAssembler(
            options.max_cache_bytes, options.max_sample_bytes, structure=structure, reads_once=reads_once
        )
        self._changed, self.woken = feed.changed, Flag()
        self.too_short: IncompleteError | None = None
        self._failure: Exception | None = None  # has ended the thread
        self._says_too_short = True
        self._ready: collections.deque[Ready] = collections.deque()
        self._is_full = False  # whether the samples of the next batches are assembled
        self._made: collections.deque[tuple[Batch, int]] = collections.deque()  # to be transformed; see `Ready`
        self._form: Form = ()
        self._num_skipped = self._num_masked_ends = 0
        self._num_left_out_before = maker.num_left_out  # in earlier passes
        self._num_left_out = 0  # samples that were left out since the reader's last call: they keep their room
        self._is_busy = False  # with a user's function, for a batch that `pop_rest` did not request
        self._is_awaited = False  # whether the reader waits for a batch that is not ready, and no one was told yet
        self._needs_batch = False  # whether the reader waits for a batch that is not ready
        self._request: Flag | None = None  # for the samples that have arrived; set when their batch is ready
        self._end: tuple[float, float] | None = None  # see `stop`
        self._discards = False
        self._ended = Flag()
        self._thread = LateThread(self._run, "reverb-writer-prefetch")

    # ------------------------------------------------------------------------------------- for the reader

    def start(self, form: Form) -> None:
        """Start to fetch, if it has not started, and make batches in this form ahead. Also after an interrupt."""
        self._form = form
        if self._end is None:
            self._thread.start()

    def pop(self, *, waits: bool = False) -> Ready | None:
        """Return the next batch if it is ready, or the error in its place.

        If no batch is ready and the reader `waits`, the observers of this process send their windows at once. First the
        thread makes all possible batches of the samples that have arrived, because few windows cost about as much to
        send as many.
        """
        self._is_awaited = self._needs_batch = waits and not self._ready
        self._num_left_out = 0
        try:
            return self._ready.popleft()
        except IndexError:
            # Each time: an iteration that ends without an error looks complete.
            return None if self._failure is None else Ready(0, self._failure)
        finally:
            self._changed.set()  # also without a batch, because an interrupt may have skipped this in an earlier call

    def pop_rest(self) -> Ready | None:
        """Return the next batch, or a smaller one of the samples that have arrived; None if none have arrived.

        Waits for the batches that the thread makes, but not for a batch that a user's function already works on.
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
        """Whether no further batches will become ready."""
        return self._ended.is_set() or (self._end is not None and not self._thread.has_begun)

    @property
    def num_for_batch(self) -> int:
        """Samples that have arrived for the next batch, at most the size of a batch."""
        return min(self._assembler.num_samples + self._feed.num_for_batch, self._batch_size)

    @property
    def is_making(self) -> bool:
        """Whether a batch is being made of its samples."""
        return self._is_full or bool(self._made)

    def count(self, stats: DatasetStats) -> None:
        """Add the counters so far, and set the present values."""
        self._feed.count(stats)
        stats.in_flight_samples = self._feed.num_in_flight
        is_lost = self.has_ended and not self._feed.removes_items  # no one will get the waiting samples
        stats.ready_samples = self._num_held() + (0 if is_lost else self._feed.num_waiting)
        stats.cache_bytes = self._assembler.cache_bytes
        stats.decoded_chunks += self._assembler.num_decoded_chunks
        stats.foreign_items += self._assembler.num_foreign
        stats.masked_ends += self._num_masked_ends
        stats.skipped_samples += self._num_skipped
        stats.too_old_samples += self._maker.num_left_out - self._num_left_out_before

    def stop(self, max_silence_s: float = 0.0, until: float = -math.inf, *, discards: bool = False) -> None:
        """Request no more samples and have the thread end, without waiting for it. Idempotent.

        If sampling removes items, samples in flight are read first: until `until` of `time.monotonic()`, or until none
        has arrived for `max_silence_s` seconds. After the end, `pop` returns the samples that have arrived, unless
        `stop` `discards` them.
        """
        self._discards = discards
        if self._end is None:
            self._end = until, max_silence_s
        self._changed.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end after `stop`; after `timeout_s` seconds it counts as ended and ends later."""
        if self._thread.has_begun:
            self._ended.wait(timeout_s)
        self._ended.set()

    # ----------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            self._fetch()
            self._feed.close()
            if not self._discards:
                while self._advance(rest=True, bounded=False):
                    pass
                self._put_rest()
        except Exception as error:  # noqa: BLE001  # the reader raises it: a dataset that ends without an error looks complete
            if not isinstance(error, ReverbWriterError):
                _LOG.exception("The thread that fetches samples of `%s` has ended.", self._table)
            self._failure = error
        finally:
            self._feed.close()
            self._ended.set()  # before the reader wakes: the thread lives a moment longer
            self.woken.set()

    def _fetch(self) -> None:
        """Fetch until the dataset is closed, or the reader has taken all samples of the iteration."""
        began_to_end_at = math.inf
        while True:
            self._changed.clear()
            now, end = time.monotonic(), self._end
            if end is not None:
                self._feed.stop_requests()
                began_to_end_at = min(began_to_end_at, now)
            next_at = math.inf
            # Nothing is read until the error of a message is taken, so that damage costs little.
            if end is not None or all(one.num_samples or one.error is None for one in self._ready.copy()):
                next_at, errors = self._feed.proceed(now, self._num_held() + self._num_left_out)
                for error in errors:
                    self._refuse(error, 0)
            has_none = not self._ready  # read first: a call that gets a batch does not want the rest
            request = self._request
            rest = (request is not None and has_none) or self._feed.is_done
            bounded = request is None and end is None
            if self._advance(rest=rest, bounded=bounded):
                continue
            if end is not None:
                until, max_silence_s = end
                next_at = min(until, max(self._feed.heard_at, began_to_end_at) + max_silence_s)
                if next_at <= now or not (self._feed.removes_items and self._feed.num_in_flight):
                    return
            elif self._feed.is_done and not self.is_making:
                return
            if request is not None:
                self._answer(request)
            self._wait(next_at)

    def _wait(self, until: float) -> None:
        """Wait for work, at most until `until` of `time.monotonic()`."""
        if self._is_awaited and not (self._ready or self._changed.is_set()):
            self._is_awaited = False
            send_due()
        self._changed.wait(None if until == math.inf else until - time.monotonic())

    def _advance(self, *, rest: bool, bounded: bool) -> bool:
        """Do the next piece of work on arrived samples; return whether it found one.

        With `rest`, make a batch that the samples do not fill. Without `bounded`, work even if enough are ready.
        """
        if self._is_full or self._made:
            if len(self._ready) >= self._num_wanted(bounded=bounded):
                return False
            if self._is_full:
                self._make()
            if self._made:
                self._transform_next()
            return True
        assembler = self._assembler
        if self._maker.is_full(assembler):
            self._is_full = True
            return True
        samples = self._feed.take(self._batch_size - assembler.num_samples, rest=rest)
        for error in assembler.add(samples) if samples else ():
            self._refuse(error, 1)
        num_samples = assembler.num_samples
        self._is_full = num_samples >= self._batch_size or (
            num_samples > 0 and not samples and (rest or self._feed.is_starved)
        )
        return self._is_full or bool(samples)

    def _num_wanted(self, *, bounded: bool) -> float:
        """Return how many batches may be ready."""
        if not self._maker.is_lazy:
            return self._max_ready if bounded else math.inf
        if self._end is not None:
            return math.inf
        return int(self._needs_batch or not bounded)

    def _make(self) -> None:
        """Make the batches of the assembled samples."""
        num_samples, num_left_out = self._assembler.num_samples, self._maker.num_left_out
        try:
            batches = self._maker.make(self._assembler, self._feed.end_batch())
        except IncompleteError as error:  # the reader raises it if it times out before other samples arrive
            if self._says_too_short:
                _LOG.warning("Table `%s`: %s Such samples are left out.", self._table, error)
            self.too_short, self._says_too_short = error, False
            self._num_left_out += num_samples
            if (request := self._request) is not None:  # the next samples may be too short, too, without an end
                self._answer(request)
        except Exception as error:  # noqa: BLE001  # the reader raises it
            self._ready.append(Ready(num_samples, error))
        else:
            for batch in batches:  # a batch of slices frees as much room as it has slices, and the last one the rest
                num_freed = num_samples if batch is batches[-1] else min(len(batch.info), num_samples)
                self._made.append((batch, num_freed))
                if batch.row_kinds is not None:
                    without_next = np.bitwise_and(batch.row_kinds, LAST | ACTION) == LAST | ACTION
                    self._num_masked_ends += int(np.count_nonzero(without_next))
                num_samples -= num_freed
        finally:
            self._num_left_out += self._maker.num_left_out - num_left_out
            self._is_full = False
            self._assembler.begin_next()
            self.woken.set()

    def _transform_next(self) -> None:
        """Have the next batch transformed and brought into the reader's form."""
        self._is_busy = self._transform is not None and self._request is None
        ready = self._transformed(*self._made[0])
        self._is_busy, self.too_short = False, None
        self._made.popleft()
        self._ready.append(ready)
        self.woken.set()

    def _refuse(self, error: ReverbWriterError, num_samples: int) -> None:
        """Skip and count a sample or a message, or have the reader raise its error."""
        if self._skip_unsafe and isinstance(error, UnsafeDataError | FormatError):
            self._num_skipped += 1
        else:
            self._ready.append(Ready(num_samples, error))
            self.woken.set()

    def _answer(self, request: Flag) -> None:
        """Put the samples that have arrived if they fill no batch."""
        if not self._ready:
            self._put_rest()
        request.set()
        self.woken.set()

    def _put_rest(self) -> None:
        batch = self._maker.rest()
        if batch is not None:
            self._ready.append(self._transformed(batch, len(batch.info)))
            self.woken.set()

    def _transformed(self, batch: Batch, num_samples: int) -> Ready:
        """Return a batch as the reader wants it, or the error of the learner's `transform` in its place."""
        result: Any = batch
        error: Exception | None = None
        if self._transform is not None:
            try:
                result = self._transform(batch)
            except StopIteration:  # it would end the reader's loop
                error = RuntimeError("`transform` raised StopIteration. To stop early, end the loop over the dataset.")
            except Exception as raised:  # noqa: BLE001  # the reader raises it
                error = raised
            else:
                if result is None:
                    error = SpecError("`transform` returned None. Return a batch, or whatever the learner needs of it.")
        if error is not None:
            return Ready(num_samples, error)
        form = self._form
        try:
            made = in_form(result, form)
        except Exception:  # noqa: BLE001  # the reader makes it again, and gets the error
            form, made = (), result
        return Ready(
            num_samples, None, result, len(batch.info), batch.info.received_at, batch.info.versions, form, made
        )

    def _num_held(self) -> int:
        """Return the number of samples that were taken from the feed and not popped, errors included."""
        num_made = sum(num_samples for _, num_samples in self._made.copy())
        return self._assembler.num_samples + num_made + sum(ready.num_samples for ready in self._ready.copy())
