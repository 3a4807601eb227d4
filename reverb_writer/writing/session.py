"""The session of an observer: its client and insert stream, the check of its tables, and its counters."""

from __future__ import annotations

import collections
import logging
import operator
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import Any, TypeAlias

from reverb_writer.arguments import check_timeout
from reverb_writer.client import due_windows
from reverb_writer.client.client import Client
from reverb_writer.client.item_limits import item_limits
from reverb_writer.client.shared_clients import as_client
from reverb_writer.errors import ClosedError, ReplayTimeoutError, ServerUnavailableError
from reverb_writer.protocol.table_specs import check_signature
from reverb_writer.scalars import Scalars
from reverb_writer.table_info import ServerInfo, check_tables_exist
from reverb_writer.transport.in_flight import InsertStats
from reverb_writer.transport.insert_stream import InsertStream
from reverb_writer.windows import SHORT_EPISODE
from reverb_writer.writing.clock import start_clock
from reverb_writer.writing.item_sizes import EpisodeSizes, ItemSizes
from reverb_writer.writing.sequence_writer import SequenceWriter
from reverb_writer.writing.step_layout import StepLayout
from reverb_writer.writing.stream_options import StreamOptions
from reverb_writer.writing.vector_writer import VectorWriter
from reverb_writer.writing.window_items import check_dtypes
from reverb_writer.writing.window_targets import WindowTarget

__all__ = ["ObserverStats", "WriteSession"]

_LOG = logging.getLogger(__package__)
_LOG_EVERY_S = 10.0

_Writer: TypeAlias = SequenceWriter | VectorWriter


@dataclass(frozen=True)
class Counts:
    """Counters of writers; see `ObserverStats`."""

    steps: int = 0
    episodes: int = 0
    dropped: collections.Counter[str] = field(default_factory=collections.Counter)

    def plus(self, writer: _Writer) -> Counts:
        """Return the sum."""
        dropped = self.dropped + writer.dropped
        return Counts(self.steps + writer.total_steps, self.episodes + writer.num_episodes, dropped)


@dataclass(frozen=True)
class ObserverStats(Scalars):
    """What an observer has done so far; cumulative but for the pending ones.

    Attributes:
        steps: steps taken, boundary steps included, padding not.
        episodes: episodes ended.
        items: windows completed, counted once for each table.
        acknowledged_items: of them, those that the server has confirmed.
        pending_items: of them, those that it has not, yet.
        pending_bytes: what they occupy here.
        dropped_items: of them, those given up under `on_block="drop_oldest"` or at a close that ran out of time.
        dropped_steps: steps that are in no window, by reason; with several kinds of windows, summed over the kinds.
            Steps appended = steps in a window + steps dropped, for each kind, once its episode has ended.
        blocked_s: seconds that calls have waited.
        reconnects: connections made again after a loss.
        server_restarts: of them, those that found the server restarted.
    """

    steps: int
    episodes: int
    items: int
    acknowledged_items: int
    pending_items: int
    pending_bytes: int
    dropped_items: int
    dropped_steps: dict[str, int]
    blocked_s: float
    reconnects: int
    server_restarts: int


