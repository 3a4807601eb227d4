"""The records of a writer's stream: options that a caller sets, and counters that it reads."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypedDict

from reverb_writer.arguments import check_timeout, integer
from reverb_writer.errors import SpecError
from reverb_writer.protocol.item_encoding import MAX_CHUNK_LENGTH
from reverb_writer.rows import LastRow
from reverb_writer.rows.layouts import checked_last_row
from reverb_writer.scalars import Scalars

OnBlock = Literal["wait", "raise"]


class DeliveryKeywords(TypedDict, total=False):
    """The fields of `DeliveryOptions` as keyword arguments of a writer."""

    timeout_s: float | None
    max_delay_s: float
    max_in_flight_items: int | None
    max_in_flight_bytes: int
    max_kept_bytes: int
    on_block: OnBlock
    patience_s: float
    until: Callable[[], object] | None


class StreamKeywords(DeliveryKeywords, total=False):
    """The fields of `StreamOptions` as keyword arguments of an observer."""

    chunk_length: int | None
    last_row: LastRow | None
    store_flags: bool


@dataclass(frozen=True)
class DeliveryOptions:
    """Options of the delivery of items. `ItemWriter` and every observer take these options as keyword arguments.

    A call is a step of an observer, or an item of an `ItemWriter`.

    Attributes:
        timeout_s: time-out of a call, in seconds; None for the client's, which is 30, and which is also the time-out of
            `open`. A call's time-out starts again whenever the server makes progress with this writer's items or with
            other actors' items.
        max_delay_s: longest time between completion and sending of an item, in seconds; infinity for no bound.
        max_in_flight_items: number of complete and unconfirmed items per server, sent or not, at which calls wait. One
            call is never split, so it may exceed the limit. None for a limit that adapts: 400, or the items that 32
            calls complete if that is more, and up to 16,384 while the server confirms more in a tenth of a second.
        max_in_flight_bytes: bytes of unconfirmed items and chunks per server at which calls wait; also bounds the
            memory of steps that are not encoded yet.
        max_kept_bytes: bytes of confirmed items that are kept until a checkpoint of the server has them, or their table
            has removed them. A restarted server gets them again. If they need more memory, the oldest are released and
            counted; no call waits for them. 0 to keep none.
        on_block: action of a call without room: "wait" while there is progress, or "raise" at once.
        patience_s: seconds without a confirmation and without an answer after which the writer gives up one of
            several servers: it drops and counts the unconfirmed items, and sends the next items to other servers.
            Infinity for never.
        until: function without arguments that returns whether the run has ended, such as `lambda: variables.finished`.
            While a rate limiter blocks, a call then waits without a time-out, because the learner may only pause. The
            thread that waits calls the function five times per second, so it must be quick. When it returns true, a
            waiting call or `flush` raises `FinishedError` within about a second, and `close` returns. None to wait for
            the time-out.

    Raises:
        SpecError: an option is out of range; the message names the option.
    """

    timeout_s: float | None = None
    max_delay_s: float = 0.5
    max_in_flight_items: int | None = None
    max_in_flight_bytes: int = 128 << 20
    max_kept_bytes: int = 64 << 20
    on_block: OnBlock = "wait"
    patience_s: float = 10.0
    until: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        """Check all options that have no check elsewhere."""
        integer("max_in_flight_bytes", self.max_in_flight_bytes, minimum=1)
        integer("max_kept_bytes", self.max_kept_bytes, minimum=0)
        if self.max_in_flight_items is not None:
            integer("max_in_flight_items", self.max_in_flight_items, minimum=1)
        if self.on_block not in ("wait", "raise"):
            raise SpecError(f"`on_block` must be 'wait' or 'raise', got {self.on_block!r}.")
        check_timeout(self.patience_s, "patience_s")
        check_timeout(self.max_delay_s, "max_delay_s")
        if self.timeout_s is not None:
            check_timeout(self.timeout_s)
        if self.until is not None and not callable(self.until):
            raise SpecError(
                f"`until` must be a function without arguments, got {self.until!r}. Put `lambda:` before it."
            )


@dataclass(frozen=True)
class StreamOptions(DeliveryOptions):
    """Options of an observer's stream. Every observer takes these options as keyword arguments.

    The options of delivery are those of `DeliveryOptions`.

    Attributes:
        chunk_length: steps in a chunk, at most 16,383; None for a length that suits the windows.
        last_row: whose row the ends of episodes stand on where the names of the leaves do not show it: "boundary" for a
            row of its own that holds the final observation, "action" for the row of the last action. Leaves
            `terminated` and `truncated` without `is_last` or `step_type` need it.
        store_flags: whether to store the leaves is_first, is_last, terminated, truncated and mask beside each step, for
            readers of other libraries. Steps must be dicts without these leaves.

    Raises:
        SpecError: an option is out of range; the message names the option.
    """

    chunk_length: int | None = None
    last_row: LastRow | None = None
    store_flags: bool = False

    def __post_init__(self) -> None:
        """Check all options that have no check elsewhere."""
        super().__post_init__()
        checked_last_row(self.last_row)
        if self.chunk_length is not None:
            integer("chunk_length", self.chunk_length, minimum=1, maximum=MAX_CHUNK_LENGTH)


@dataclass(frozen=True)
class ObserverStats(Scalars):
    """Counters of an observer or an `ItemWriter` since it was made.

    `pending_items`, `pending_bytes` and `kept_bytes` are present values. Counters of steps and episodes are 0 for an
    `ItemWriter`.

    Attributes:
        steps: steps taken, including boundary steps, without padding.
        episodes: episodes ended.
        items: items completed, counted once per table.
        acknowledged_items: items that the server has confirmed.
        pending_items: items that the server has not confirmed yet.
        pending_bytes: memory of pending items that are encoded, in bytes.
        dropped_items: items that were given up: with a lost shard, at the time-out of `close`, or because a priority
            function failed.
        dropped_steps: steps that are in no window, by reason. After the end of its episode, steps taken = steps in a
            window + steps dropped.
        blocked_s: seconds that calls have waited.
        reconnects: times that a connection was lost or could not be made; the writer then connects again.
        server_restarts: reconnections to a server that was restarted.
        resent_items: items sent again after a lost connection; a server stores each item once.
        lost_shards: number of times that one of several servers was given up.
        unconfirmed_items: dropped items that a lost shard had not confirmed; the shard may have stored some.
        kept_bytes: memory of confirmed items that no checkpoint of the server has, in bytes; see `max_kept_bytes`.
        recovered_items: confirmed items sent again to a restarted server; an item that its checkpoint has takes its
            first priority again.
        repeatable_items: recovered items of tables with `max_times_sampled`; those that a learner had received since
            the checkpoint are given out twice.
        displaced_items: newer items that recovered items may have pushed out of a full table.
        uncovered_items: confirmed items that a restart of the server could lose or has lost. They were released because
            of `max_kept_bytes`, at `close`, with a shard that left the target, or at a reset; or the server has
            restored an older checkpoint than its newest one.
        failed_priorities: dropped items whose priority function failed.
        unmarked_steps: steps before the first mark of an episode's end, if it is late; else 0.
        unknown_ends: ends of episodes that do not show whether the environment ended the episode. Their last action is
            in no transition.
    """

    steps: int = 0
    episodes: int = 0
    items: int = 0
    acknowledged_items: int = 0
    pending_items: int = 0
    pending_bytes: int = 0
    dropped_items: int = 0
    dropped_steps: dict[str, int] = field(default_factory=dict)
    blocked_s: float = 0.0
    reconnects: int = 0
    server_restarts: int = 0
    resent_items: int = 0
    lost_shards: int = 0
    unconfirmed_items: int = 0
    kept_bytes: int = 0
    recovered_items: int = 0
    repeatable_items: int = 0
    displaced_items: int = 0
    uncovered_items: int = 0
    failed_priorities: int = 0
    unmarked_steps: int = 0
    unknown_ends: int = 0


@dataclass
class Books:
    """The counters of `ObserverStats`, for an observer's senders together. Only the senders' threads change them."""

    counts: collections.Counter[str] = field(default_factory=collections.Counter)  # by the name of the field
    dropped_steps: collections.Counter[str] = field(default_factory=collections.Counter)  # by reason

    def stats(self, num_unencoded: int, num_written: int, *, pending_bytes: int, kept_bytes: int) -> ObserverStats:
        """Return the counters now, without the counters that the observer keeps.

        `num_unencoded` and `num_written` are complete items without a request, and items in unconfirmed requests.
        """
        counts = self.counts
        return ObserverStats(
            **{**counts, "items": counts["items"] + num_unencoded},
            pending_items=num_unencoded + num_written,
            pending_bytes=pending_bytes,
            kept_bytes=kept_bytes,
            dropped_items=counts["items"] - counts["acknowledged_items"] - num_written,
            dropped_steps=dict(self.dropped_steps),
        )
