"""Complete windows on their way: from rows of the ring to requests for servers, and the counters. No thread."""

from __future__ import annotations

import logging

from reverb_writer.transport.delivery import Delivery
from reverb_writer.writing.chunk_encoder import ChunkEncoder
from reverb_writer.writing.cutter import Cutter
from reverb_writer.writing.destinations import Destination, Destinations
from reverb_writer.writing.observer_stats import Books, ObserverStats
from reverb_writer.writing.open_episode import Ready, ready_windows
from reverb_writer.writing.priorities import WindowPriorities
from reverb_writer.writing.ring import StepRing
from reverb_writer.writing.window_items import stream_update
from reverb_writer.writing.window_kinds import WindowKinds

_LOG = logging.getLogger(__package__)

LOST_SHARD = "lost_shard"

_REQUEST_ITEMS, _REQUEST_BYTES = 1024, 1 << 20  # at which complete windows are encoded, even if no call waits for them
_SPANNING_ITEMS = 1000  # windows that cross episodes stay at one of several shards for so many items


class Outbox:
    """What follows the rows of one observer. Not thread-safe: only the sender uses it.

    Attributes:
        cutter: the episodes under way.
        destinations: the servers.
    """

    def __init__(
        self,
        ring: StepRing,
        kinds: WindowKinds,
        encoder: ChunkEncoder,
        cutter: Cutter,
        priorities: WindowPriorities,
        destinations: Destinations,
        books: Books,
        *,
        drops_oldest: bool,
    ) -> None:
        """Begin with nothing under way."""
        self.cutter, self.destinations, self._books = cutter, destinations, books
        self._ring, self._kinds, self._encoder, self._priorities = ring, kinds, encoder, priorities
        self._drops_oldest, self._dropping = drops_oldest, False

    # ------------------------------------------------------------------------------------------- rows to requests

    @property
    def is_enough(self) -> bool:
        """Whether so much is complete that it is worth a message."""
        enough = min(_REQUEST_ITEMS, max(self.destinations.least_limit // 2, 1))
        return self.cutter.num_unencoded >= enough or self.cutter.unsent_bytes >= _REQUEST_BYTES

    @property
    def is_half(self) -> bool:
        """Whether half of the items that may be in flight are complete and not sent.

        If they waited for their chunks to be full, the server would run out of work.
        """
        return self.cutter.num_unencoded >= max(self.destinations.least_limit // 2, 1)

    def encode(self) -> None:
        """Encode the windows that are complete in chunks, and write them to their destinations."""
        groups: dict[tuple[Destination, WindowKinds], list[Ready]] = {}  # a new priority makes other kinds
        for ready in self.cutter.take_ready():
            destination = ready.episode.destination
            if destination is None:
                destination = ready.episode.destination = self.destinations.choose(ready.num_items)
            destination.num_reserved += ready.num_items
            groups.setdefault((destination, ready.kinds), []).append(ready)
        for (destination, _), group in groups.items():
            destination.num_reserved = 0
            self._write(destination, group)
        self.cutter.unsent_bytes = 0
        if self._kinds.spans_episodes and self.destinations.has_choice:
            self.cutter.cut_long_streams(_SPANNING_ITEMS)

    def _write(self, destination: Destination, group: list[Ready]) -> None:
        start = 0
        while start < len(group):
            stop, num_items = start, 0
            while stop < len(group) and num_items < _REQUEST_ITEMS:
                num_items += group[stop].num_items
                stop += 1
            part = group[start:stop]
            kept, update = stream_update(
                ready_windows(part, self._priorities),
                [ready.episode.chunks for ready in part],
                [ready.needed_from for ready in part],
                self._kinds.tables,
                self._encoder.new_key(),
                self._encoder.num_columns,
            )
            for ready, chunks in zip(part, kept, strict=True):
                ready.episode.chunks = chunks
            if update.request is not None or update.release:
                destination.delivery.flight.add(update.request, hold=update.hold, release=update.release)
            self.cutter.num_unencoded -= num_items
            start = stop
        while (
            self._drops_oldest
            and self.destinations.room(destination) == 0
            and destination.delivery.flight.drop_oldest()
        ):
            if not self._dropping:
                self._dropping = True
                _LOG.warning("%s: in-flight window full, oldest items are dropped.", destination.server.address)

    # ------------------------------------------------------------------------------------------------ back pressure

    def num_rows_granted(self, num_envs: int) -> int:
        """Return below which row steps may be written: there is room for them in the ring, and in flight."""
        self.destinations.update_limits()
        limit = self.cutter.first_needed + self._ring.size - num_envs + 1
        if self._drops_oldest:
            return limit
        return min(limit, self.cutter.taken + self._kinds.rows_within(self._room(), num_envs))

    def num_rows_worth(self, num_envs: int) -> int:
        """Return how many rows are granted at once: what completes a quarter of the items that may be in flight."""
        rows = self._kinds.rows_within(max(self.destinations.least_limit // 4, 1), num_envs)
        return max(min(rows, self._ring.size // 4), 1)

    def _room(self) -> int:
        """Return how many further items may be complete: those of the destination with the least room."""
        destinations = {episode.destination for episode in self.cutter.episodes}
        rooms = [self.destinations.room(destination) for destination in destinations if destination is not None]
        if None in destinations:
            rooms.append(self.destinations.most_room)
        return min(rooms) - self.cutter.num_unencoded

    # ------------------------------------------------------------------------------------------------- the servers

    def proceed(self) -> float:
        """Do what is due at the destinations; return in how many seconds something else is."""
        times = [destination.delivery.proceed() for destination in self.destinations]
        return min(*times, self.destinations.check_in_s())

    def check_shards(self) -> None:
        """Cut the episodes of destinations that were lost."""
        if lost := self.destinations.check():
            self.cutter.leave(lost, LOST_SHARD)

    @property
    def fault(self) -> tuple[type[Exception], str] | None:
        """Kind and text of the error with which a server refuses; None if none does."""
        return next(
            (destination.delivery.fault for destination in self.destinations if destination.delivery.fault is not None),
            None,
        )

    @property
    def slowest(self) -> Delivery:
        """The delivery that has most to deliver."""
        return max(
            (destination.delivery for destination in self.destinations), key=lambda delivery: delivery.flight.pending
        )

    @property
    def num_pending(self) -> int:
        """Items that are complete and not confirmed."""
        return self.cutter.num_unencoded + self.destinations.num_pending

    @property
    def num_acknowledged(self) -> int:
        """Items confirmed so far."""
        return self._books.counts["acknowledged_items"]

    def close(self) -> int:
        """Give up what is left; return how many items that is."""
        num_left = self.cutter.num_unencoded + sum(destination.delivery.close() for destination in self.destinations)
        self.cutter.num_unencoded = 0
        return num_left

    def stats(self) -> ObserverStats:
        """Return the counters."""
        num_bytes = sum(destination.delivery.flight.pending_bytes for destination in self.destinations)
        return self._books.stats(pending_items=self.num_pending, pending_bytes=num_bytes)
