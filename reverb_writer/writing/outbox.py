"""Complete items between source and servers: the choice of each episode's server, and the limit of items in flight.

    episode, or some items -> rendezvous hashing of actor and episode -> the first server that answers and has room
    its items -> a request -> the delivery to that server

A lost server gets no more items: its unconfirmed items are given up and counted, and its open episodes are cut. The
next episodes use other servers. A server that answers is not lost, even if its rate limiter blocks.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from reverb_writer.client.server_calls import Server
from reverb_writer.replay.client import Client
from reverb_writer.shards.targets import rank_shards, writer_name
from reverb_writer.transport.delivery import Delivery, Post
from reverb_writer.writing.source import REQUEST_BYTES, REQUEST_ITEMS, Source
from reverb_writer.writing.stream_options import DeliveryOptions, ObserverStats

_LOG = logging.getLogger(__package__)

LOST_SHARD = "lost_shard"

_SPANNING_ITEMS = 1000  # items at one of several shards before a stream of windows that cross episodes is cut
_LEAST_ITEMS, _LEAST_CALLS, _MOST_ITEMS = 400, 32, 16_384  # bounds of the unconfirmed items at a server
_AHEAD_S, _EPOCH_S = 0.1, 0.05
_CHECK_S = 1.0  # the longest time between two checks of shards while items are in flight, because the target may change


class ItemLimit:
    """Limit of unconfirmed items at a server: a fixed number, or the number that the server confirms in 0.1 s.

    With 400 items, an actor that only writes would wait half of the time. While a rate limiter blocks, there are few
    confirmations, so the limit falls to the least one within a tenth of a second. A split DQN learns with up to 2,000
    items and not with 16,384; see docs/decisions.md#in-flight.

    Attributes:
        items: the present limit.
    """

    def __init__(self, fixed: int | None, items_per_call: float) -> None:
        """Take a fixed number; None for a limit that adapts, at least 400 and the items that 32 calls complete.

        >>> ItemLimit(None, 1).items, ItemLimit(None, 64).items
        (400, 2048)
        """
        self._is_fixed = fixed is not None
        self.items = self._least = fixed or max(_LEAST_ITEMS, math.ceil(_LEAST_CALLS * items_per_call))
        self._since = time.monotonic()
        self._before = 0  # items confirmed at `_since`

    def update(self, acknowledged: int) -> None:
        """Adapt to the number of items confirmed so far."""
        now = time.monotonic()
        if self._is_fixed or now - self._since < _EPOCH_S:
            return
        rate = (acknowledged - self._before) / (now - self._since)
        self.items = max(self._least, min(int(_AHEAD_S * rate), _MOST_ITEMS))
        self._since, self._before = now, acknowledged


@dataclass(eq=False, slots=True)
class Destination:
    """One server and the delivery of items to it. Not thread-safe: only the sender uses it."""

    server: Server
    delivery: Delivery
    limit: ItemLimit
    is_lost: bool = False  # whether it is out of use until it answers again
    asked_at: float = 0.0  # time of the last question to the silent server
    num_reserved: int = 0  # items of the request that is being made


class Outbox:
    """Sends the items of one writer to its servers. Not thread-safe: only the sender uses it."""

    def __init__(
        self,
        client: Client,
        options: DeliveryOptions,
        source: Source,
        post: Post,
    ) -> None:
        """Make a destination per server of the client's target."""
        self._client, self._options, self._name = client, options, writer_name()
        self._source, self._books, self._post = source, source.books, post
        self._num_episodes = 0
        self._shards: Sequence[Server] = ()
        self._destinations: dict[str, Destination] = {}  # by the shard's name
        self._follow_target()

    # ------------------------------------------------------------------------------------------ windows to requests

    @property
    def is_enough(self) -> bool:
        """Whether enough is complete for a message."""
        source = self._source
        enough = min(REQUEST_ITEMS, self.part_of_limit(2))
        return source.num_unencoded >= enough or source.unsent_bytes >= REQUEST_BYTES

    @property
    def is_half(self) -> bool:
        """Whether half of the items that may be in flight wait for full chunks: the server would run out of work."""
        return self._source.num_unencoded >= self.part_of_limit(2)

    def encode(self) -> None:
        """Encode the windows that are complete in chunks, and write them to their destinations."""
        groups: dict[tuple[Destination, Hashable], list[Any]] = {}  # a new priority makes a new target
        for ready in self._source.take_ready():
            destination = ready.episode.destination
            if destination is None:
                destination = ready.episode.destination = self._choose(ready.num_items)
            destination.num_reserved += ready.num_items
            groups.setdefault((destination, ready.target), []).append(ready)
        for (destination, _), group in groups.items():
            destination.num_reserved = 0
            self._write(destination, group)
        self._source.unsent_bytes = 0
        if len(self._destinations) > 1:
            self._source.cut_long_streams(_SPANNING_ITEMS)

    def _write(self, destination: Destination, group: list[Any]) -> None:
        flight = destination.delivery.flight
        for request in self._source.requests(group):
            flight.add(request)

    # ------------------------------------------------------------------------------------------------ back pressure

    @property
    def _least_limit(self) -> int:
        return min(destination.limit.items for destination in self._all)

    def num_items_granted(self) -> int:
        """Return the number of items, as the caller counts them, below which a call may be written."""
        for destination in self._all:
            destination.limit.update(destination.delivery.flight.acknowledged)
        return self._source.num_counted + self._room()

    def part_of_limit(self, parts: int) -> int:
        """Return one of `parts` equal parts of the items that may be in flight, at least one item."""
        return max(self._least_limit // parts, 1)

    @property
    def num_bytes_pending(self) -> int:
        """Bytes of unconfirmed items."""
        return sum(each.delivery.flight.pending_bytes for each in self._all)

    def _room(self) -> int:
        """Return the number of further items that may be complete: the room of the fullest destination of an episode.

        The fullest counts because one call has steps of all environments, and each may be for this destination.
        """
        in_use = self._source.destinations()
        rooms = [self._room_of(destination) for destination in in_use if destination is not None]
        if None in in_use:
            usable = [destination for destination in self._all if not destination.is_lost] or self._all
            rooms.append(max(map(self._room_of, usable)))
        return min(rooms) - self._source.num_unencoded

    def _room_of(self, destination: Destination) -> int:
        """Return the number of further items that may be unconfirmed there; 0 if too many bytes are unconfirmed."""
        flight = destination.delivery.flight
        if flight.pending_bytes >= self._options.max_in_flight_bytes:
            return 0
        return max(destination.limit.items - flight.pending - destination.num_reserved, 0)

    # ------------------------------------------------------------------------------------------------- the servers

    @property
    def _has_choice(self) -> bool:
        """Whether there are several servers now, or may be later."""
        return len(self._destinations) > 1 or self._client.connections.may_have_several

    def _choose(self, num_items: int) -> Destination:
        """Return the next episode's destination: the first in its order that answers and has room for the items."""
        self._num_episodes += 1
        every = self._destinations
        if len(every) == 1:
            return next(iter(every.values()))
        ranked = [every[name] for name in rank_shards(f"{self._name}/{self._num_episodes}", every)]
        up = [each for each in ranked if each.server.shard.state == "up"] or ranked
        there = [each for each in up if not each.is_lost] or up
        free = (destination for destination in there if self._room_of(destination) >= max(num_items, 1))
        return next(free, max(there, key=self._room_of))

    def _follow_target(self) -> list[Destination]:
        """Make destinations for new servers; give up and return the destinations whose server left the target."""
        shards = self._client.shards
        if shards is self._shards:
            return []
        self._shards = shards
        names = {shard.name for shard in shards}
        left = [destination for name, destination in self._destinations.items() if name not in names]
        for destination in left:
            del self._destinations[destination.server.name]
            self._give_up(destination, "has left the target")
        for shard in shards:
            if shard.name not in self._destinations:
                self._destinations[shard.name] = self._new_destination(shard)
        for destination in self._all:
            destination.delivery.kept.max_bytes = self._max_kept_bytes
        return left

    def _new_destination(self, server: Server) -> Destination:
        limit = ItemLimit(self._options.max_in_flight_items, self._source.items_per_call)
        needed, counts = self._source.needed_chunks, self._books.counts
        delivery = Delivery(
            server.channel,
            self._post,
            counts,
            needed=needed,
            max_kept_bytes=self._max_kept_bytes,
        )
        return Destination(server, delivery, limit)

    @property
    def _max_kept_bytes(self) -> int:
        """The equal part of each server."""
        return self._options.max_kept_bytes // max(len(self._shards), 1)

    def check_shards(self) -> None:
        """Ask silent servers if it is time; give up lost servers and cut their open episodes."""
        if not self._has_choice:
            return
        now, patience_s, lost = time.monotonic(), self._options.patience_s, self._follow_target()
        for name, destination in [*self._destinations.items()]:
            flight, is_told = destination.delivery.flight, destination.server.shard.state == "lost"
            # Silence begins with the server's last message, or when a message became due.
            last_at = destination.server.channel.last_response_at
            heard_at = max(last_at, flight.progress_at)
            silent_s = now - heard_at if flight.pending else 0.0
            # It must also leave a question unanswered, because this process may have been the slow one.
            is_silent = silent_s >= patience_s and heard_at < destination.asked_at <= now - patience_s / 2
            # If no other server can take the next episodes, nothing is given up.
            has_other = any(not each.is_lost for each in self._all if each is not destination)
            has_answered = last_at > destination.asked_at and destination.delivery.questions.has_tables(
                self._source.tables
            )
            if destination.is_lost and not is_told and has_answered:
                destination.is_lost = False
                _LOG.info("Shard %s answers again.", destination.server.address)
            elif not destination.is_lost and has_other and (is_told or is_silent or destination.delivery.lacks_table):
                silence = f"has neither confirmed nor answered anything for {silent_s:.1f} s"
                if destination.delivery.fault is not None:
                    silence = f"refuses items ({destination.delivery.fault[1]})"
                another = self._destinations[name] = self._new_destination(destination.server)
                another.delivery.take_over(destination.delivery)  # a shard that is restarted gets its confirmed items
                self._give_up(destination, "is called lost by the target" if is_told else silence)
                lost.append(destination)
                another.is_lost, another.asked_at = True, now
            elif now - destination.asked_at >= patience_s / 2 and (destination.is_lost or silent_s >= patience_s / 2):
                destination.asked_at = now
                destination.delivery.questions.ask()
        if lost:
            self._source.leave(lost, LOST_SHARD)

    def _give_up(self, destination: Destination, why: str) -> None:
        num_items = destination.delivery.close()
        self._books.counts["lost_shards"] += 1
        self._books.counts["unconfirmed_items"] += num_items
        text = "Shard %s %s: %d unconfirmed items are given up, and may be stored there nevertheless."
        _LOG.warning(text, destination.server.address, why, num_items)
        self._client.connections.refresh_soon()

    def proceed(self) -> float:
        """Do all due work of the destinations; return the seconds until more is due."""
        times = [destination.delivery.proceed() for destination in self._all]
        if self._has_choice and (self.num_written or any(destination.is_lost for destination in self._all)):
            times.append(min(self._options.patience_s / 8, _CHECK_S))
        return min(times)

    @property
    def _all(self) -> list[Destination]:
        return [*self._destinations.values()]

    @property
    def fault(self) -> tuple[type[Exception], str] | None:
        """Kind and text of the error with which a server refuses items; None without a refusal."""
        return next(
            (destination.delivery.fault for destination in self._all if destination.delivery.fault is not None), None
        )

    @property
    def slowest(self) -> Delivery:
        """The delivery with the most unconfirmed items."""
        return max(self._all, key=lambda destination: destination.delivery.flight.pending).delivery

    @property
    def progress_at(self) -> float:
        """`time.monotonic()` of the last confirmation; if nothing was in flight after it, of the next items."""
        return max(destination.delivery.flight.progress_at for destination in self._all)

    @property
    def addresses(self) -> str:
        """The servers' addresses, separated by commas."""
        return ", ".join(destination.delivery.channel.address for destination in self._all)

    # ------------------------------------------------------------------------------------------------- the counters

    @property
    def num_written(self) -> int:
        """Number of items written to destinations and not confirmed."""
        return sum(destination.delivery.flight.pending for destination in self._all)

    @property
    def num_pending(self) -> int:
        """Number of items that are complete and not confirmed."""
        return self._source.num_unencoded + self.num_written

    def close(self) -> int:
        """Give up all pending items; return their number."""
        num_left, self._source.num_unencoded = self._source.num_unencoded, 0
        self._books.counts["items"] += num_left
        return num_left + sum(destination.delivery.close() for destination in self._all)

    def stats(self) -> ObserverStats:
        """Return the counters now, without the counters that the observer keeps."""
        counts, num_written = self._books.counts, self.num_written
        return ObserverStats(
            **{**counts, "items": counts["items"] + self._source.num_unencoded},
            pending_items=self.num_pending,
            pending_bytes=sum(destination.delivery.flight.pending_bytes for destination in self._all),
            kept_bytes=sum(each.delivery.kept.num_bytes + each.delivery.flight.again_bytes for each in self._all),
            dropped_items=counts["items"] - counts["acknowledged_items"] - num_written,
            dropped_steps=dict(self._books.dropped_steps),
        )
