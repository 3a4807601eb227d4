"""The session of an observer: its client and insert stream, the check of its tables, and its counters."""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import math
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Generic

from reverb_writer.arguments import check_timeout
from reverb_writer.client import due_windows
from reverb_writer.client.client import Client
from reverb_writer.client.item_limits import item_limits
from reverb_writer.client.server_calls import Server
from reverb_writer.client.shared_clients import as_client
from reverb_writer.client.targets import default_actor_id
from reverb_writer.deadline import Deadline
from reverb_writer.errors import ClosedError, ReplayTimeoutError, ServerUnavailableError
from reverb_writer.protocol.table_specs import check_signature
from reverb_writer.table_info import check_tables_exist
from reverb_writer.transport.in_flight import InsertStats
from reverb_writer.transport.insert_stream import InsertStream
from reverb_writer.windows import SHORT_EPISODE
from reverb_writer.writing.actor_shard import ActorShard, ShardChangedError, ShardFound, log_change
from reverb_writer.writing.clock import start_clock
from reverb_writer.writing.item_sizes import EpisodeSizes, ItemSizes
from reverb_writer.writing.observer_stats import AnyWriter, Counts, Moves, ObserverStats, Writer, add
from reverb_writer.writing.step_layout import StepLayout
from reverb_writer.writing.stored_spec import StoredSpec
from reverb_writer.writing.stream_options import StreamOptions
from reverb_writer.writing.window_items import check_dtypes
from reverb_writer.writing.window_targets import WindowTarget

_LOG = logging.getLogger(__package__)
_LEAVE_S = 1.0  # for what is in flight when an actor goes to a shard that it prefers
LOST_SHARD = "lost_shard"


@dataclass
class _Change:
    """A change of the shard, from the decision until it is complete: an interrupt may come in between."""

    found: ShardFound
    after: InsertStream | None = None  # the stream to the other shard, once it runs


