"""Samples of a table that lies on several shards, as if one server had all its items.

    ShardStream a \
    ShardStream b  > a shard is drawn for each sample, by its share of the mass -> read()

Each shard's samples are requested ahead, in proportion to its share. So the samples of a batch are independent of each
other, and an item's probability is that of one server with all items, see `client.weights`.

A shard's share is left out while it cannot give samples:

- at once, when its connection is lost or the target says that it is lost;
- when it has not answered a question for two seconds, until a sample comes;
- after one second in which samples are waited for and its rate limiter blocks them, until a sample comes.
"""

from __future__ import annotations

import collections
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from reverb_writer.background import Flag
from reverb_writer.client.client import Client
from reverb_writer.client.server_calls import Server
from reverb_writer.client.weights import shares
from reverb_writer.reading.server_link import ServerLink
from reverb_writer.reading.shard_stream import ShardStream
from reverb_writer.reading.stats import FetchStats
from reverb_writer.tables.table_info import ServerInfo, TableInfo

_ASK_EVERY_S = 0.5  # for the sizes, while samples are read
_LOOK_S = 0.05  # whether a shard that is waited for is to be left out
_SILENCE_S, _PATIENCE_S = 2.0, 1.0
_AHEAD = 2  # so many times the samples that the caller holds may be in flight or wait for their turn
_STALE_S = 1.0  # a sample that waits is dropped for a newer one, which tells the mass


