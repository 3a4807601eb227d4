"""Sample a table on several servers as if one server had all its items.

For each sample, a server is drawn with the probability of its share of the mass. Samples of each server are requested
ahead, in proportion to its share. So the samples of a batch are independent of each other, and each item has the
probability that it would have on one server with all items (`client.weights`). A batch is in random order, so each part
of it is sampled in the same way. If a drawn server sends nothing for
0.1 s, it owes its samples: other servers give samples meanwhile, until a whole batch is owed.

A server's share is left out, and its debt forgiven, while it cannot give samples:

- at once, when its connection is lost or the target calls it lost;
- when it has not answered a question for two seconds, until a sample arrives;
- when it has owed samples for one second because its rate limiter blocks them, until a sample arrives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from reverb_writer.client.server_calls import Server
from reverb_writer.protocol.responses import NO_SAMPLES, Samples
from reverb_writer.shards.mixer import Mixer, Source
from reverb_writer.shards.weights import mean_weight, shares
from reverb_writer.tables.table_info import TableInfo
from reverb_writer.transport.sample_stream import SampleStream

_ASK_AFTER_S = 0.5  # ask a server for its size if its last sample is this old
_LOOK_S = 0.05  # interval of tests whether to leave an awaited server out
_SLOW_S, _PATIENCE_S, _SILENCE_S = 0.1, 1.0, 2.0
_AHEAD = 2  # samples in flight or waiting, as a multiple of the samples that the caller holds
_STALE_S = 1.0  # age at which a waiting sample is dropped for a newer one, which has the mass


class _Shard(Source):
    """A server with its share of the table."""

    def __init__(self, server: Server, stream: SampleStream, max_samples: int, mean: float | None, now: float) -> None:
        """Start without samples."""
        super().__init__(server, stream, max_samples)
        self.size = 0  # items of its table in its last message; 0 before the first
        self.mean = mean  # mean weight of its items, see `mean_weight`; None before the first sample
        self.told_at = now  # time of the last sample, which has both
        self.asked_at = now  # time of the last question for its size
        self.due = 0  # samples that were drawn from it and have not arrived
        self.waits_since: float | None = None  # time since which it owes samples or its mass
        self.heard: TableInfo | None = None  # its last answer that was read
        self.hear()
        self.state_id = None if stream.info is None else stream.info.state_id  # the server's state when `mean` arrived

    def lacks_mass(self) -> bool:
        """Return whether its share is unknown although it has items."""
        return self.size > 0 and self.mean is None

    def hear(self) -> None:
        """Take the size from an answer that has arrived since the last call."""
        if self.stream.table is not self.heard:
            self.heard = self.stream.table
            self.size = 0 if self.heard is None else self.heard.current_size

    def is_slow(self, now: float) -> bool:
        """Whether other servers should give samples while this server owes some."""
        return self.waits_since is not None and now - self.waits_since > _SLOW_S

    def forgive(self) -> None:
        """Forget and count the samples that it owes."""
        self.num_forgiven += self.due
        self.due, self.waits_since = 0, None


class ByMass(Mixer):
    """Samples of uniform and prioritized tables; each server is drawn as often as its share of the mass."""

    _makes_one_server = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Begin without a draw; see `Mixer`."""
        super().__init__(*args, **kwargs)
        self._rng = np.random.default_rng()
        self._exponent = self._table.sampler_exponent
        self._unknown_mean = 1.0 if self._exponent is None else None
        self._drops_stale = not self.removes_items and self._exponent is not None
        self._drawn = NO_SAMPLES  # samples of a batch that is not complete, in the order of their arrival
        self._share_of: dict[_Shard, float] = {}
        self._num_items = 0  # on all servers that are not left out

    @property
    def num_waiting(self) -> int:
        """Samples that have arrived and were not taken."""
        return super().num_waiting + len(self._drawn)

    @property
    def num_for_batch(self) -> int:
        """Samples that have arrived for the present batch: at most those of the server with the most, and the drawn."""
        return super().num_for_batch + len(self._drawn)

    def take(self, num_samples: int, now: float, *, any_server: bool = False) -> Samples:
        """Return `num_samples` samples of the drawn servers in random order, or none if fewer have arrived.

        With `any_server`, return the samples that have arrived.
        """
        shards = self.sources
        if len(shards) == 1 and not (self._leaving or self._drawn):
            return self._taken(shards[0], num_samples)
        drawn = Samples.joined([self._drawn, self._arrived(shards, num_samples - len(self._drawn), now)])
        is_enough = any_server or len(drawn) >= num_samples
        self._drawn = NO_SAMPLES if is_enough else drawn
        return drawn[self._rng.permutation(len(drawn))] if is_enough and drawn else NO_SAMPLES

    def _arrived(self, shards: Sequence[_Shard], num_samples: int, now: float) -> Samples:
        """Return at most `num_samples` samples of the drawn servers that have arrived, one server after the other."""
        parts: list[Samples] = []
        num_missing = num_samples
        for source in [*self._leaving, *(shards if self._is_ending and self.removes_items else ())]:
            parts.append(self._as_one(source, num_missing))  # they would be lost otherwise
            num_missing -= len(parts[-1])
        while num_missing and not self._is_ending:
            for shard in shards:
                if shard.due:
                    parts.append(self._as_one(shard, min(shard.due, num_missing)))
                    shard.due -= len(parts[-1])
                    num_missing -= len(parts[-1])
            awaited = sum(shard.due for shard in shards if not shard.is_slow(now))
            owed = sum(shard.due for shard in shards)
            num_free = min(num_missing - awaited, self._batch_size - owed)
            if num_free <= 0 or not self._draw(shards, num_free, now):
                break
        return Samples.joined(parts)

    def _source(self, server: Server, stream: SampleStream, now: float) -> _Shard:
        return _Shard(server, stream, self._batch_size, self._unknown_mean, now)

    def _draw(self, shards: Sequence[_Shard], num_samples: int, now: float) -> bool:
        """Draw the servers of the next samples; return whether a draw is possible now and one server has samples."""
        usable = [shard for shard in shards if self._is_usable(shard) and not shard.is_late]
        if any(shard.lacks_mass() for shard in usable):
            return False
        usable = [shard for shard in usable if shard.mean is not None]
        found = self._weigh(usable)
        if not any(found):
            return False
        counts = [num_samples] if len(usable) == 1 else self._rng.multinomial(num_samples, found).tolist()
        for shard, count in zip(usable, counts, strict=True):
            shard.due += count
            expected = _AHEAD * self._share_of[shard] * self._max_samples
            shard.max_samples = math.ceil(expected + 2 * math.sqrt(expected)) + 1
            if self._drops_stale and now - shard.told_at > _STALE_S and len(usable) > 1:
                shard.num_dropped += len(shard.take(1))
        return any(shard.due and shard.waiting for shard in usable)

    def _weigh(self, shards: Sequence[_Shard]) -> Sequence[float]:
        """Return the shares of servers, and remember them unless all are 0."""
        # Items that were sampled, removed from the table and wait here also count.
        sizes = [shard.size + (len(shard.waiting) if self.removes_items else 0) for shard in shards]
        found = shares(sizes, [shard.mean or 0.0 for shard in shards])
        if any(found):
            self._share_of, self._num_items = dict(zip(shards, found, strict=True)), sum(sizes)
        return found

    def _as_one(self, source: _Shard, num_samples: int) -> Samples:
        """Take samples of a server, and give them the info that one server with all items would give."""
        num_samples = min(num_samples, len(source.waiting))
        if num_samples <= 0:
            return NO_SAMPLES
        if source not in self._share_of:  # the end came before the first draw
            self._weigh([*self._leaving, *self.sources])
        samples = self._taken(source, num_samples)
        if len(self._share_of) > 1:  # one server gives the right info itself
            share = self._share_of.get(source) or 1.0  # 0: the server has started again since
            samples.probabilities = samples.probabilities * share
            samples.table_sizes = np.full(len(samples), self._num_items)
        return samples

    def _is_usable(self, shard: _Shard) -> bool:
        """Whether a server is connected, or has given samples that would otherwise be lost."""
        return not shard.is_lost or (self.removes_items and bool(shard.waiting))

    def _note_samples(self, source: _Shard, samples: Samples, now: float) -> None:
        source.size = int(samples.table_sizes[-1])
        priority, probability = float(samples.priorities[-1]), float(samples.probabilities[-1])
        source.mean = mean_weight(self._exponent, priority, probability, source.size)
        source.told_at, source.is_late, source.waits_since = now, False, None

    def _note_connection(self, source: _Shard, *, was_lost: bool) -> None:
        super()._note_connection(source, was_lost=was_lost)
        stream = source.stream
        if was_lost and stream.loss is None and stream.info is not None:
            if source.state_id != stream.info.state_id:  # it may have restarted without its items
                source.mean, source.state_id = self._unknown_mean, stream.info.state_id
            if not self.removes_items and len(self._sources) > 1:
                source.num_dropped += len(source.waiting)
                source.waiting = NO_SAMPLES
        source.hear()

    def _leave(self, source: _Shard) -> None:
        source.forgive()
        super()._leave(source)

    def _look(self, now: float) -> float:
        """Ask servers that were not drawn for their size, and leave out servers that give nothing."""
        shards = self.sources
        if len(shards) == 1:
            return math.inf
        for shard in shards:
            if not self._is_usable(shard):
                shard.forgive()
                continue
            if now - max(shard.told_at, shard.asked_at) >= _ASK_AFTER_S and shard.stream.loss is None:
                shard.asked_at = now
                shard.stream.ask(now)
            shard.is_late = shard.is_late and not shard.waiting
            if shard.waiting or not (shard.due or shard.lacks_mass()):  # no one waits for it
                shard.waits_since = None
                continue
            if shard.waits_since is None:
                shard.waits_since = now
            silent_since, table = shard.stream.unanswered_since, shard.stream.table
            is_blocked = table is not None and table.num_ready() == 0
            if (silent_since is not None and now - silent_since > _SILENCE_S) or (
                is_blocked and (now - shard.waits_since > _PATIENCE_S or not shard.size)
            ):
                shard.is_late = True
                shard.forgive()
        return now + _LOOK_S
