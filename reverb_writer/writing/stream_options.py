"""The options of an observer's stream: time-outs, bounds, chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypedDict

from reverb_writer.arguments import check_timeout, integer
from reverb_writer.errors import SpecError
from reverb_writer.protocol.item_encoding import MAX_CHUNK_LENGTH

OnBlock = Literal["wait", "raise", "drop_oldest"]


class StreamKeywords(TypedDict, total=False):
    """The fields of `StreamOptions` as keyword arguments of an observer."""

    timeout_s: float | None
    connect_timeout_s: float | None
    max_delay_s: float
    max_in_flight_items: int | None
    max_in_flight_bytes: int
    on_block: OnBlock
    max_item_bytes: int | None
    chunk_length: int | None
    actor_id: str | None
    patience_s: float
    until: Callable[[], object] | None


@dataclass(frozen=True)
class StreamOptions:
    """How an observer's stream behaves. Every observer takes these as keyword arguments.

    Attributes:
        timeout_s: time-out of a call, seconds; None for the client's. A step's time-out starts again whenever the
            server makes progress, with these items or with those of others.
        connect_timeout_s: time-out of opening, which waits for the server, seconds; None for `timeout_s`.
        max_delay_s: longest time that a complete window waits to be sent, seconds; infinity for no such bound.
        max_in_flight_items: items that may be complete and unconfirmed, sent or not, for each server; steps wait while
            as many are. One call is never split, so it may exceed this by what it completes. None for 400, or
            what 32 calls complete if that is more; and for more while a server confirms more in a tenth of a second.
        max_in_flight_bytes: bytes of unconfirmed items and chunks at which steps wait; also bounds the ring of steps.
        on_block: what a step does then: "wait" while there is progress, "raise" at once, or "drop_oldest" items.
        max_item_bytes: bytes of an item, all steps and leaves together, uncompressed, above which it is refused before
            anything of it is sent; None for no limit. Windows of a fixed length without strings are checked at the
            first step; of strings, and of whole episodes, each step is.
        chunk_length: steps in a chunk; None for a length that suits the windows.
        actor_id: name of the writer, which no other one has. Of several servers, actor and episode decide which one
            gets the episode. None for a name of machine, process and count.
        patience_s: of several servers: seconds without a confirmation and without an answer after which one is given
            up: its unconfirmed items are dropped and counted, and the next episodes go to others. Infinity for never.
        until: function without arguments that tells whether the run has ended, such as `lambda: variables.finished`.
            The observer's thread asks it often while a call waits, so it must be quick; when it returns true, the call
            raises `FinishedError`. None to wait for the time-out.
    """

    timeout_s: float | None = None
    connect_timeout_s: float | None = None
    max_delay_s: float = 0.5
    max_in_flight_items: int | None = None
    max_in_flight_bytes: int = 128 << 20
    on_block: OnBlock = "wait"
    max_item_bytes: int | None = None
    chunk_length: int | None = None
    actor_id: str | None = None
    patience_s: float = 10.0
    until: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        """Check what has no check elsewhere."""
        if self.max_in_flight_items is not None:
            integer("max_in_flight_items", self.max_in_flight_items, minimum=1)
        integer("max_in_flight_bytes", self.max_in_flight_bytes, minimum=1)
        if self.on_block not in ("wait", "raise", "drop_oldest"):
            raise SpecError(f"`on_block` must be 'wait', 'raise' or 'drop_oldest', got {self.on_block!r}.")
        if self.timeout_s is not None:
            check_timeout(self.timeout_s)
        if self.connect_timeout_s is not None:
            check_timeout(self.connect_timeout_s, "connect_timeout_s")
        check_timeout(self.patience_s, "patience_s")
        if self.actor_id is not None and (not isinstance(self.actor_id, str) or not self.actor_id):
            raise SpecError(f"`actor_id` must be a string that is not empty, or None, got {self.actor_id!r}.")
        if not self.max_delay_s > 0:
            raise SpecError(f"`max_delay_s` must be > 0 seconds, got {self.max_delay_s!r}.")
        if self.until is not None and not callable(self.until):
            raise SpecError(
                f"`until` must be a function without arguments, got {self.until!r}. Put `lambda:` before it."
            )
        if self.max_item_bytes is not None:
            integer("max_item_bytes", self.max_item_bytes, minimum=1)
        if self.chunk_length is not None:
            integer("chunk_length", self.chunk_length, minimum=1, maximum=MAX_CHUNK_LENGTH)
