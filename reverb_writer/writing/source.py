"""The interface between a writer's kind of rows and the sender.

    caller's thread -> rows -> source -> batches of complete items -> requests

`Cutter` makes windows of steps; `ItemSource` passes whole items on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

from reverb_writer.transport.in_flight import InsertRequest
from reverb_writer.writing.stream_options import Books

REQUEST_ITEMS: Final = 1024
"""Complete items become a request at this number, even if no call waits."""

REQUEST_BYTES: Final = 1 << 20
"""Complete items become a request at this size, even if no call waits."""


class Rows(Protocol):
    """Rows between a caller's thread and the sender's thread; only the caller assigns `head`, and the sender the rest.

    Attributes:
        size: the number of rows that are held.
        num_envs: the number of rows that one call writes.
        head: the number of rows written so far, and values of the caller's.
        granted, granted_items: a call may be written while fewer rows are written and fewer items complete.
        wake_after: rows and items after which a call wakes the sender.
    """

    size: int
    num_envs: int
    head: Any
    granted: int
    granted_items: int
    wake_after: tuple[float, float]

    def room(self) -> tuple[int, int]:
        """Return the numbers of rows and of items for which there is room; a call is granted if both are positive."""

    def due(self) -> tuple[float, ...] | None:
        """Return the bounds after which the sender is woken if what is written has passed one; None otherwise."""


class Origin(Protocol):
    """Items that stay together: an episode, or some whole items.

    Attributes:
        receiver: the `Destination` of several; None at first. Only the outbox of several servers assigns and reads it.
        num_sent: items sent to the receiver so far; as `receiver`.
    """

    receiver: Any
    num_sent: int


class Batch(Protocol):
    """Complete items of one origin."""

    @property
    def origin(self) -> Origin:
        """The episode of the windows, or what keeps whole items together."""

    @property
    def num_items(self) -> int:
        """The number of items, counted once per table."""


class Source(Protocol):
    """Rows of a caller that become items. Not thread-safe: only the sender uses it.

    Attributes:
        books: the writer's counters.
        tables: the tables that get its items.
        taken: rows taken so far.
        num_counted: items that the caller has counted in these rows.
        num_unencoded: complete items that are in no request yet.
        unsent_bytes: encoded bytes that are in no request yet.
        has_new: set when rows are taken; the sender clears it.
        is_prompt: whether a row is sent at once while nothing is in flight.
        items_per_call: upper bound of the items that a call completes on average.
        is_endless: whether an origin has no end of its own, so that the outbox may cut it after any item.
    """

    books: Books
    tables: frozenset[str]
    taken: int
    num_counted: int
    num_unencoded: int
    unsent_bytes: int
    has_new: bool
    is_prompt: bool
    items_per_call: float
    is_endless: bool

    @property
    def ring(self) -> Rows:
        """The rows."""

    def take(self) -> None:
        """Take the rows that were written since the last call."""

    def seal_open(self, before: int = ...) -> None:
        """Make items of open rows that begin before row `before`."""

    def seal_fullest(self, keep: int) -> None:
        """Make items of open rows until at most `keep` complete items are left in them."""

    def take_ready(self) -> Sequence[Batch]:
        """Return complete items that are in no request yet; the caller makes their requests now."""

    def requests(self, batches: Sequence[Any]) -> Iterator[InsertRequest]:
        """Make requests of batches, in their order."""

    def release_rows(self) -> int:
        """Release rows that are no longer needed; return the row below which rows may be written."""

    def note_in_flight(self, num_bytes: int) -> None:
        """Note the bytes in flight, which bound the rows of a source whose rows have different sizes."""

    def needed_chunks(self) -> list[int]:
        """Return the keys of the chunks that later items may refer to."""

    def open_origins(self) -> Sequence[Origin]:
        """Return the origins of the next rows."""

    def cut(self, is_cut: Callable[[Origin], bool], reason: str) -> None:
        """End the open origins that `is_cut` names. Rows that are in no item then are counted under `reason`."""
