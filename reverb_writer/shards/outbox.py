"""Complete items of a writer to several servers: the choice of each episode's server.

    episode, or some items -> rendezvous hashing of actor and episode -> the first server that answers and has room
    its items -> the outbox of that server

A lost server gets no more items: its unconfirmed items are given up and counted, and its open episodes are cut. The
next episodes use other servers. A server that answers is not lost, even if its rate limiter blocks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from reverb_writer.shards.server_set import ServerSet, ShardServer
from reverb_writer.shards.targets import rank_shards, writer_name
from reverb_writer.transport.delivery import Delivery, Post
from reverb_writer.transport.questions import Questions
from reverb_writer.writing.outbox import ServerOutbox
from reverb_writer.writing.source import Batch, Origin, Source
from reverb_writer.writing.stream_options import DeliveryOptions

_LOG = logging.getLogger(__package__)

LOST_SHARD = "lost_shard"

_SPANNING_ITEMS = 1000  # items at one of several shards before a stream of windows that cross episodes is cut
_CHECK_S = 1.0  # the longest time between two checks of shards while items are in flight, because the target may change


@dataclass(eq=False, slots=True)
class Destination:
    """One server, and the outbox of its items."""

    shard: ShardServer
    outbox: ServerOutbox
    questions: Questions
    is_lost: bool = False  # whether it is out of use until it answers again
    is_given_up: bool = False  # whether the outbox is closed; another destination may have the server
    asked_at: float = 0.0  # time of the last question to the silent server
    num_reserved: int = 0  # items of the requests that are being made

    @property
    def delivery(self) -> Delivery:
        """The delivery to the server."""
        return self.outbox.delivery

    def room(self) -> int:
        """Return the number of further items that may be complete."""
        return max(self.outbox.room() - self.num_reserved, 0)

    def heard_at(self) -> float:
        """Return the time of the server's last message, or of the first message that is due."""
        return max(self.delivery.channel.last_response_at, self.delivery.flight.progress_at)

    def silent_s(self, now: float) -> float:
        """Return the seconds since the server's last message; 0 if no message is due."""
        return now - self.heard_at() if self.outbox.num_written else 0.0

    def loss(self, now: float, patience_s: float) -> str | None:
        """Return why the server is lost; None if it is not."""
        if self.shard.state == "lost":
            return "is called lost by the target"
        silent_s = self.silent_s(now)
        # Silence must also leave a question unanswered, because this process may have been the slow one.
        is_silent = silent_s >= patience_s and self.heard_at() < self.asked_at <= now - patience_s / 2
        if not (is_silent or self.delivery.lacks_table):
            return None
        if self.delivery.fault is not None:
            return f"refuses items ({self.delivery.fault[1]})"
        return f"has neither confirmed nor answered anything for {silent_s:.1f} s"

    def answers(self) -> bool:
        """Return whether the server has answered the last question, has the tables, and is not called lost."""
        has_answered = self.delivery.channel.last_response_at > self.asked_at
        return has_answered and self.questions.has_tables() and self.shard.state != "lost"


