"""Fetch samples of one table on one server ahead of their use, in a thread, bounded.

    take() frees room -> request -> server -> stream -> assembler -> batches ready -> take()

At most `max_in_flight_batches` are on their way, being put together, or ready. A lost connection is made again; what
was asked for and did not come is asked for again. Batches come in the order in which the server chose their samples.
A message that cannot be read ends a stream. The reader gets an error for it, and once it has, another stream begins.

From a table that gives items away (`max_times_sampled`) only what is there is asked for: a request that waits at the
server when the learner goes takes an item out for nobody.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from reverb_writer.decoding.batch_assembler import BatchAssembler
from reverb_writer.decoding.samples import Column, SampleInfos
from reverb_writer.errors import (
    ClosedError,
    FormatError,
    ReplayTimeoutError,
    ReverbWriterError,
    ServerUnavailableError,
    UnsafeDataError,
)
from reverb_writer.flags import Flag
from reverb_writer.reading.fetch_options import FetchOptions
from reverb_writer.reading.stats import FetchStats
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.sample_stream import SampleStream
from reverb_writer.transport.server_info import ServerInfo, request_server_info, try_server_info
from reverb_writer.transport.server_probe import Outage, ServerProbe

__all__ = ["Fetched", "ThreadFetcher"]

_LOG = logging.getLogger("reverb_writer")

_PROBE_TIMEOUT_S = 2.0
_RETRY_S = 0.1
_LOOK_TIMEOUT_S = 5.0
_LOOK_S = (0.002, 0.05)  # how long to wait before looking again whether there is something, at first and at most


@dataclass(frozen=True)
class Fetched:
    """Samples that are ready.

    Attributes:
        columns: of them.
        infos: of them.
        oldest_at: `time.monotonic()` when the first of them came.
    """

    columns: Sequence[Column]
    infos: SampleInfos
    oldest_at: float


class ThreadFetcher:
    """The samples of one table on one server, ahead of their use.

    Attributes:
        gone_since: `time.monotonic()` when the connection was lost; None while there is one.
    """

    def __init__(
        self,
        channel: Channel,
        info: ServerInfo,
        plan: FetchOptions,
        *,
        wake: Callable[[], None],
    ) -> None:
        """Start to fetch.

        Args:
            channel: the connection; not closed by this.
            info: the server's tables at the beginning.
            plan: what is fetched.
            wake: called whenever something is ready, from the thread.
        """
        self.gone_since: float | None = None
        self.address = channel.address
        self._channel, self._table, self._info = channel, plan.table, info
        self._batch_size, self._skip_unsafe, self._wake = plan.batch_size, plan.skip_unsafe, wake
        self._assembler = BatchAssembler(
            plan.max_cache_bytes,
            plan.max_sample_bytes,
            batch_size=plan.batch_size,
            # The reader holds one, and all those ahead have arrays, too.
            num_buffers=plan.max_in_flight_batches + 1 if plan.reuses_buffers else 0,
        )
        self._gives_away = info.tables[plan.table].max_times_sampled > 0
        self._assembling = threading.Lock()  # guards the assembler and `_oldest_at`; taken before the other
        self._lock = threading.Lock()  # guards all below; never held while waiting for the server, or decoding
        self._max_samples = plan.batch_size * plan.max_in_flight_batches  # asked for and not taken, at most
        self._num_awaited = 0  # samples asked for that the assembler has not got
        self._single_pass = plan.single_pass
        self._remaining = plan.max_samples  # samples to ask for until the end; None if there is none
        if plan.single_pass:
            size = info.tables[plan.table].current_size
            self._remaining = size if plan.max_samples is None else min(size, plan.max_samples)
        self._stream: SampleStream | None = None
        self._look: Any = None  # the latest question to the server
        self._past_bytes = 0
        self._oldest_at = 0.0  # when the first sample of the batch that is put together came
        self._heard_at = time.monotonic()
        self._ready: collections.deque[Fetched | ReverbWriterError] = collections.deque()
        self._stats = FetchStats()
        self._changed = Flag()  # there is more room, or the end has come
        self._closed = Flag()
        self._ended = False
        self._outage: Outage | None = None  # while there is no connection
        self._thread = threading.Thread(target=self._run, name="reverb-writer-prefetch", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------- for the reader

    def take(self, *, partial: bool = False) -> Fetched | None:
        """Return the next batch if it is ready; with `partial`, else what there is of one.

        Raises:
            ReverbWriterError: instead of a sample that could not be decoded, or because the table is gone.
        """
        if partial:
            with self._assembling:
                if not self._ready and self._assembler.num_samples:
                    self._finish_batch()
        with self._lock:
            self._fill_room()  # once more, if the last call was interrupted
            if not self._ready:
                return None
            item = self._ready.popleft()
            self._fill_room()
        self._changed.set()
        if isinstance(item, ReverbWriterError):
            raise item
        return item

    @property
    def is_forked(self) -> bool:
        """Whether this process is a forked child of the one that fetches."""
        return self._channel.is_forked

    def check_usable(self) -> None:
        """Raise ClosedError in a forked child, in which no thread fetches."""
        if self._channel.is_forked:
            self._channel.check_usable()

    @property
    def has_ended(self) -> bool:
        """Whether nothing will come any more."""
        return self._ended

    def probe(self, timeout_s: float) -> ServerProbe:
        """Return what asks the server, during a wait of so many seconds, what keeps samples from coming."""
        return ServerProbe(self._channel, timeout_s)

    @property
    def is_silent(self) -> bool:
        """Whether the connection is lost and the server holds new ones without an answer."""
        outage = self._outage
        return outage is not None and outage.is_silence

    def why_waiting(self, probe: ServerProbe | None) -> str:
        """Say what keeps samples from coming, as far as an probe tells; None if there was no time for one."""
        outage, since = self._outage, self.gone_since
        if outage is not None and since is not None:
            return outage.describe(self._channel, time.monotonic() - since)
        return (probe or self.probe(0.0)).why_samples_wait(self._table, self._info)

    def stats(self) -> FetchStats:
        """Return the counters so far; in a forked child, those that need no lock."""
        if self.is_forked:
            return FetchStats(**vars(self._stats))
        with self._lock:
            stats = FetchStats(**vars(self._stats))
            stream = self._stream
            stats.in_flight_samples = stream.num_in_flight if stream else 0
            stats.ready_samples = self._assembler.num_samples + self._num_ready()[0]
            stats.received_bytes = self._past_bytes + (stream.num_bytes if stream else 0)
            stats.cache_bytes = self._assembler.cache_bytes
            stats.decoded_chunks = self._assembler.num_decoded_chunks
        return stats

    def drain(self, drain_s: float) -> None:
        """Ask for no more. From a table that gives items away, read what was asked for.

        Args:
            drain_s: until nothing has come for so long, seconds. Does not wait if there is nothing to wait for.
        """
        with self._lock:
            self._remaining = 0
        self._changed.set()
        while self._gives_away and self._stream is not None and self._stream.num_in_flight:
            silence = time.monotonic() - self._heard_at
            if silence >= drain_s or self._closed.wait(min(drain_s - silence, drain_s) + 0.001):
                break

    def stop_unless_draining(self) -> None:
        """Ask for no more, and `stop` if nothing is on its way that `drain` would read."""
        self.drain(0.0)
        stream = self._stream
        if stream is None or not stream.num_in_flight or not self._gives_away:
            self.stop()

    def stop(self) -> None:
        """Have the thread end, without waiting for it; what has come can still be taken. Idempotent."""
        self._closed.set()
        self._changed.set()
        stream, look = self._stream, self._look
        if stream is not None:
            stream.cancel()
        if look is not None:
            look.cancel()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end after `stop`; after `timeout_s` seconds it counts as ended, and ends by itself."""
        self._thread.join(timeout_s)
        self._ended = True

    # ----------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                try:
                    self._fetch()
                except ServerUnavailableError as error:
                    if not self._closed.is_set():
                        self._find_server(error)
                except (FormatError, UnsafeDataError) as error:
                    self._tell(error)
                else:
                    return
        except ClosedError:
            pass
        except ReverbWriterError as error:
            self._ready.append(error)
        except Exception:
            _LOG.exception("The thread that fetches samples of `%s` has ended.", self._table)
            raise
        finally:
            self._ended = True  # before the reader wakes: the thread is alive for a moment more
            self._wake()

    def _fetch(self) -> None:
        """Read one connection until it is lost, or all is there that was to be fetched."""
        stream = SampleStream(self._channel, self._table)
        with self._lock:
            self._stream = stream
            self._fill_room()
        try:
            while self._remaining != 0 or stream.num_in_flight:
                if self._gives_away and not self._request_what_is_there(stream):
                    continue
                samples = stream.read()
                self._heard_at = time.monotonic()
                self._stats.received_samples += len(samples)
                while samples:
                    samples = self._add(samples)
        finally:
            stream.cancel()
            with self._lock:
                self._stream = None
                self._past_bytes += stream.num_bytes
                self._stats.lost_samples += stream.num_in_flight
                self._stats.unasked_samples += stream.num_unasked
                self._num_awaited -= stream.num_in_flight
                if self._remaining is not None and not self._closed.is_set():
                    self._remaining += stream.num_in_flight

    def _request_what_is_there(self, stream: SampleStream) -> bool:
        """Ask for what there is room for and the table has; return whether anything is under way."""
        pause_s, longest_s = _LOOK_S
        while self._remaining != 0 and not self._closed.is_set():
            self._changed.clear()
            if self._room() > 0:
                info = try_server_info(self._channel, _LOOK_TIMEOUT_S, begun=self._looks)
                table = info.tables.get(self._table) if info else None
                num_ready = table.num_ready() if table else 0
                with self._lock:
                    if table and self._single_pass and not stream.num_in_flight and self._remaining:
                        self._remaining = min(self._remaining, table.current_size)  # some may be lost, or others' now
                    self._request(min(self._room(), num_ready - stream.num_in_flight))
            if stream.num_in_flight:
                break
            self._changed.wait(pause_s if self._room() > 0 else None)
            pause_s = min(2 * pause_s, longest_s)
        return stream.num_in_flight > 0

    def _looks(self, call: Any) -> None:
        """Remember a question that is under way, for `stop` to cancel."""
        self._look = call
        if self._closed.is_set():
            call.cancel()

    def _request(self, num_samples: int) -> None:
        """Ask for samples, unless the limit says that there are no more."""
        if self._remaining is not None:
            num_samples = min(num_samples, self._remaining)
        if self._stream is not None and num_samples > 0:
            stream, remaining = self._stream, None if self._remaining is None else self._remaining - num_samples
            asked, awaited = stream.num_asked + num_samples, self._num_awaited + num_samples
            # One statement without a call: an interrupt comes before it or after it.
            stream.num_asked, self._num_awaited, self._remaining = asked, awaited, remaining
        if self._stream is not None:
            self._stream.send()

    def _fill_room(self) -> None:
        """Ask for what there is room for, if the table gives nothing away."""
        if not self._gives_away:
            self._request(self._room())

    def _room(self) -> int:
        """Return how many samples may still be asked for. An error has a place, too, until it is told."""
        return self._max_samples - self._num_awaited - self._assembler.num_samples - sum(self._num_ready())

    def _num_ready(self) -> tuple[int, int]:
        """Return how many samples are in batches that are ready, and how many errors there are to be told.

        Counted, for an interrupt of the reader may come between a batch's leaving and any note of it.
        """
        ready = self._ready.copy()
        sizes = [len(item.infos.keys) for item in ready if isinstance(item, Fetched)]
        return sum(sizes), len(ready) - len(sizes)

    def _add(self, samples: list[Any]) -> list[Any]:
        """Put samples to the others, as many as a batch lacks; return the rest."""
        with self._assembling:
            if not self._assembler.num_samples:
                self._oldest_at = time.monotonic()
            missing = self._batch_size - self._assembler.num_samples
            errors = self._assembler.add(samples[:missing])
            told = [error for error in errors if not (self._skip_unsafe and isinstance(error, UnsafeDataError))]
            with self._lock:
                self._num_awaited -= len(samples[:missing])
                self._ready.extend(told)
                self._stats.skipped_samples += len(errors) - len(told)
                self._fill_room()
            if self._assembler.num_samples == self._batch_size:
                self._finish_batch()
                self._wake()
        if told:
            self._wake()
        return samples[missing:]

    def _finish_batch(self) -> None:
        with self._lock:
            self._ready.append(Fetched(*self._assembler.take(), self._oldest_at))

    def _tell(self, error: ReverbWriterError) -> None:
        """Have the reader told of what ended a stream; return when it is, so that damage without end costs nothing."""
        self._ready.append(error)
        self._wake()
        while True:
            self._changed.clear()
            with self._lock:
                is_told = all(item is not error for item in self._ready)
            if is_told or self._closed.is_set():
                break
            self._changed.wait()
        self._closed.wait(_RETRY_S)

    def _find_server(self, why: ServerUnavailableError) -> None:
        """Wait until the server is there again."""
        self._outage = Outage(why, str(why))
        self.gone_since = time.monotonic()
        _LOG.warning("Samples of `%s`: %s Looking for it.", self._table, why)
        while not self._closed.wait(_RETRY_S):
            try:
                info = request_server_info(self._channel, _PROBE_TIMEOUT_S)
            except (ReplayTimeoutError, ServerUnavailableError, FormatError) as error:
                self._outage = Outage(error, str(error))
                continue
            self._stats.reconnects += 1
            self._stats.server_restarts += info.state_id != self._info.state_id
            self._info = info
            self.gone_since = self._outage = None
            return
