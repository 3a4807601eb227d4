"""Sample a table on several servers as if one server had all its items.

For each sample, a server is drawn with the probability of its share of the mass. Samples of each server are requested
ahead, in proportion to its share. So the samples of a batch are independent of each other, and each item has the
probability that it would have on one server with all items (`shards.weights`). A batch is in random order, so each part
of it is sampled in the same way. If a drawn server sends nothing for 0.1 s, it owes its samples: other servers give
samples meanwhile, until a whole batch is owed.

A server's share is left out, and its debt forgiven, while it cannot give samples:

- at once, when its connection is lost or the target calls it lost;
- when it has not answered a question for two seconds, until a sample arrives;
- when it has owed samples for one second because its rate limiter blocks them, until a sample arrives.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import numpy as np

from reverb_writer.errors import ClosedError
from reverb_writer.protocol.responses import NO_SAMPLES, Samples
from reverb_writer.shards.shard_feed import ShardFeed
from reverb_writer.shards.weights import mean_weight, shares
from reverb_writer.tables.table_info import TableInfo

_ASK_AFTER_S = 0.5  # ask a server for its size if its last sample is this old
_LOOK_S = 0.05  # interval of tests whether to leave an awaited server out
_SLOW_S, _PATIENCE_S, _SILENCE_S = 0.1, 1.0, 2.0
_AHEAD = 2  # samples in flight or waiting, as a multiple of the samples that the caller holds
_STALE_S = 1.0  # age at which a waiting sample is dropped for a newer one, which has the mass


class Mass:
    """The mass of one server's items, as far as it is known."""

    def __init__(self, one: ShardFeed, mean: float | None, now: float) -> None:
        """Start without a sample."""
        self.one = one
        self.size = 0  # items of its table in its last message; 0 before the first
        self.mean = mean  # mean weight of its items, see `mean_weight`; None before the first sample
        self.told_at = now  # time of the last sample, which has both
        self.asked_at = now  # time of the last question for its size
        self.waits_since: float | None = None  # time since which it owes samples or its mass
        self.num_received, self.was_lost = 0, one.stream.loss is not None  # at the last look
        self.answer: TableInfo | None = None  # the last one that was read
        self.state_id = one.stream.state_id  # the server's state when `mean` arrived

    def lacks_mass(self) -> bool:
        """Return whether its share is unknown although it has items."""
        return self.size > 0 and self.mean is None

    def is_slow(self, now: float) -> bool:
        """Whether other servers should give samples while this server owes some."""
        return self.waits_since is not None and now - self.waits_since > _SLOW_S


