"""The reader of one table: opening, waits and their causes, counters, the end.

TableReader -> Prefetcher        batches of a feed of the TableSource, made ahead in a thread
            -> PriorityUpdates   new priorities for the TableSource, sent in another thread
"""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from reverb_writer import background
from reverb_writer.arguments import check_timeout, check_wait
from reverb_writer.background import in_background, may_be_interrupted
from reverb_writer.decoding.table_structure import TableStructure
from reverb_writer.errors import IncompleteError, ReplayTimeoutError, ServerUnavailableError, SpecError
from reverb_writer.reading.batch_maker import BatchMaker
from reverb_writer.reading.feed import Feed
from reverb_writer.reading.prefetcher import Prefetcher, Ready
from reverb_writer.reading.priority_updates import PriorityUpdates
from reverb_writer.reading.read_options import ReadOptions
from reverb_writer.reading.stats import DatasetStats
from reverb_writer.reading.table_source import TableSource
from reverb_writer.reading.views.forms import Form
from reverb_writer.tables.table_info import TableInfo
from reverb_writer.transport import process_hooks

_LOG = logging.getLogger(__package__)

_ORDERED = {"fifo", "max_heap", "min_heap"}
_LOOK_EVERY_S = 0.2  # interval of questions for the cause of a wait
_END_S = 5.0  # time for which the main thread waits for the end of a reader that was not closed
_STOP_S = 3.0  # time for the thread to end
_MAX_SILENCE_S = 0.25  # at the end, wait for samples in flight until none has arrived for this time