class GlobalSampler:
    """Samples of one table on the shards of a client. It has the methods of a `SampleFetcher`, which see."""

    def __init__(
        self,
        client: Client,
        infos: Mapping[str, ServerInfo],
        table: TableInfo,
        *,
        batch_size: int,
        max_samples: int,
        num_held: Callable[[], int],
        pause: Callable[[float | None], object],
        remember: Callable[[Sequence[int], Server], object],
    ) -> None:
        """Prepare to sample; `start` begins. `infos` are of the shards that have answered, by name.

        The caller holds `max_samples` at most, and twice as many may be in flight or wait here, of each shard
        `batch_size` at first; `num_held` and `pause` are as those of `SampleFetcher`. `remember` gets the keys of
        samples, and the shard that they come from.
        """
        self.removes_items = table.max_times_sampled > 0  # whether sampling removes items from the table
        self.latest = client.shards[0]  # the shard that the last samples came from
        self._drops_stale = not self.removes_items and table.sampler_exponent is not None
        self._on_loss = client.connections.refresh_soon
        self._client, self._table, self._batch_size, self._max_samples = client, table, batch_size, max_samples
        self._num_held, self._pause, self._remember = num_held, pause, remember
        self._changed = Flag()
        self._rng = np.random.default_rng()
        self._shards: Sequence[Server] = ()
        self._streams: dict[str, ShardStream] = {}
        self._ended: list[ShardStream] = []  # of shards that have left the target
        self._rest: list[Any] = []  # their samples, if sampling removes items
        self._choices: collections.deque[tuple[ShardStream, int]] = collections.deque()  # and how often in a row
        self._share_of: dict[ShardStream, float] = {}
        self._num_items = 0  # of all shards that are not left out
        self._num_expected = 0  # samples returned that the caller has not accepted
        self._waits_since: float | None = None
        self._is_ending = self._is_stopped = self._has_begun = False
        self._infos = dict(infos)
        self._left_out: set[ShardStream] = set()  # when the choices were drawn
        self._lock = threading.Lock()  # guards `_num_expected`
        self._follow_target()

    def start(self) -> None:
        """Start to request samples."""
        self._has_begun = True
        for stream in self._streams.values():
            stream.start()

    # ------------------------------------------------------------------------------- counters, for any thread

    @property
    def links(self) -> list[ServerLink]:
        """The connections to the shards."""
        return [stream.link for stream in list(self._streams.values()) if not stream.has_ended]

    @property
    def _all(self) -> list[ShardStream]:
        return [*self._ended, *list(self._streams.values())]

    @property
    def lost_servers(self) -> set[str]:
        """Names of the shards to which there is no connection."""
        return {name for name, stream in list(self._streams.items()) if stream.is_lost}

    def count(self, stats: FetchStats) -> None:
        """Add the counters of the shards."""
        now = list(self._streams.values())
        stats.left_out_servers = sum(stream.is_lost or stream.is_late for stream in now)
        stats.in_flight_samples = sum(stream.fetcher.num_in_flight for stream in now)
        stats.ready_samples += self.num_waiting if self.removes_items or not self._is_ending else 0
        for stream in (*self._ended, *now):
            stats.lost_samples += stream.num_lost
            stats.dropped_samples += stream.num_dropped
            stats.reconnects += stream.link.reconnects
            stats.server_restarts += stream.link.server_restarts

    @property
    def num_in_flight(self) -> int:
        """Samples that were requested and `read` has not returned."""
        waiting = self.num_waiting if self.removes_items else 0
        return waiting + sum(stream.fetcher.num_in_flight for stream in list(self._streams.values()))

    @property
    def num_waiting(self) -> int:
        """Samples that have come and `read` has not returned."""
        return len(self._rest) + sum(stream.num_waiting for stream in list(self._streams.values()))

    @property
    def num_bytes(self) -> int:
        """Bytes of all messages so far."""
        return sum(stream.fetcher.num_bytes for stream in self._all)

    @property
    def num_unasked(self) -> int:
        """Samples that came although they were not requested."""
        return sum(stream.fetcher.num_unasked for stream in self._all)

    @property
    def is_done(self) -> bool:
        """Whether nothing is in flight and nothing more will be requested."""
        return self._is_stopped or (self._is_ending and not self.num_in_flight)

    # ----------------------------------------------------------------------------- for the thread that reads

    def ask(self) -> bool:
        """Wait until the caller has room for samples; return whether to `read`."""
        while not self._is_stopped and not self._is_ending:
            if self._room() > 0:
                return True
            self._pause(None)
        return not self.is_done

    def read(self) -> list[Any]:
        """Wait for the next samples of the shards that are drawn; none at the end.

        Raises:
            ReverbWriterError: a message cannot be read, or a server refuses this client.
        """
        while True:
            self._changed.clear()
            for stream in self._streams.values():
                if (error := stream.take_error()) is not None:
                    raise error
            samples = self._all_waiting() if self._is_ending else self._drawn(max(self._room(), 1))
            if samples or self.is_done:
                with self._lock:
                    self._num_expected += len(samples)
                return samples
            self._changed.wait(_LOOK_S)

    def accept(self, num_samples: int) -> None:
        """Note that `num_held` counts so many samples that `read` has returned."""
        with self._lock:
            self._num_expected -= num_samples

    def fill(self) -> None:
        """Do nothing: samples are requested as they are drawn."""

    def end(self) -> int:
        """Do nothing: each stream goes on by itself, and counts what it has lost."""
        return 0

    def stop_asking(self) -> None:
        """Ask for no more samples; those in flight can still be read."""
        self._is_ending = True
        for stream in list(self._streams.values()):
            stream.fetcher.stop_asking()
            stream.resume()
        self._changed.set()

    def stop(self) -> None:
        """End a call to `ask` or `read` in another thread, and all later ones. Idempotent."""
        self._is_ending = self._is_stopped = True
        for stream in list(self._streams.values()):
            stream.stop()
        self._changed.set()

    def _room(self) -> int:
        return self._max_samples - self._num_expected - self._num_held()

    def _all_waiting(self) -> list[Any]:
        """Return what has come when no more is requested; only samples that are lost else."""
        samples, self._rest = self._rest, []
        return samples + (self._waiting_of(self._streams.values()) if self.removes_items else [])

    def _drawn(self, num_samples: int) -> list[Any]:
        """Return samples of the shards that were drawn, in that order, as many as have come; `num_samples` at most."""
        self._follow_target()
        now = time.monotonic()
        for stream in self._streams.values():
            stream.ask(now, _ASK_EVERY_S)
        if any(stream.num_waiting and self._is_usable(stream) for stream in self._left_out):
            self._choices.clear()  # a shard is back: it gets its share at once
        samples, self._rest = self._rest, []
        num_taken = len(samples)
        taken: list[tuple[ShardStream, list[Any]]] = []
        choices = self._choices
        if not all(map(self._is_usable, self._share_of)):
            choices.clear()
        while num_taken < num_samples:
            if not choices:
                samples += self._as_one(taken)
                taken = []
                if not self._draw(num_samples - num_taken, now):
                    break
            stream, num_drawn = choices[0]
            found = stream.take(min(num_drawn, num_samples - num_taken))
            if found:
                choices.popleft()
                if len(found) < num_drawn:
                    choices.appendleft((stream, num_drawn - len(found)))
                self._waits_since = None
                taken.append((stream, found))
                num_taken += len(found)
            elif self._is_left_out(stream, now):
                choices.clear()  # they are drawn anew
            else:
                break
        return samples + self._as_one(taken)

    def _as_one(self, taken: Sequence[tuple[ShardStream, list[Any]]]) -> list[Any]:
        """Return samples with the info that one server with all items would give, and remember their shards."""
        keys: dict[ShardStream, list[int]] = collections.defaultdict(list)
        samples: list[Any] = []
        for stream, found in taken:
            samples += found
            infos = [sample.info for sample in found]
            keys[stream] += [info.item.key for info in infos]
            if len(self._share_of) > 1:  # of one, the server itself tells it
                share = self._share_of[stream] or 1.0  # 0: the server has started again since
                for info in infos:
                    info.probability *= share
                    info.table_size = self._num_items
        for stream, of_stream in keys.items():
            self._remember(of_stream, stream.server)
            self.latest = stream.server
            stream.resume()
        return samples

    def _waiting_of(self, streams: Iterable[ShardStream]) -> list[Any]:
        """Return all samples of some shards that wait, drawn or not."""
        streams = [stream for stream in streams if stream.num_waiting]
        if not self._share_of.keys() >= set(streams):  # while they are counted
            self._weigh([*dict.fromkeys((*self._share_of, *streams))])
        return self._as_one([(stream, stream.take(stream.num_waiting)) for stream in streams])

    def _draw(self, num_samples: int, now: float) -> bool:
        """Draw the shards of the next samples; return whether that can be done now."""
        streams = [stream for stream in self._streams.values() if self._is_usable(stream)]
        unknown = [stream for stream in streams if stream.num_items and stream.mean is None]
        if unknown := [stream for stream in unknown if not self._is_left_out(stream, now)]:
            return False
        streams = [stream for stream in streams if stream.mean is not None and not stream.is_late]
        self._left_out = {stream for stream in self._streams.values() if stream.is_lost or stream.is_late}
        found = self._weigh(streams)
        if not any(found):
            return False
        self._waits_since = None
        ends = np.cumsum(found)
        drawn = ends.searchsorted(self._rng.random(num_samples) * ends[-1], side="right")
        self._choices.extend([(streams[number], len(list(run))) for number, run in itertools.groupby(drawn.tolist())])
        for stream, share in self._share_of.items():
            expected = _AHEAD * share * self._max_samples
            stream.allow(math.ceil(expected + 2 * math.sqrt(expected)) + 1)
            if self._drops_stale and now - stream.told_at > _STALE_S:
                stream.drop()
            stream.resume()
        return True

    def _weigh(self, streams: Sequence[ShardStream]) -> Sequence[float]:
        """Return the shares of shards, and remember them unless all are 0."""
        sizes = [stream.num_items for stream in streams]
        found = shares(sizes, [stream.mean or 0.0 for stream in streams])
        if any(found):
            self._share_of, self._num_items = dict(zip(streams, found, strict=True)), sum(sizes)
        return found

    def _is_usable(self, stream: ShardStream) -> bool:
        """Whether a shard is connected; or has given samples that would be lost otherwise."""
        return not stream.is_lost or (self.removes_items and stream.num_waiting > 0)

    def _is_left_out(self, stream: ShardStream, now: float) -> bool:
        """Whether a shard is not to be waited for, and from now on is left out; begins a wait otherwise."""
        if not self._is_usable(stream):
            return True
        if self._waits_since is None:
            self._waits_since = now
        waited_s = now - self._waits_since
        if stream.silence_s(now) > _SILENCE_S or (stream.is_blocked and (waited_s > _PATIENCE_S or not stream.size)):
            stream.is_late = True
            self._waits_since = None
        return stream.is_late

    def _follow_target(self) -> None:
        """Begin with shards that are new in the client's target, and end with those that have left it."""
        if self._client.shards is self._shards:
            return
        self._shards = self._client.shards
        names = {shard.name for shard in self._shards}
        for name in [name for name in self._streams if name not in names]:
            stream = self._streams.pop(name)
            stream.stop()
            if self.removes_items:
                self._rest += self._waiting_of([stream])
            while stream.num_waiting:
                stream.drop()
            self._ended.append(stream)
            self._choices.clear()
        for shard in self._shards:
            if shard.name not in self._streams:
                info = self._infos.pop(shard.name, None)
                stream = ShardStream(shard, info, self._table, self._batch_size, self._changed.set, self._on_loss)
                self._streams[shard.name] = stream
                if self._has_begun:
                    stream.start()
                if self._is_ending:  # meanwhile
                    stream.fetcher.stop_asking()
                if self._is_stopped:
                    stream.stop()