class ByMass:
    """Servers of a uniform or prioritized table are drawn by their share of the mass. For the thread that fetches.

    Attributes:
        is_ending: whether no more samples will be requested.
        is_starved: whether the present batch gets no more samples: never.
    """

    is_starved = False

    def __init__(self, table: TableInfo, batch_size: int, max_samples: int) -> None:
        """Begin without a draw, for batches of `batch_size`; the caller holds at most `max_samples`."""
        self.is_ending = False
        self._batch_size, self._max_samples = batch_size, max_samples
        self._removes_items, self._exponent = table.max_times_sampled > 0, table.sampler_exponent
        self._unknown_mean = 1.0 if self._exponent is None else None
        self._drops_stale = not self._removes_items and self._exponent is not None
        self._rng = np.random.default_rng()
        self._drawn = NO_SAMPLES  # samples of a batch that is not complete, in the order of their arrival
        self._masses: dict[ShardFeed, Mass] = {}
        self._share_of: dict[ShardFeed, float] = {}
        self._num_items = 0  # on all servers that are not left out

    @property
    def num_drawn(self) -> int:
        """Samples of the present batch that have been taken from their servers."""
        return len(self._drawn)

    def end_batch(self) -> str:
        """Return that samples may come from several servers."""
        return ""

    def look(self, present: Sequence[ShardFeed], now: float) -> float:
        """Note what servers have told, ask those that were not drawn for their size, leave out those that give nothing.

        Return when to look again.
        """
        is_only = len(present) == 1
        for one in present:
            if one not in self._masses:
                self._masses[one] = Mass(one, self._unknown_mean, now)
            mass = self._masses[one]
            self._note(mass, now, is_only=is_only)
            if not is_only:
                self._examine(mass, now)
        return math.inf if is_only else now + _LOOK_S

    def _note(self, mass: Mass, now: float, *, is_only: bool) -> None:
        """Note the connection of a server, and the mass that its newest sample and answer tell."""
        one, stream = mass.one, mass.one.stream
        was_lost, mass.was_lost = mass.was_lost, stream.loss is not None
        if mass.was_lost and not (was_lost or is_only or self._removes_items):
            one.drop(one.num_waiting)  # others are sampled meanwhile
        if not mass.was_lost and stream.state_id is not None and mass.state_id != stream.state_id:
            # It may have restarted without its items; also while nothing looked.
            mass.mean, mass.state_id = self._unknown_mean, stream.state_id
        has_more, mass.num_received = one.feed.num_received > mass.num_received, one.feed.num_received
        waiting = one.feed.waiting
        if has_more and waiting:
            mass.size = int(waiting.table_sizes[-1])
            priority, probability = float(waiting.priorities[-1]), float(waiting.probabilities[-1])
            mass.mean = mean_weight(self._exponent, priority, probability, mass.size)
            mass.told_at, mass.waits_since, one.is_late = now, None, False
        if stream.table is not mass.answer:
            mass.answer = stream.table
            mass.size = 0 if stream.table is None else stream.table.current_size

    def _examine(self, mass: Mass, now: float) -> None:
        """Ask a server for its size if it is time, and leave it out if it gives nothing."""
        one, stream = mass.one, mass.one.stream
        if not self._is_usable(one):
            one.forgive()
            mass.waits_since = None
            return
        if now - max(mass.told_at, mass.asked_at) >= _ASK_AFTER_S and stream.loss is None:
            mass.asked_at = now
            with contextlib.suppress(ClosedError):  # `proceed` of the feed ends the stream
                stream.ask(now)
        one.is_late = one.is_late and not one.feed.waiting
        if one.feed.waiting or not (one.due or mass.lacks_mass()):  # no one waits for it
            mass.waits_since = None
            return
        if mass.waits_since is None:
            mass.waits_since = now
        silent_since, table = stream.unanswered_since, stream.table
        is_blocked = table is not None and table.num_ready() == 0
        if (silent_since is not None and now - silent_since > _SILENCE_S) or (
            is_blocked and (now - mass.waits_since > _PATIENCE_S or not mass.size)
        ):
            one.is_late = True
            one.forgive()
            mass.waits_since = None

    def take(
        self, present: Sequence[ShardFeed], leaving: Sequence[ShardFeed], num_samples: int, now: float, *, rest: bool
    ) -> Samples:
        """Return `num_samples` samples of the drawn servers in random order, or none if fewer have arrived.

        Servers that are `leaving` have samples that would otherwise be lost. With `rest`, return the samples that have
        arrived.
        """
        if len(self._masses) > len(present) + len(leaving):  # a reference would keep the connection open
            every = {*present, *leaving}
            self._masses = {one: mass for one, mass in self._masses.items() if one in every}
            self._share_of = {one: share for one, share in self._share_of.items() if one in every}
        if len(present) == 1 and not (leaving or self._drawn):
            return present[0].take(num_samples)
        arrived = self._arrived(present, leaving, num_samples - len(self._drawn), now)
        drawn = Samples.joined([self._drawn, arrived])
        is_enough = rest or len(drawn) >= num_samples
        self._drawn = NO_SAMPLES if is_enough else drawn
        return drawn[self._rng.permutation(len(drawn))] if is_enough and drawn else NO_SAMPLES

    def _arrived(
        self, present: Sequence[ShardFeed], leaving: Sequence[ShardFeed], num_samples: int, now: float
    ) -> Samples:
        """Return at most `num_samples` samples of the drawn servers that have arrived, one server after the other."""
        every = [*leaving, *present]
        parts: list[Samples] = []
        num_missing = num_samples
        for one in every if self.is_ending and self._removes_items else leaving:
            parts.append(self._as_one(one, num_missing, every))  # they would be lost otherwise
            num_missing -= len(parts[-1])
        masses = [self._masses[one] for one in present]
        while num_missing and not self.is_ending:
            for mass in masses:
                if mass.one.due:
                    parts.append(self._as_one(mass.one, min(mass.one.due, num_missing), every))
                    mass.one.due -= len(parts[-1])
                    num_missing -= len(parts[-1])
            awaited = sum(mass.one.due for mass in masses if not mass.is_slow(now))
            owed = sum(mass.one.due for mass in masses)
            num_free = min(num_missing - awaited, self._batch_size - owed)
            if num_free <= 0 or not self._draw(masses, num_free, now):
                break
        return Samples.joined(parts)

    def _draw(self, masses: Sequence[Mass], num_samples: int, now: float) -> bool:
        """Draw the servers of the next samples; return whether a draw is possible now and one server has samples."""
        usable = [mass for mass in masses if self._is_usable(mass.one) and not mass.one.is_late]
        if any(mass.lacks_mass() for mass in usable):
            return False
        usable = [mass for mass in usable if mass.mean is not None]
        found = self._weigh(usable)
        if not any(found):
            return False
        counts = [num_samples] if len(usable) == 1 else self._rng.multinomial(num_samples, found).tolist()
        for mass, share, count in zip(usable, found, counts, strict=True):
            mass.one.due += count
            expected = _AHEAD * share * self._max_samples
            mass.one.max_samples = math.ceil(expected + 2 * math.sqrt(expected)) + 1
            if self._drops_stale and now - mass.told_at > _STALE_S and len(usable) > 1:
                mass.one.drop(1)
        return any(mass.one.due and mass.one.feed.waiting for mass in usable)

    def _weigh(self, masses: Sequence[Mass]) -> Sequence[float]:
        """Return the shares of servers, and remember them unless all are 0."""
        # Items that were sampled, removed from the table and wait here also count.
        sizes = [mass.size + (mass.one.num_waiting if self._removes_items else 0) for mass in masses]
        found = shares(sizes, [mass.mean or 0.0 for mass in masses])
        if any(found):
            self._share_of = {mass.one: share for mass, share in zip(masses, found, strict=True)}
            self._num_items = sum(sizes)
        return found

    def _as_one(self, one: ShardFeed, num_samples: int, every: Sequence[ShardFeed]) -> Samples:
        """Take samples of a server, and give them the info that one server with all items would give."""
        num_samples = min(num_samples, one.num_waiting)
        if num_samples <= 0:
            return NO_SAMPLES
        if one not in self._share_of:  # the end came before the first draw
            self._weigh([self._masses[other] for other in every])
        samples = one.take(num_samples)
        if len(self._share_of) > 1:  # one server gives the right info itself
            share = self._share_of.get(one) or 1.0  # 0: the server has started again since
            samples.probabilities = samples.probabilities * share
            samples.table_sizes = np.full(len(samples), self._num_items)
        return samples

    def _is_usable(self, one: ShardFeed) -> bool:
        """Whether a server is connected, or has given samples that would otherwise be lost."""
        return not one.is_lost or (self._removes_items and bool(one.feed.waiting))
