"""Weights from the learner to the actors, through a table.

    learner: publish(nest) -> the table's only item -> actors: poll() at every step, latest() and wait() to wait
             finish()

An item describes itself (`version_items`), so an actor needs no configuration. With each version travels the largest
priority that the learner has set in each table, for actors with `priority="max"`.

One server gets a version: the first that answers, in the rendezvous order of the table's name. Readers read a server
only if its count of inserts has changed since they last read it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import tree

from reverb_writer.arguments import check_timeout, check_wait, integer
from reverb_writer.background import Outcome, in_background, logged
from reverb_writer.client.same_process import hear_priorities, priorities_set
from reverb_writer.deadline import LEAST_S, Deadline
from reverb_writer.errors import (
    FinishedError,
    ReplayTimeoutError,
    ServerUnavailableError,
    StructureError,
)
from reverb_writer.replay.client import as_client
from reverb_writer.replay.version_items import columns_of, encode_nest, read_version
from reverb_writer.shards.calls import answering, first_that_answers, sample_each
from reverb_writer.shards.targets import rank_shards
from reverb_writer.tables.table_info import ServerInfo

_LOG = logging.getLogger(__package__)
_PAUSE_S = 0.1  # between two questions of a waiting call

_Count = tuple[int, int]
"""A server's state id and its number of inserts: each publication and each restart changes it."""


class _News(NamedTuple):
    """The newest version on the servers at one moment."""

    seen: dict[str, _Count]  # by server: the count at which its version was read
    version: int = 0  # 0 if nothing was published
    nest: Any = None  # None if there are no weights
    is_last: bool = False