class TableReader:
    """Fetches the batches of one table. All but `begin`, `next` and `poll`, which one thread calls, is thread-safe.

    The views of a dataset share it. It closes itself when nothing refers to it any more.

    Attributes:
        timeout_s: time-out of a batch, in seconds.
        is_prioritized: whether the table is sampled by priority.
    """

    def __init__(
        self,
        source: TableSource,
        table: str,
        pool_size: int,
        options: ReadOptions,
        maker: BatchMaker,
        opening: Callable[[], Any],
        release: Callable[[], object],
    ) -> None:
        """Find the table; if that fails, stop all started threads.

        The `maker` makes batches of `pool_size` samples together. It must not refer to the reader: the thread refers to
        the maker, and would keep the reader from being collected. `opening` opens an equal dataset, and is picklable.
        `release` is called at the end, when the reader no longer uses the source.
        """
        self._source, self._table, self._opening, self._release = source, table, opening, release
        self.timeout_s = source.timeout_s if options.timeout_s is None else options.timeout_s
        self._stats = DatasetStats()  # of batches, and of earlier passes
        self._pool_size, self._options, self._maker = pool_size, options, maker
        self._begins_pass = options.single_pass  # whether the next call for a batch begins a pass
        self._has_given_all = False  # of a pass
        parts: list[Any] = [None, None]  # the priorities and the prefetcher, once they exist
        self._parts = parts
        # A reader that was not closed, or whose opening was interrupted, must not hang the interpreter's end.
        self._finalizer = weakref.finalize(self, _shut_down, parts, release)
        try:
            feed = source.open(source.timeout_s)
            _check_tables(feed.tables, options)
            self._updates = parts[0] = PriorityUpdates(feed.tables[0], source.set_priorities)
            self._prepare(feed)
        except BaseException:
            self._finalizer()
            raise

    def _prepare(self, feed: Feed) -> None:
        """Prepare to fetch; `_begin` begins."""
        self._feed = feed
        self.is_prioritized = any(table.sampler == "prioritized" for table in feed.tables)
        structure = TableStructure(self._table, feed.tables[0].signature)
        self._prefetcher = Prefetcher(feed, self._maker, self._pool_size, self._options, structure)
        self._parts[1] = self._prefetcher

    def begin(self, form: Form) -> None:
        """Begin to fetch batches in a form; after the end of a single pass, the next one begins."""
        self._begins_pass |= self._has_given_all
        self._begin(form)

    def next(self, form: Form) -> Any:
        """Return the next batch in a form; raise StopIteration at the end; see `View.__next__`."""
        start = time.monotonic()
        self._begin(form)
        ready = self._await(start, self.timeout_s, extends=True)
        if ready is None:
            self._has_given_all = self._options.single_pass
            raise StopIteration
        return self._given(ready, start, form)

    def poll(self, timeout_s: float, form: Form) -> Any:
        """Return a batch of the samples that have arrived; see `View.poll`."""
        start, timeout_s = time.monotonic(), check_wait(timeout_s)
        try:
            self._begin(form)
            ready = self._await(start, timeout_s) if timeout_s > 0 else self._rest()
        except (ReplayTimeoutError, ServerUnavailableError, IncompleteError):
            ready = None if self._begins_pass else self._rest()
        return None if ready is None else self._given(ready, start, form)

    def _rest(self) -> Ready | None:
        return self._prefetcher.pop() or self._prefetcher.pop_rest()

    def _begin(self, form: Form) -> None:
        """Begin to fetch batches in a form; of a single pass, the items that the servers have now."""
        process_hooks.claim()
        if self._begins_pass and self._finalizer.alive:  # it ends with `close`
            feed, past = self._source.open(self.timeout_s), self.stats()
            self._prepare(feed)
            self._stats, self._begins_pass, self._has_given_all = past, False, False
        self._prefetcher.start(form)

    def _await(self, start: float, timeout_s: float, *, extends: bool = False) -> Ready | None:
        """Return the next batch, or the error in its place; None at the end.

        The time-out counts from `start`, of `time.monotonic()`. While it waits, the servers are asked for the cause,
        and the cause is logged every ten seconds. If it `extends`, the time-out starts again whenever less is missing
        than ever before in this wait.
        """
        woken, pause_s = self._prefetcher.woken, min(_LOOK_EVERY_S, timeout_s / 4)
        deadline, log_at, look_at = start + timeout_s, start + background.LOG_EVERY_S, time.monotonic() + pause_s
        missing: dict[str, int] = {}
        while True:
            woken.clear()
            has_ended = self._prefetcher.has_ended  # read first: after the end nothing arrives
            ready = self._prefetcher.pop(waits=True)
            if ready is not None:
                return ready
            if not has_ended and woken.wait(min(deadline, look_at) - time.monotonic()):
                continue
            now = time.monotonic()
            if has_ended or now >= deadline:
                self._stats.wait_s += now - start
                too_short, self._prefetcher.too_short = self._prefetcher.too_short, None
                if has_ended and too_short is None:
                    return None
                raise too_short or self._too_late(start, deadline - start)
            if now >= look_at:
                look_at, log_at = now + pause_s, self._look(now, start, log_at)
                for name, number in (self._num_missing() if extends else {}).items():
                    if number < missing.setdefault(name, number):
                        missing[name], deadline = number, now + timeout_s

    def _given(self, ready: Ready, called_at: float, form: Form) -> Any:
        """Count a batch and return it in a form, or raise the error in its place."""
        now = time.monotonic()
        self._stats.wait_s += now - called_at
        if ready.error is not None:
            raise ready.error
        self._stats.batches += 1
        self._stats.samples += ready.batch_size
        self._stats.last_age_s = now - ready.received_at
        newest = self._maker.newest
        if newest is not None and ready.versions is not None:
            self._stats.last_mean_age = float(newest - ready.versions.mean())
            self._stats.last_max_age = int(newest - ready.versions.min())
        return ready.in_form(form)

    def _num_missing(self) -> dict[str, int]:
        """Return how many samples the next batch lacks, and by server how many inserts its next sample lacks."""
        return {"": self._pool_size - self._prefetcher.num_for_batch, **self._feed.inserts_missing()}

    def _look(self, now: float, start: float, log_at: float) -> float:
        """Have servers asked for the cause of a wait, and log the cause at `log_at`; return the next time to log it."""
        self._feed.ask_why(now, start)
        if now < log_at:
            return log_at
        _LOG.warning("table `%s`: no batch for %.0f s. %s", self._table, now - start, self._feed.explain(start))
        return now + background.LOG_EVERY_S

    def _too_late(self, start: float, timeout_s: float) -> ReplayTimeoutError | ServerUnavailableError:
        stats = self.stats()
        advice = f"`Client.reset` table `{self._table}`, or open the dataset again"
        foreign = f"{stats.foreign_items} of another structure were left out: {advice}. " if stats.foreign_items else ""
        unsafe = f"{stats.skipped_samples} were unsafe or damaged, and skipped. " if stats.skipped_samples else ""
        old = f"{stats.too_old_samples} were older than `max_age`. " if stats.too_old_samples else ""
        num_come = self._prefetcher.num_for_batch
        what = (
            f"{num_come} of {self._pool_size} samples have arrived. {foreign}{unsafe}{old}{self._feed.explain(start)}"
            if old or not self._prefetcher.is_making
            else "its samples have arrived, and the batch is being made. Make `transform` faster or raise `timeout_s`."
        )
        return (ServerUnavailableError if self._feed.is_gone else ReplayTimeoutError)(
            f"table `{self._table}`: no batch within {timeout_s:.1f} s, {what}"
        )

    def update_priorities(self, batch_or_keys: Any, priorities: Any) -> None:
        """Set priorities soon; see `View.update_priorities`."""
        self._updates.put(batch_or_keys, priorities)

    def flush_priorities(self, timeout_s: float | None) -> None:
        """Wait until all priorities are set; see `View.flush_priorities`."""
        self._updates.flush(self.timeout_s if timeout_s is None else check_timeout(timeout_s))

    def stats(self) -> DatasetStats:
        """Return the counters so far."""
        stats = DatasetStats(**vars(self._stats))
        self._prefetcher.count(stats)
        stats.priority_updates, stats.failed_priority_updates = self._updates.num_sent, self._updates.num_failed
        stats.gone_priority_updates = self._updates.num_gone
        return stats

    def close(self, timeout_s: float | None) -> None:
        """Stop fetching, and set the remaining priorities; see `View.close`."""
        timeout_s = self.timeout_s if timeout_s is None else check_timeout(timeout_s)
        # The finalizer stays alive until the end of this method, which may be interrupted.
        if not self._finalizer.alive or process_hooks.is_forked():
            return
        began_at = time.monotonic()
        deadline = began_at + timeout_s
        self._prefetcher.stop(_MAX_SILENCE_S, began_at + timeout_s / 2)
        self._prefetcher.join(min(timeout_s, timeout_s / 2 + _STOP_S))
        self._updates.close(max(deadline - time.monotonic(), 0.0))
        self._release()
        self._finalizer.detach()

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to open an equal reader in another process; fetched samples stay in this process."""
        return _reader_of, (self._opening,)

    def __str__(self) -> str:
        stats = self.stats()
        counts = f"{stats.batches} batches, {stats.ready_samples} samples ready"
        return f"{self._table} at {self._source.address}: {counts}"


def _reader_of(opening: Callable[[], Any]) -> TableReader:
    reader: TableReader = opening().reader
    return reader


def _shut_down(parts: list[Any], release: Callable[[], object]) -> None:
    """End the threads of a reader, and release its source. Does nothing in a forked child.

    The garbage collector may call this in any thread, even in a thread that must end here or that holds a needed lock.
    So another thread does the work. Only the main thread waits for it, because it may be about to end the process.
    """
    if process_hooks.is_forked():
        return
    ended = in_background(functools.partial(_end, parts, release))
    if may_be_interrupted() and ended.wait(_END_S):
        ended.result()


def _end(parts: list[Any], release: Callable[[], object]) -> None:
    updates, prefetcher = parts
    if prefetcher is not None:
        prefetcher.stop(discards=True)
        prefetcher.join(_STOP_S)
    if updates is not None:
        updates.close(1.0)
    release()


def _check_tables(tables: Sequence[TableInfo], options: ReadOptions) -> None:
    """Check that the table allows these options."""
    for table in tables if options.single_pass else ():
        if not {table.sampler, table.remover} <= _ORDERED or table.max_times_sampled != 1:
            raise SpecError(
                "`single_pass` needs a table whose sampler and remover are 'fifo', 'max_heap' or 'min_heap', and whose "
                f"`max_times_sampled` is 1: `{table.name}` has {table.sampler!r}, {table.remover!r} and "
                f"{table.max_times_sampled}."
            )