class WriteSession(Generic[AnyWriter]):
    """The part of an observer that does not depend on how steps are grouped into episodes.

    Attributes:
        writer: what the observer appends steps to; None if it must make one for the next step.

    Not thread-safe by itself: an observer is called from one thread at a time. `stats()` may be called from any.
    """

    def __init__(self, client: Any, targets: Sequence[WindowTarget], options: StreamOptions) -> None:
        """Find the tables that the targets name, and open the stream."""
        self.given_client = client
        self.targets = tuple(targets)
        self.options = options
        self.writer: AnyWriter | None = None
        self._writers: list[AnyWriter] = []  # all that write to the stream
        self._streams: list[InsertStream] = []  # all that may run
        self._change: _Change | None = None
        self._past = Counts(), InsertStats()  # by writers and streams that are closed
        self._moves = Moves()
        self._actor_id = options.actor_id or default_actor_id()
        self._logged: set[str] = set()
        self._stream: InsertStream | None = None
        self.open()

    @property
    def stream(self) -> InsertStream:
        """The open stream. Completes a change of the shard that was interrupted.

        Raises:
            ClosedError: the observer is closed.
        """
        self._finish_change()
        if self._stream is None:
            raise ClosedError("the observer is closed. Call `open()` to write again.")
        return self._stream

    @property
    def address(self) -> str:
        """The server that the session writes to, or wrote to last."""
        return self._actor.current.address

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
            self._finish_change()
            return False
        options = self.options
        client, owned = as_client(self.given_client, options.timeout_s)
        self.timeout_s = client.timeout_s if options.timeout_s is None else options.timeout_s
        names = [table for target in self.targets for table in target.tables]
        try:
            actor = ActorShard(client, self._actor_id, options.patience_s, names)
            info = actor.connect(self.timeout_s if options.connect_timeout_s is None else options.connect_timeout_s)
            check_tables_exist(names, info, actor.current.address)
            self._stored_spec = StoredSpec(client, names)
            self._signatures = {name: info.tables[name].signature for name in names}
            self._limits = item_limits(info, names)
            self._client, self._owns_client, self._actor = client, owned, actor
            # A program that forgets close() must not hang, neither at garbage collection nor when the interpreter ends.
            self._finalizer = weakref.finalize(
                self, _shut_down, self._writers, self._streams, client if owned else None
            )
            self._stream = self._start_stream(actor.current)
        except BaseException:
            if owned:
                client.close()
            raise
        due_windows.add(self)
        return True

    def _start_stream(self, shard: Server) -> InsertStream:
        stream = InsertStream(
            shard.channel,
            max_in_flight_items=self.options.max_in_flight_items,
            max_in_flight_bytes=self.options.max_in_flight_bytes,
            on_block=self.options.on_block,
            before_sending=functools.partial(self._stored_spec.restore, shard),
        )
        self._streams.append(stream)
        reference = weakref.ref(self)

        def send() -> None:
            session = reference()
            if session is not None:
                session.send()

        stream.write(None)  # starts its thread: from here on the finalizer ends it, whatever interrupts this
        start_clock(stream, self.options.max_delay_s / 2, send)
        return stream

    @property
    def is_blocked(self) -> bool:
        """Whether a step must wait or raise: no room in flight, closed, forked, or refused by the server."""
        return self._stream is None or self._change is not None or self._stream.blocked

    def wait_for_room(self, *, ends_episode: bool = False) -> None:
        """Return when a step may be written; costs little while there is room. Before it waits, it sends.

        Args:
            ends_episode: whether the episode ends with what is to be written: then no room is needed in a lost shard.

        Raises:
            ShardChangedError: between episodes, the session has gone to another shard: its writers are of no use.
        """
        if not self.is_blocked:
            return
        stream = self.stream
        stream.check()
        if not stream.blocked:
            return
        self.send()
        is_between = self._is_between_episodes(any)
        if not (self._actor.has_choice and (is_between or ends_episode)):
            stream.wait_for_room(self.timeout_s, extend=True)
            return
        found: ShardFound | None = None

        def may_leave() -> bool:
            nonlocal found
            if not self._actor.is_lost(stream.stalled_s):
                return False
            found = self._actor.look(math.inf) if is_between else None
            return found is not None or not is_between

        stream.wait_for_room(self.timeout_s, extend=True, unless=may_leave)
        if found is not None:
            had_writer = self.writer is not None
            self._leave_for(found)
            if had_writer:
                raise ShardChangedError

    def change_shard(self, *, is_lost: bool = False) -> bool:
        """Between episodes, go to another shard if there is reason to; return whether the session did.

        Its writers are of no use then. Episodes of other environments that are under way are given up, but only if the
        shard is lost; `is_lost` says that it is.
        """
        stream = self._stream
        if stream is None or not self._actor.has_choice or self.is_forked:
            return False
        found = self._actor.look(math.inf if is_lost else stream.stalled_s)
        if found is None or not (found.is_rescue or (self._is_between_episodes(all) and self._is_delivered(stream))):
            return False
        self._leave_for(found)
        return True

    def _leave_for(self, found: ShardFound) -> None:
        """Go to another shard. If this is interrupted, `_finish_change` goes on with it."""
        self._change, self.writer = _Change(found), None
        self._finish_change()

    def _finish_change(self) -> None:
        """Complete a change of the shard, if there is one. All but the last assignment may be done any number of times.

        The new stream runs before anything is taken from the old one, whose counters stay right meanwhile.
        """
        change, stream = self._change, self._stream
        if change is None or stream is None or self.is_forked:
            return
        found = change.found
        if change.after is None:
            for writer in self._writers:
                self.log_dropped(writer.leave())
            self.send()
            if not found.is_rescue:
                self._is_delivered(stream)
            change.after = self._start_stream(found.shard)
        resend = self.options.resend_unconfirmed
        requests, num_left = stream.take_unconfirmed()
        for request in requests if resend else ():
            change.after.write(request)
        for other in self._streams:
            if other is not change.after:  # an interrupt may have left one that no one else knows
                other.abandon()
        resent, given_up = (num_left, 0) if resend else (0, num_left)
        inserted = add(add(self._past[1], stream.stats()), InsertStats(items=-resent, dropped_items=-resent))
        past, moves = (self._counts(), inserted), add(self._moves, Moves(1, given_up, resent))
        signatures = {name: found.info.tables[name].signature for name in self._signatures}
        left, after = self._actor.current, change.after
        (self._past, self._moves, self._signatures, self._actor.current, self._stream, self._streams[:],
         self._writers[:], self._change) = past, moves, signatures, found.shard, after, [after], [], None  # fmt: skip
        log_change(self._actor_id, left, found, num_left, resend=resend)

    def _is_between_episodes(self, every: Callable[[Iterable[bool]], bool]) -> bool:
        flags = [flag for writer in self._writers for flag in writer.between_episodes()]
        return every(flags) or not flags

    def _is_delivered(self, stream: InsertStream) -> bool:
        """Return whether all is confirmed, after a short wait."""
        self.send()
        with contextlib.suppress(ReplayTimeoutError, ServerUnavailableError):
            stream.flush(_LEAVE_S)
        return not stream.num_pending

    def count_skipped(self, num_steps: int) -> None:
        """Count steps that are not written, because the shard that has the beginning of their episode was lost."""
        counts, inserted = self._past
        dropped = counts.dropped + collections.Counter({LOST_SHARD: num_steps * len(self.targets)})
        self._past = Counts(counts.steps + num_steps, counts.episodes, dropped), inserted
        self.log_dropped({LOST_SHARD: num_steps})

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
        began_at = time.monotonic()
        while True:
            left_s = max(began_at + self.timeout_s - time.monotonic(), 0.001)
            part_s = min(left_s, self.options.patience_s) if self._actor.has_choice else left_s
            try:
                self._stored_spec.store(
                    layout.spec, self._actor.current, Deadline(part_s), on_all=self._actor.has_choice
                )
            except (ReplayTimeoutError, ServerUnavailableError):
                if not self.change_shard(is_lost=True) and part_s == left_s:
                    raise
            else:
                return

    def watch_sizes(self) -> EpisodeSizes | None:
        """Return what counts the bytes of a new writer's items; None if that is not needed. Call `register` first."""
        return self._sizes.watch()

    def set_writer(self, writer: AnyWriter) -> None:
        """Have steps appended to this writer: count what it does, and send its windows when they are due."""
        self._writers.append(writer)
        self.writer = writer

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
        if self._stream is None:
            return
        try:
            if not self.is_forked:
                self._finish_change()
                self.send()
                self._stream.close(timeout_s)
        finally:
            self._end(self._stream)

    def _end(self, stream: InsertStream) -> None:
        """Give up what is left, and take the counters over."""
        is_forked = self.is_forked
        if not is_forked:
            stream.abandon(sum(writer.num_unsent_items for writer in self._writers))
            for other in self._streams:
                other.abandon()
        counts, inserted = self._counts(), add(self._past[1], stream.stats())
        self._past, self._writers[:], self._streams[:], self._stream, self._change, self.writer = (
            (counts, inserted), [], [], None, None, None)  # fmt: skip
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
        now = self._past[1] if stream is None else add(self._past[1], stream.stats())
        # In a forked child a writer's lock may be held for ever, by a thread that is not there.
        num_unsent_items = 0 if self.is_forked else sum(writer.num_unsent_items for writer in list(self._writers))
        now = replace(now, items=now.items + num_unsent_items, pending_items=now.pending_items + num_unsent_items)
        counts = self._counts()
        return ObserverStats(
            steps=counts.steps,
            episodes=counts.episodes,
            dropped_steps=dict(counts.dropped),
            **asdict(now),
            **asdict(self._moves),
        )


def _shut_down(writers: Sequence[Writer], streams: Sequence[InsertStream], client: Client | None) -> None:
    if any(stream.channel.is_forked for stream in streams):  # a thread of the parent may hold any lock, for ever
        return
    num_unsent_items = sum(writer.num_unsent_items for writer in writers)
    for stream in streams:
        stream.abandon(num_unsent_items)
        num_unsent_items = 0
    if client is not None:
        client.close()