class Variables:
    """The newest version of a nest of arrays, kept in a table of one item. A context manager, and picklable.

    Any threads may call the methods, but only one thread may publish: of two calls at once, the older version may stay.

    `TableConfig.variables(name)` makes such a table: `max_size` 1, and items that may be sampled any number of times.

    A version is a number that grows with each publication, also when the learner or a server starts again: the first
    number of a publisher is the time in milliseconds since 1970, or larger by one than the table's number if a clock
    was set back, and each further number is larger by one. Readers take only versions with larger numbers than their
    own. So a table must have one publisher at a time.

    One of several servers gets a version: the first that is up and answers, in an order that depends only on the
    table's name. Readers look at all servers.

    Attributes:
        version: number of the version that `publish`, `latest` or `poll` has last written or returned; 0 before the
            first. If an actor records it with its actions, a dataset can compute the age of a sample's policy.

    Example:
        learner = rw.Variables("localhost:8000", "weights")
        learner.publish(network.weights)
        learner.finish()

        actor = rw.Variables("localhost:8000", "weights")
        weights = actor.latest()
        while not actor.finished:
            weights = actor.poll(weights)
    """

    def __repr__(self) -> str:
        return f"<Variables of {self._table} at {self._client.address}>"

    def __init__(
        self,
        replay: Any,
        table: str,
        timeout_s: float | None = None,
        *,
        interval_s: float = 0.1,
    ) -> None:
        """Find the table.

        Args:
            replay: a `Client`, or an address, addresses or an object that `Client` takes.
            table: name of the table.
            timeout_s: time-out of a call, in seconds; None for the client's, which is also the constructor's.
            interval_s: time between two questions of `poll` to the server, in seconds, >= 0.

        Raises:
            SpecError: a number is invalid.
            StructureError: the table does not exist, or may hold more than one item.
            ServerUnavailableError: no server answers within the time-out.
        """
        self._interval_s = check_wait(interval_s, "interval_s")
        self._client, self._owns_client = as_client(replay, timeout_s)
        self._table = table
        self._timeout_s = self._client.timeout_s if timeout_s is None else check_timeout(timeout_s)
        self._ask_at = 0.0
        self._question: Outcome[_News] | None = None  # the request of `poll` that is in flight
        self._news = _News({})  # the newest version that is known; without a nest if a call has returned it
        self._publishes_to: str | None = None
        self._last_number = 0  # the largest that `publish` has given out
        self._loaded = 0  # the version that `load_into` has loaded last
        self.version = 0
        self._lock = threading.Lock()
        try:
            shards = self._client.connections.in_state("up", "draining")
            with logged(lambda: f"table `{table}`: waiting for the server at {self._client.address}"):
                infos = answering(shards, self._client.timeout_s, [table])
            for info in infos.values():
                found = info.tables[table]
                if found.max_size != 1 or found.max_times_sampled > 0:
                    text = (
                        f"table `{table}`: max_size {found.max_size}, max_times_sampled {found.max_times_sampled}, "
                        f"expected 1 and 0 because it holds one version. Make it by `TableConfig.variables({table!r})`."
                    )
                    raise StructureError(text)  # noqa: TRY301  # as all other errors of the block
        except BaseException:
            self.close()
            raise

    def publish(self, nest: Any) -> int:
        """Make a nest the newest version; return when the server has it.

        Args:
            nest: arrays, numbers and strings in dicts with keys of type `str`, lists, tuples and named tuples, at most
                1 GB. Tensors may have gradients and be on any device. Or `bytes`, such as `torch.save` writes. Or a
                PyTorch module or another object with `state_dict()`.

        Returns:
            The version's number. The number of a failed call is not used again: a server may have that version.

        Raises:
            StructureError: Reverb cannot store the nest, or it is too large. Nothing changed.
            FormatError: the table's item was not written by `publish`. Nothing changed.
            ReplayTimeoutError: not confirmed in time.
        """
        return self._publish(nest.state_dict() if hasattr(nest, "state_dict") else nest)

    def finish(self) -> None:
        """End the run: `finished` becomes true, and `wait` returns None.

        The newest version is published again, with a larger number and marked as the last one, so actors that start
        late still get weights. A later `publish` begins a new run.

        Raises:
            ReplayTimeoutError, ServerUnavailableError: not confirmed in time.
        """
        news = self._look({}, Deadline(self._timeout_s))
        self._publish(() if news.nest is None else news.nest, newest=news.version, is_last=True)

    def _publish(self, nest: Any, *, newest: int = 0, is_last: bool = False) -> int:
        encoded, deadline = encode_nest(nest), Deadline(self._timeout_s)
        if not self._last_number:  # this machine's clock may be behind the clock of the last publisher
            newest = max(newest, self._look({}, deadline).version)
        with self._lock:  # the number is used up even if this fails, because a server may have the version
            first = 0 if self._last_number else time.time_ns() // 1_000_000
            version = self._last_number = max(newest + 1, self._last_number + 1, self.version + 1, first)
        columns = columns_of(encoded, version, priorities_set(self._addresses()), is_last=is_last)
        shards = {shard.name: shard for shard in self._client.connections.in_state("up")}
        chosen = first_that_answers([shards[name] for name in rank_shards(self._table, shards)], deadline)
        if self._publishes_to not in (None, chosen.name):
            _LOG.warning("table `%s`: publications now go to %s.", self._table, chosen.name)
        self._publishes_to = chosen.name
        chosen.server.insert(columns, {self._table: 1.0}, deadline)
        with self._lock:
            self.version = max(self.version, version)
            self._news = _News(self._news.seen, self.version, is_last=is_last)
        return version

    def _addresses(self) -> list[str]:
        return [shard.address for shard in self._client.connections.in_state("up", "draining")]

    def latest(self, timeout_s: float | None = None) -> Any:
        """Return the newest version; wait for the first one.

        Args:
            timeout_s: time-out, in seconds; None for the object's.

        Returns:
            The nest, its leaves owned by the caller. A trajectory is returned as a `Trajectory`.

        Raises:
            ReplayTimeoutError: nothing was published in time, or all answering servers have older versions than
                `version`.
            FinishedError: the run has ended, and nothing was published in it.
            FormatError: the table's item was not written by `publish`.
        """
        return self._latest(timeout_s).nest

    def _latest(self, timeout_s: float | None) -> _News:
        news = self._await(timeout_s, 0)
        if news.nest is None:
            raise FinishedError(f"table `{self._table}`: the run has ended, and nothing was published in it.")
        return news

    def wait(self, *, newer_than: int | None = None, timeout_s: float | None = None) -> Any:
        """Wait for a version with a larger number than `newer_than`, and return it.

        Args:
            newer_than: number of a version; None for `version`.
            timeout_s: time-out, in seconds; None for the object's.

        Returns:
            The nest, as `latest` returns it; None if the run has `finished`.

        Raises:
            SpecError: `newer_than` is no integer >= 0.
            ReplayTimeoutError: no newer version was published in time.
            FormatError: the table's item was not written by `publish`.
        """
        least = self.version if newer_than is None else integer("newer_than", newer_than, minimum=0)
        news = self._await(timeout_s, least)
        return None if news.is_last else news.nest

    def load_into(self, module: Any) -> bool:
        """Load the newest version into a module, unless the last call has loaded it; wait only for the first one.

        No other call is needed. A version that `latest`, `poll` or `wait` has returned is fetched again.

        Args:
            module: of PyTorch, or another object with `state_dict()` and `load_state_dict()`, with the structure of
                the published nest. Arrays become tensors if the module's leaves are tensors. Pass the same module to
                every call.

        Returns:
            Whether a version was loaded: False if there is none newer than the last one that was loaded.

        Raises:
            ReplayTimeoutError: nothing was published in time.
            FinishedError: the run has ended, and nothing was published in it.
            StructureError, FormatError: as `poll`. Errors of `load_state_dict` are raised as they are.
        """
        news = self._newer() if 0 < self.version <= self._loaded else self._latest(None)
        nest = news.nest
        if nest is None:
            return False
        if any(hasattr(leaf, "detach") for leaf in tree.flatten(module.state_dict())):
            nest = tree.map_structure(sys.modules["torch"].as_tensor, nest)  # the module has loaded it
        module.load_state_dict(nest)
        self._loaded = news.version
        return True

    def _await(self, timeout_s: float | None, newer_than: int) -> _News:
        """Ask until a version has a larger number or the run has ended."""

        def is_wanted(news: _News) -> bool:
            # If the newest version's server is gone, another one may have an older version or another run's end.
            return news.version >= self.version and (news.is_last or news.version > newer_than)

        deadline = Deadline(self._timeout_s if timeout_s is None else check_timeout(timeout_s))
        why, seen = "waiting for the server", dict[str, _Count]()
        with logged(lambda: f"table `{self._table}`: {why} at {self._client.address}"):
            while not is_wanted(news := self._look(seen, deadline)):
                seen = news.seen
                why = f"nothing {'newer ' if seen else ''}was published yet, waiting for it"
                left_s = deadline.timeout_s - deadline.spent_s
                time.sleep(max(min(left_s, _PAUSE_S), 0.0))
                # No further look, which would have no time; a pause may take longer than asked for.
                if left_s <= _PAUSE_S or deadline.spent_s + LEAST_S >= deadline.timeout_s:
                    raise ReplayTimeoutError(
                        f"table `{self._table}` {'has no newer version' if seen else 'is empty'} at "
                        f"{self._client.address} after {deadline.timeout_s:.1f} s. "
                        f"{'See whether the learner runs' if seen else 'Nothing was published yet: start the learner'}"
                        ", or raise `timeout_s`."
                    )
        with self._lock:
            self._news, self.version = news._replace(nest=None), news.version
            self._question = None  # its answer may be older
        return news

    def poll(self, default: Any = None) -> Any:
        """Return the newest version if its number is larger than `version`, else `default`.

        It never waits for the server, so it may be called at every step: every `interval_s` seconds, a thread asks for
        a new version and fetches it for a later call. Without a connection it returns `default`.

        Raises:
            StructureError: the table no longer exists.
            FormatError: the table's item was not written by `publish`.
        """
        nest = self._newer().nest
        return default if nest is None else nest

    def _newer(self) -> _News:
        """Return a version that no call has returned, or news without a nest."""
        with self._lock:
            news = self._proceed()
            if news.version <= self.version:
                return _News({})
            self._news, self.version = news._replace(nest=None), news.version
            return news

    @property
    def finished(self) -> bool:
        """Whether the learner has called `finish`; it asks as `poll` does, never waits, and raises the same errors."""
        with self._lock:
            return self._proceed().is_last

    def _proceed(self) -> _News:
        """Ask the servers if it is time, or take their answer if it has arrived; return the news. Needs the lock."""
        if self._question is None:
            now = time.monotonic()
            if now >= self._ask_at:
                self._client.connections.check_usable()
                self._ask_at = now + self._interval_s
                look = functools.partial(self._look, self._news.seen, Deadline(self._timeout_s))
                self._question = in_background(look)
        elif self._question.done():
            answer, self._question = self._question, None
            with contextlib.suppress(ReplayTimeoutError, ServerUnavailableError):
                news = answer.result()
                is_newer = news.version > max(self.version, self._news.version)
                self._news = news if is_newer else self._news._replace(seen=news.seen)
        return self._news

    def _look(self, seen: Mapping[str, _Count], deadline: Deadline) -> _News:
        """Read each server that answers and whose count is not the `seen` one."""
        counts: dict[str, _Count] = {}

        def num_wanted(shard: str, info: ServerInfo) -> int:
            table = info.tables[self._table]
            counts[shard] = info.state_id, table.rate_limiter.num_inserts
            return int(table.current_size > 0 and counts[shard] != seen.get(shard))

        read = sample_each(self._client.connections, self._table, num_wanted, deadline)
        now_seen = {**seen, **{shard: counts[shard] for shard in read}}
        if not read:
            return _News(now_seen)
        versions = [read_version(tree.flatten(sample.data), self._table) for (sample,) in read.values()]
        newest = max(versions, key=lambda version: version.number)
        hear_priorities(self._addresses(), newest.priorities)
        return _News(now_seen, newest.number, newest.nest, newest.is_last)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to make an equal object in another process, which has read no version."""
        replay = self._client.connections.source if self._owns_client else self._client
        return functools.partial(type(self), replay, self._table, self._timeout_s, interval_s=self._interval_s), ()

    def close(self) -> None:
        """Close the client if this object has made it. Idempotent."""
        if self._owns_client:
            self._client.close()

    def __enter__(self) -> Variables:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
