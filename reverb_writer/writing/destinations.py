"""The servers that an observer writes to, and which episode goes to which.

    episode -> rendezvous hashing of actor and episode -> the first server that is there and has room

A server that is lost gets no more: its unconfirmed items are given up, counted, and the episodes that were under way
there are cut. The next episodes go elsewhere. A server that answers is not lost, whatever its rate limiter does.
"""

from __future__ import annotations

import collections
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence

from reverb_writer.client.client import Client
from reverb_writer.client.server_calls import Server
from reverb_writer.client.targets import rank_shards
from reverb_writer.transport.delivery import Delivery

_LOG = logging.getLogger(__package__)

_LEAST_ITEMS, _LEAST_CALLS, _MOST_ITEMS = 400, 32, 16_384  # that may be unconfirmed at a server
_AHEAD_S, _EPOCH_S = 0.1, 0.05
_LONGEST_PAUSE_S = 1.0  # between two checks, while items are under way: the target may have changed


def least_items(items_per_call: float) -> int:
    """Return the default: what 32 calls complete in the long run, 400 or more.

    A split DQN learns with up to 2,000 items and not with 16,384; see docs/decisions.md#in-flight.

    >>> least_items(1), least_items(64)
    (400, 2048)
    """
    return max(_LEAST_ITEMS, math.ceil(_LEAST_CALLS * items_per_call))


class ItemLimit:
    """A fixed number of items; or one that is larger while the server confirms more in a tenth of a second.

    An actor that does nothing but write would stand still half of the time with 400 items. One that a rate limiter
    holds up gets few confirmations, so its limit is the smallest one again a tenth of a second later. Not thread-safe.

    Attributes:
        items: the limit now.
    """

    def __init__(self, least: int, *, is_fixed: bool) -> None:
        """Take the number, which `is_fixed`, or the smallest number otherwise."""
        self.items = self._least = least
        self._is_fixed = is_fixed
        self._since = time.monotonic()
        self._before = 0  # items confirmed until then

    def update(self, acknowledged: int) -> None:
        """Follow the number of items confirmed so far."""
        now = time.monotonic()
        if self._is_fixed or now - self._since < _EPOCH_S:
            return
        rate = (acknowledged - self._before) / (now - self._since)
        self.items = max(self._least, min(int(_AHEAD_S * rate), _MOST_ITEMS))
        self._since, self._before = now, acknowledged


class Destination:
    """One server, and what is under way to it. Attributes are for the sender alone.

    Attributes:
        server: its connection.
        delivery: items under way.
        limit: how many may be.
        is_lost: whether it is out of use until it answers again.
        asked_at: when a silent server was asked last.
        num_reserved: items that it gets with the request that is under construction.
    """

    def __init__(self, server: Server, delivery: Delivery, limit: ItemLimit) -> None:
        """Begin with nothing under way."""
        self.server, self.delivery, self.limit = server, delivery, limit
        self.is_lost, self.asked_at, self.num_reserved = False, 0.0, 0

    @property
    def heard_at(self) -> float:
        """`time.monotonic()` of the server's last word; or of the moment from which one is due, if that is later."""
        return max(self.delivery.heard_at, self.delivery.flight.progress_at)

    @property
    def silent_s(self) -> float:
        """Seconds for which the server has neither confirmed nor answered anything that is due; 0 if nothing is."""
        return time.monotonic() - self.heard_at if self.delivery.flight.pending else 0.0

    def is_silent(self, patience_s: float) -> bool:
        """Whether it has been silent for so long, and to a question, too: this process may have been the slow one."""
        was_asked = self.heard_at < self.asked_at <= time.monotonic() - patience_s / 2
        return was_asked and self.silent_s >= patience_s