class ShardedOutbox:
    """The outbox of several servers; the methods are those of `reverb_writer.writing.outbox.Outbox`."""

    def __init__(self, servers: ServerSet, options: DeliveryOptions, source: Source, post: Post) -> None:
        """Make a destination per server of the target."""
        self._servers, self._options, self._name = servers, options, writer_name()
        self._source, self._post = source, post
        self._num_episodes = 0
        self._shards: Sequence[ShardServer] = ()
        self._destinations: dict[str, Destination] = {}  # by the shard's name
        self._follow_target()

    # ------------------------------------------------------------------------------------------------------- items

    def write(self, batches: Sequence[Batch]) -> None:
        """Queue the items at their destinations; cut streams that are long enough for a server."""
        groups: dict[Destination, list[Batch]] = {}
        for batch in batches:
            origin = batch.origin
            if origin.receiver is None or origin.receiver.is_given_up:
                origin.receiver, origin.num_sent = self._choose(batch.num_items), 0
            origin.num_sent += batch.num_items
            origin.receiver.num_reserved += batch.num_items
            groups.setdefault(origin.receiver, []).append(batch)
        for destination, group in groups.items():
            destination.num_reserved = 0
            destination.outbox.write(group)
        if self._source.is_endless and len(self._destinations) > 1:
            self._source.cut(_is_long, "reset")

    def _choose(self, num_items: int) -> Destination:
        """Return the next episode's destination: the first in its order that answers and has room for the items."""
        self._num_episodes += 1
        every = self._destinations
        there = _usable([every[name] for name in rank_shards(f"{self._name}/{self._num_episodes}", every)])
        free = (destination for destination in there if destination.room() >= max(num_items, 1))
        return next(free, max(there, key=Destination.room))

    def room(self) -> int:
        """Return the room of the fullest destination of an open episode.

        The fullest counts because one call has steps of all environments, and each may be for this destination. An
        episode that has no destination yet will get one with room, so the emptiest usable one counts for it.
        """
        rooms = {destination: destination.room() for destination in self._all}
        receivers = {origin.receiver for origin in self._source.open_origins()}
        found = [rooms[destination] for destination in receivers if destination is not None]
        if None in receivers:
            found.append(max(rooms[destination] for destination in _usable(self._all)))
        return min(found)

    # ------------------------------------------------------------------------------------------------- the servers

    def check(self) -> None:
        """Ask silent servers if it is time; give up lost servers and cut their open episodes."""
        now, patience_s, given_up = time.monotonic(), self._options.patience_s, self._follow_target()
        for name, destination in [*self._destinations.items()]:
            # If no other server can take the next episodes, nothing is given up.
            has_other = any(not each.is_lost for each in self._all if each is not destination)
            may_be_lost = destination.is_lost or destination.silent_s(now) >= patience_s / 2
            if destination.is_lost and destination.answers():
                destination.is_lost = False
                _LOG.info("Shard %s answers again.", destination.shard.address)
            elif not destination.is_lost and has_other and (why := destination.loss(now, patience_s)) is not None:
                another = self._destinations[name] = self._new_destination(destination.shard)
                another.delivery.take_over(destination.delivery)  # a shard that is restarted gets its confirmed items
                another.is_lost, another.asked_at = True, now
                self._give_up(destination, why)
                given_up = True
            elif may_be_lost and now - destination.asked_at >= patience_s / 2:
                destination.asked_at = now
                destination.questions.ask()
        if given_up:
            self._source.cut(_is_given_up, LOST_SHARD)

    def _follow_target(self) -> bool:
        """Make destinations for new servers; return whether destinations were given up because they left the target."""
        shards = self._servers.shards
        if shards is self._shards:
            return False
        self._shards = shards
        names = {shard.name for shard in shards}
        left = [name for name in self._destinations if name not in names]
        for name in left:
            self._give_up(self._destinations.pop(name), "has left the target")
        for shard in shards:
            if shard.name not in self._destinations:
                self._destinations[shard.name] = self._new_destination(shard)
        for destination in self._all:
            destination.delivery.kept.max_bytes = self._options.max_kept_bytes // len(shards)
        return bool(left)

    def _new_destination(self, shard: ShardServer) -> Destination:
        outbox = ServerOutbox(shard.channel, self._options, self._source, self._post)
        return Destination(shard, outbox, Questions(shard.channel, self._post, self._source.tables))

    def _give_up(self, destination: Destination, why: str) -> None:
        destination.is_given_up = True
        num_items = destination.outbox.close()
        counts = self._source.books.counts
        counts["lost_shards"] += 1
        counts["unconfirmed_items"] += num_items
        text = "Shard %s %s: %d unconfirmed items are given up, and may be stored there nevertheless."
        _LOG.warning(text, destination.shard.address, why, num_items)
        self._servers.refresh_soon()

    def proceed(self) -> float:
        """Do all due work of the destinations; return the seconds until more is due."""
        times = [destination.outbox.proceed() for destination in self._all]
        if self.num_written or any(destination.is_lost for destination in self._all):
            times.append(min(self._options.patience_s / 8, _CHECK_S))
        return min(times)

    def close(self) -> int:
        """Give up the unconfirmed items of all servers; return their number."""
        return sum(destination.outbox.close() for destination in self._all)

    # --------------------------------------------------------------------------------------- all servers taken together

    @property
    def _all(self) -> list[Destination]:
        return [*self._destinations.values()]

    @property
    def delivery(self) -> Delivery:
        """The delivery with the most unconfirmed items."""
        return max(self._all, key=lambda destination: destination.outbox.num_written).delivery

    @property
    def address(self) -> str:
        """The servers' addresses, separated by commas."""
        return ", ".join(destination.outbox.address for destination in self._all)

    @property
    def limit(self) -> int:
        """The least limit of a server."""
        return min(destination.outbox.limit for destination in self._all)

    @property
    def num_written(self) -> int:
        """Number of items that no server has confirmed."""
        return sum(destination.outbox.num_written for destination in self._all)

    @property
    def pending_bytes(self) -> int:
        """Memory of these items."""
        return sum(destination.outbox.pending_bytes for destination in self._all)

    @property
    def kept_bytes(self) -> int:
        """Memory of confirmed items that are kept or sent again."""
        return sum(destination.outbox.kept_bytes for destination in self._all)

    @property
    def fault(self) -> tuple[type[Exception], str] | None:
        """The error of the first server that refuses items."""
        faults = (destination.outbox.fault for destination in self._all)
        return next((fault for fault in faults if fault is not None), None)

    @property
    def progress_at(self) -> float:
        """Time of the last confirmation by any server."""
        return max(destination.outbox.progress_at for destination in self._all)


def _usable(destinations: list[Destination]) -> list[Destination]:
    """Return the destinations that new episodes may use: servers that are up and answer; all if there is none."""
    up = [each for each in destinations if each.shard.state == "up"] or destinations
    return [each for each in up if not each.is_lost] or up


def _is_given_up(origin: Origin) -> bool:
    return origin.receiver is not None and origin.receiver.is_given_up


def _is_long(origin: Origin) -> bool:
    return origin.num_sent >= _SPANNING_ITEMS
