"""The samples of one of several shards, as they come: a thread, and what the shard reports about its table.

SampleFetcher -> waiting samples, each with the shard's size and mass -> take()
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable
from typing import Any

from reverb_writer.background import Flag, start_thread
from reverb_writer.client.server_calls import Server
from reverb_writer.client.weights import mean_weight
from reverb_writer.errors import (
    ClosedError,
    ReverbWriterError,
    ServerUnavailableError,
    StructureError,
)
from reverb_writer.protocol import messages
from reverb_writer.reading.server_link import PROBE_TIMEOUT_S, RETRY_S, ServerLink, fetch_until_closed
from reverb_writer.tables.table_info import ServerInfo, TableInfo
from reverb_writer.transport.pending_call import PendingCall
from reverb_writer.transport.sample_fetcher import SampleFetcher
from reverb_writer.transport.server_info import parse_server_info


class ShardStream:
    """The samples of a table on one shard. `take` and what follows it are for one thread.

    Attributes:
        server: the shard's connection.
        link: whether it is there.
        fetcher: requests the samples.
        size: items of the shard's table, as it has told last; 0 before it has told anything.
        mean: their mean weight, see `mean_weight`; None until a sample tells it.
        told_at: `time.monotonic()` when a sample told the weight last.
        num_lost: samples that were in flight when a connection was lost, or a message could not be read.
        num_dropped: samples that were dropped unread.
        has_ended: whether no more samples will arrive.
    """

    def __init__(
        self,
        server: Server,
        info: ServerInfo | None,
        table: TableInfo,
        max_samples: int,
        changed: Callable[[], None],
        on_loss: Callable[[], None],
    ) -> None:
        """Prepare; `start` begins. `info` is None if the server has not answered yet.

        At most `max_samples` are in flight or wait. The thread calls `changed` when there is something new, and
        `on_loss` when the connection is lost.
        """
        self.server = server
        self.link = ServerLink(server.channel, table.name, info)
        self.size, self.mean = 0, None if table.sampler_exponent is not None else 1.0
        self.told_at = time.monotonic()
        self.num_lost = self.num_dropped = 0
        self.has_ended = self._is_late = False
        self._exponent, self._table = table.sampler_exponent, table.name
        self._changed, self._on_loss = changed, on_loss
        self._table_is_ready = True
        self._waiting: collections.deque[Any] = collections.deque()
        self._room, self._closed = Flag(), Flag()
        self._error: Exception | None = None
        self._question: PendingCall | None = None
        self._asked_at = 0.0
        self._unanswered_since: float | None = None
        self.fetcher = SampleFetcher(
            server.channel,
            table.name,
            removes_items=table.max_times_sampled > 0,
            max_samples=max_samples,
            num_held=lambda: len(self._waiting),
            limit=None,
            pause=self._wait_for_room,
        )
        if info is not None:
            self._note(info)

    def start(self) -> None:
        """Start to fetch."""
        start_thread(self._run, "reverb-writer-shard")

    # ------------------------------------------------------------------------------------- for the sampler

    @property
    def num_waiting(self) -> int:
        """Samples that have come and were not taken."""
        return len(self._waiting)

    @property
    def num_items(self) -> int:
        """Items of the shard's table, those included that are removed from it because they wait here."""
        return self.size + (self.num_waiting if self.fetcher.removes_items else 0)

    @property
    def is_lost(self) -> bool:
        """Whether there is no connection to the shard, or its target says that it is lost."""
        return self.link.disconnected_at is not None or self.server.shard.state == "lost" or self.has_ended

    @property
    def is_blocked(self) -> bool:
        """Whether the shard's table hands out nothing, as it has told last: its rate limiter waits for inserts."""
        return not self._table_is_ready

    @property
    def is_late(self) -> bool:
        """Whether the shard is left out until a sample comes."""
        self._is_late = self._is_late and not self._waiting
        return self._is_late

    @is_late.setter
    def is_late(self, is_late: bool) -> None:
        self._is_late = is_late

    def silence_s(self, now: float) -> float:
        """Return for how many seconds a question has not been answered, and no sample has come."""
        since = self._unanswered_since
        return 0.0 if since is None else now - since

    def take(self, num_samples: int) -> list[Any]:
        """Return the oldest samples that wait, `num_samples` at most."""
        taken: list[Any] = []
        waiting = self._waiting
        with contextlib.suppress(IndexError):  # the thread drops them when the connection is lost
            for _ in range(min(num_samples, len(waiting))):
                taken.append(waiting.popleft())  # noqa: PERF401  # those that were taken before it dropped the rest
        return taken

    def allow(self, max_samples: int) -> None:
        """Set how many samples may be in flight or wait."""
        self.fetcher.max_samples = max_samples

    def resume(self) -> None:
        """Have more samples requested, as far as there is room."""
        self.fetcher.fill()
        self._room.set()

    def drop(self) -> None:
        """Drop the oldest sample that waits, if one does."""
        self.num_dropped += len(self.take(1))

    def take_error(self) -> Exception | None:
        """Return what ended the stream, or kept a message from being read, once."""
        error, self._error = self._error, None
        return error

    def ask(self, now: float, every_s: float) -> None:
        """Ask the shard for the state of its table, if that was `every_s` seconds ago; read the answer. Never waits."""
        question = self._question
        if question is not None and question.done():
            self._question = None
            with contextlib.suppress(ReverbWriterError):  # the stream will find out, or `silence_s` tells
                self._note(parse_server_info(question.result(), now))
        if self._question is None and now - self._asked_at >= every_s and not self.is_lost:
            self._asked_at = now
            if self._unanswered_since is None:
                self._unanswered_since = now
            with contextlib.suppress(ClosedError):
                self._question = self.server.channel.start(messages.SERVER_INFO, b"", PROBE_TIMEOUT_S)

    def stop(self) -> None:
        """Have the thread end, without waiting for it. Idempotent."""
        self._closed.set()
        self.fetcher.stop()
        self._room.set()
        question = self._question
        if question is not None:
            question.cancel()

    # ----------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            if self.link.info is None:
                self._reconnect(ServerUnavailableError(f"the server at {self.server.address} has not answered yet."))
            fetch_until_closed(
                self._fetch,
                reconnect=self._reconnect,
                report=self._report,
                closed=self._closed,
                losses=(ServerUnavailableError, StructureError),
            )
        except ClosedError:
            pass
        except Exception as error:  # noqa: BLE001  # the thread that assembles raises it
            self._error = error
        finally:
            self.has_ended = True
            self._changed()

    def _fetch(self) -> None:
        try:
            while not self.fetcher.is_done:
                if self.fetcher.ask():
                    self._read()
        finally:
            self.num_lost += self.fetcher.end()

    def _read(self) -> None:
        samples = self.fetcher.read()
        if samples:
            newest = samples[-1].info
            size = newest.table_size
            self.mean = mean_weight(self._exponent, newest.item.priority, newest.probability, size)
            self.size, self._table_is_ready = size, True
            self.told_at, self._unanswered_since = time.monotonic(), None
            self._waiting.extend(samples)
            self.fetcher.accept(len(samples))
            self._changed()

    def _note(self, info: ServerInfo) -> None:
        table = info.tables.get(self._table)
        if table is not None:
            self.size, self._table_is_ready = table.current_size, table.num_ready() > 0
        self._unanswered_since = None

    def _reconnect(self, why: ReverbWriterError) -> None:
        before = self.link.info
        self._changed()  # it is left out now
        self._on_loss()
        self.link.reconnect(why, self._closed, needs_table=True)
        info = self.link.info
        if info is None or self._closed.is_set():
            return
        if before is None or info.state_id != before.state_id:  # it may have been started without its items
            self.mean = None if self._exponent is not None else 1.0
        if not self.fetcher.removes_items:
            self.num_dropped += len(self._waiting)
            self._waiting.clear()
        self._note(info)
        self._changed()

    def _report(self, error: ReverbWriterError) -> None:
        """Have the reader raise it; return when it has, so that endless damage costs nothing."""
        self._error = error
        self._changed()
        while self._error is not None and not self._closed.wait(RETRY_S):
            pass

    def _wait_for_room(self, pause_s: float | None) -> None:
        self._room.wait(pause_s)
        self._room.clear()