class Destinations:
    """The destinations of one observer. Not thread-safe: only its sender uses it."""

    def __init__(
        self,
        client: Client,
        actor_id: str,
        patience_s: float,
        new_delivery: Callable[[Server], Delivery],
        new_limit: Callable[[], ItemLimit],
        max_bytes: int,
        counts: collections.Counter[str],
    ) -> None:
        """Make a destination for each server of the client's target; `counts` is raised by what is lost."""
        self._new_limit, self._max_bytes, self._counts = new_limit, max_bytes, counts
        self._client, self._actor_id, self._patience_s, self._new_delivery = client, actor_id, patience_s, new_delivery
        self._num_episodes = 0
        self._check_at = 0.0
        self._shards: Sequence[Server] = ()
        self._destinations: dict[str, Destination] = {}
        self.follow_target()

    def __iter__(self) -> Iterator[Destination]:
        return iter(self._destinations.values())

    @property
    def num_pending(self) -> int:
        """Items written and not confirmed."""
        return sum(destination.delivery.flight.pending for destination in self)

    @property
    def has_choice(self) -> bool:
        """Whether there are several servers, or may be."""
        return len(self._destinations) > 1 or self._client.connections.may_have_several

    def follow_target(self) -> list[Destination]:
        """Make destinations for new servers; return those whose server has left the target, and give them up."""
        shards = self._client.shards
        if shards is self._shards:
            return []
        self._shards = shards
        names = {shard.name for shard in shards}
        left = [destination for name, destination in self._destinations.items() if name not in names]
        for destination in left:
            del self._destinations[destination.server.name]
            destination.is_lost = True
            self._give_up(destination, "has left the target")
        for shard in shards:
            if shard.name not in self._destinations:
                self._destinations[shard.name] = Destination(shard, self._new_delivery(shard), self._new_limit())
        return left

    def choose(self, num_items: int) -> Destination:
        """Return where the next episode goes: to the first in its order that is there and has room for its items."""
        self._num_episodes += 1
        if len(self._destinations) == 1:
            return next(iter(self._destinations.values()))
        in_use = self._destinations
        usable = {name: each for name, each in in_use.items() if each.server.shard.state == "up"} or in_use
        ranked = [usable[name] for name in rank_shards(f"{self._actor_id}/{self._num_episodes}", usable)]
        there = [destination for destination in ranked if not destination.is_lost] or ranked
        free = (destination for destination in there if self.room(destination) >= max(num_items, 1))
        return next(free, max(there, key=self.room))

    @property
    def most_room(self) -> int:
        """How many items of a new episode may be unconfirmed; of lost ones if there are no others, as `choose`."""
        there = [destination for destination in self if not destination.is_lost] or list(self)
        return max(self.room(destination) for destination in there)

    def update_limits(self) -> None:
        """Follow the confirmations."""
        for destination in self:
            destination.limit.update(destination.delivery.flight.acknowledged)

    @property
    def least_limit(self) -> int:
        """The smallest limit of a destination."""
        return min(destination.limit.items for destination in self)

    def room(self, destination: Destination) -> int:
        """Return how many further items may be unconfirmed; 0 also if too many bytes are."""
        flight = destination.delivery.flight
        if flight.pending_bytes >= self._max_bytes:
            return 0
        return max(destination.limit.items - flight.pending - destination.num_reserved, 0)

    def check_in_s(self) -> float:
        """Return in how many seconds silent servers are to be checked; infinity if nothing is under way."""
        is_needed = self.has_choice and (self.num_pending or any(each.is_lost for each in self))
        return self._check_at - time.monotonic() if is_needed else math.inf

    def check(self) -> list[Destination]:
        """Ask silent servers if it is time; return the destinations that were lost by now, whose items are given up."""
        now, again_s = time.monotonic(), min(self._patience_s, _LONGEST_PAUSE_S)
        if not self.has_choice or (now < self._check_at and self._client.shards is self._shards):
            return []
        lost = self.follow_target()
        for destination in self:
            is_due = now - destination.asked_at >= self._patience_s / 2
            if destination.is_lost:
                if destination.delivery.heard_at > destination.asked_at and destination.asked_at:
                    destination.is_lost = False
                    _LOG.info("Shard %s answers again.", destination.server.address)
                elif is_due:
                    destination.asked_at = now
                    destination.delivery.ask()
            elif (
                destination.server.shard.state == "lost" or destination.is_silent(self._patience_s)
            ) and self._has_other(destination):
                is_told = destination.server.shard.state == "lost"
                silence = f"has neither confirmed nor answered anything for {destination.silent_s:.1f} s"
                self._give_up(destination, "is called lost by the target" if is_told else silence)
                destination.delivery, destination.limit = self._new_delivery(destination.server), self._new_limit()
                destination.is_lost, destination.asked_at = True, time.monotonic()  # later than the delivery began
                lost.append(destination)
            elif destination.silent_s >= self._patience_s / 2 and is_due:
                destination.asked_at = now
                destination.delivery.ask()
            again_s = min(again_s, max(self._patience_s / 2 - destination.silent_s, self._patience_s / 8))
        self._check_at = time.monotonic() + again_s
        return lost

    def _has_other(self, destination: Destination) -> bool:
        """Return whether another destination can take the next episodes: without one, nothing is given up."""
        return any(not other.is_lost for other in self if other is not destination)

    def _give_up(self, destination: Destination, why: str) -> None:
        num_items = destination.delivery.close()
        self._counts["lost_shards"] += 1
        self._counts["unconfirmed_items"] += num_items
        text = "Shard %s %s: %d unconfirmed items are given up, and may be stored there nevertheless."
        _LOG.warning(text, destination.server.address, why, num_items)
        self._client.connections.refresh_soon()