class WriteSession:
    """The part of an observer that does not depend on how steps are grouped into episodes.

    Not thread-safe by itself: an observer is called from one thread at a time. `stats()` may be called from any.
    """

    def __init__(self, client: Any, targets: Sequence[WindowTarget], options: StreamOptions) -> None:
        """Find the tables and open the stream.

        Args:
            client: a `Client`, an address or a `reverb.Client`.
            targets: which windows to write, and where.
            options: time-outs and bounds.

        Raises:
            StructureError: a table is not there; names those that are.
            ServerUnavailableError: no server answers within the time-out.
        """
        self.given_client = client
        self.targets = tuple(targets)
        self.options = options
        self._writers: list[_Writer] = []
        self._past = Counts(), InsertStats()  # by writers and streams that are closed
        self._logged: set[str] = set()
        self._stream: InsertStream | None = None
        self.open()

    @property
    def stream(self) -> InsertStream:
        """The open stream.

        Raises:
            ClosedError: the observer is closed.
        """
        if self._stream is None:
            raise ClosedError("the observer is closed. Call `open()` to write again.")
        return self._stream

    @property
    def address(self) -> str:
        """The servers that the session writes to, or wrote to last."""
        return self._client.address

    @property
    def is_forked(self) -> bool:
        """Whether this process is a forked child of the one that opened the stream."""
        return self._stream is not None and self._stream.channel.is_forked

    @property
    def num_steps(self) -> int:
        """Steps counts."""
        return self._counts().steps

    def open(self) -> bool:
        """Find the tables and open the stream, if it is not; return whether it was not."""
        if self._stream is not None:
            return False
        options = self.options
        client, owned = as_client(self.given_client, options.timeout_s)
        self.timeout_s = client.timeout_s if options.timeout_s is None else options.timeout_s
        try:
            info = _find(client, self.timeout_s if options.connect_timeout_s is None else options.connect_timeout_s)
            names = [table for target in self.targets for table in target.tables]
            check_tables_exist(names, info, client.address)
            stream = client.open_stream(
                max_in_flight_items=options.max_in_flight_items,
                max_in_flight_bytes=options.max_in_flight_bytes,
                on_block=options.on_block,
            )
        except BaseException:
            if owned:
                client.close()
            raise
        self._signatures = {name: info.tables[name].signature for name in names}
        self._limits = item_limits(info, names)
        self._client, self._owns_client = client, owned
        # A program that forgets close() must not hang, neither at garbage collection nor when the interpreter ends.
        self._finalizer = weakref.finalize(self, _shut_down, self._writers, stream, client if owned else None)
        reference = weakref.ref(self)

        def send() -> None:
            session = reference()
            if session is not None:
                session.send()

        stream.write(None)  # starts its thread: from here on the finalizer ends it, whatever interrupts this
        start_clock(stream, options.max_delay_s / 2, send)
        self._stream = stream
        due_windows.add(self)
        return True

    @property
    def is_blocked(self) -> bool:
        """Whether a step must wait or raise: no room in flight, closed, forked, or refused by the server."""
        return self._stream is None or self._stream.blocked

    def wait_for_room(self) -> None:
        """Return when a step may be written; costs little while there is room. Before it waits, it sends."""
        if self.is_blocked:
            self.stream.check()
            self.send()
            self.stream.wait_for_room(self.timeout_s, extend=True)

    def register(self, layout: StepLayout) -> None:
        """Check the columns against what Reverb and the tables accept, and store their spec beside the tables.

        Raises:
            StructureError: names the leaf, what it should be, and the table if one has another spec already, or takes
                no items of that size.
        """
        check_dtypes(layout.dtypes, layout.paths)
        for table, signature in self._signatures.items():
            if signature is not None:
                check_signature(table, signature, layout.paths, layout.dtypes, layout.shapes)
        self._sizes = ItemSizes(layout, self.targets, self._limits)
        self._client.store_spec(list(self._signatures), layout.spec, self.timeout_s)

    def watch_sizes(self) -> EpisodeSizes | None:
        """Return what counts the bytes of a new writer's items; None if that is not needed. Call `register` first."""
        return self._sizes.watch()

    def add_writer(self, writer: _Writer) -> None:
        """Count what this writer does, and send its windows when they are due."""
        self._writers.append(writer)

    def log_dropped(self, dropped: Mapping[str, int]) -> None:
        """Log why steps are in no window, once for each reason."""
        for reason in dropped.keys() - self._logged:
            self._logged.add(reason)
            if reason == SHORT_EPISODE:
                lengths = {target.spec.sequence_length for target in self.targets}
                text = (
                    "An episode of %d steps is shorter than a window (`sequence_length` %s): nothing of it is written. "
                    "Make windows shorter, or pad (`end_of_episode`). More of this is counted in stats().dropped_steps."
                )
                _LOG.warning(text, dropped[reason], ", ".join(map(str, sorted(filter(None, lengths)))))
            else:
                text = "%d steps are in no window (%s). More of this is counted in stats().dropped_steps."
                _LOG.info(text, dropped[reason], reason)

    def send(self) -> None:
        """Send the windows that are complete."""
        for writer in list(self._writers):
            writer.send()

    def send_due(self) -> None:
        """Send the windows that are complete, unless that cannot be; see `due_windows`."""
        if not (self.is_blocked or self.is_forked):
            self.send()

    def flush(self, timeout_s: float | None = None) -> None:
        """Return when all complete windows are confirmed by the server; see `Observer.flush`."""
        stream = self.stream
        stream.check()
        self.send()
        stream.flush(self.timeout_s if timeout_s is None else check_timeout(timeout_s), extend=timeout_s is None)

    def close(self, timeout_s: float | None = None) -> None:
        """Deliver what is pending, end the stream, and close the client if it is the session's own. Idempotent.

        Raises:
            ReplayTimeoutError: items were left; says how many and why. The session is closed all the same.
        """
        timeout_s = self.timeout_s if timeout_s is None else check_timeout(timeout_s)
        stream = self._stream
        if stream is None:
            return
        try:
            if not stream.channel.is_forked:
                self.send()
                stream.close(timeout_s)
        finally:
            self._end(stream)

    def _end(self, stream: InsertStream) -> None:
        """Give up what is left, and take the counters over."""
        is_forked = stream.channel.is_forked
        if not is_forked:
            stream.abandon(sum(writer.num_unsent_items for writer in self._writers))
        counts, inserted = self._counts(), _add(self._past[1], stream.stats())
        self._past, self._writers, self._stream = (counts, inserted), [], None
        self._finalizer.detach()
        if self._owns_client:
            self._client.close()
        if counts.dropped and not is_forked:  # they are the parent's
            reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(counts.dropped.items()))
            level = logging.INFO if inserted.items else logging.WARNING
            _LOG.log(level, "Observer closed: of %d steps some are in no window (%s).", counts.steps, reasons)

    def _counts(self) -> Counts:
        counts = self._past[0]
        for writer in list(self._writers):
            counts = counts.plus(writer)
        return counts

    def stats(self) -> ObserverStats:
        """Return the counters so far."""
        stream = self._stream
        now = self._past[1] if stream is None else _add(self._past[1], stream.stats())
        # In a forked child a writer's lock may be held for ever, by a thread that is not there.
        num_unsent_items = 0 if self.is_forked else sum(writer.num_unsent_items for writer in list(self._writers))
        now = replace(now, items=now.items + num_unsent_items, pending_items=now.pending_items + num_unsent_items)
        counts = self._counts()
        return ObserverStats(
            steps=counts.steps, episodes=counts.episodes, dropped_steps=dict(counts.dropped), **asdict(now)
        )


def _find(client: Client, timeout_s: float) -> ServerInfo:
    """Return the server's tables; say in the log every ten seconds that it is waited for.

    Raises:
        ReplayTimeoutError, ServerUnavailableError: no answer in time.
    """
    began_at = time.monotonic()
    while (left_s := began_at + timeout_s - time.monotonic()) > _LOG_EVERY_S:
        asked_at = time.monotonic()
        try:
            return client.request_info(_LOG_EVERY_S)
        except (ReplayTimeoutError, ServerUnavailableError) as error:
            if time.monotonic() - asked_at < _LOG_EVERY_S / 2:  # no time-out: waiting does not help
                raise
            _LOG.warning("An observer waits for its server, for %.0f s: %s", asked_at + _LOG_EVERY_S - began_at, error)
    return client.request_info(max(left_s, 0.001))


def _shut_down(writers: Sequence[_Writer], stream: InsertStream, client: Client | None) -> None:
    if stream.channel.is_forked:  # a thread of the parent may hold any lock, for ever
        return
    stream.abandon(sum(writer.num_unsent_items for writer in writers))
    if client is not None:
        client.close()


def _add(one: InsertStats, other: InsertStats) -> InsertStats:
    return InsertStats(*map(operator.add, astuple(one), astuple(other)))
