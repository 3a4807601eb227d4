"""Weights on their way from the learner back to the actors, through a table.

    learner: publish(nest) -> the table's only item -> actors: poll() at every step, latest() to wait

The first column of an item holds the nest's structure, so an actor needs no configuration, and the version's number.

Of several servers one gets each version: the first in the rendezvous order of the table's name that answers. Readers
compare each server's count of inserts with the count at which they have read it, and read only what has changed.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tree

from reverb_writer.arguments import check_timeout, integer, number
from reverb_writer.background import Outcome, in_background
from reverb_writer.client.client import as_client
from reverb_writer.client.on_shards import answering, first_that_answers, logged, on_each
from reverb_writer.client.server_calls import Server
from reverb_writer.client.targets import ShardState, rank_shards
from reverb_writer.deadline import Deadline
from reverb_writer.errors import FormatError, ReplayTimeoutError, ServerUnavailableError, SpecError, StructureError
from reverb_writer.leaves import host_array
from reverb_writer.protocol.signatures import ArraySpec
from reverb_writer.protocol.specs import decode_spec, encode_spec
from reverb_writer.tables.table_info import TableInfo, check_tables_exist

_LOG = logging.getLogger(__package__)
_PAUSE_S = (0.05, 0.5)  # between two questions of `latest`: at first, and at most

MAX_BYTES = 1_000_000_000
"""Size of the largest nest that can be published, in bytes."""


_Count = tuple[int, int]
"""A server's state id and its number of inserts: it differs after each publication, and after a restart."""


class _News(NamedTuple):
    """What a look at the servers has brought."""

    seen: Mapping[str, _Count]  # by server: the count at which its version was read
    version: int  # of the newest version that was read; 0 if none was
    nest: Any


class Variables:
    """The newest version of a nest of arrays, kept in a table of one item. Thread-safe; a context manager.

    The table must have `max_size` 1, and its items may be sampled any number of times: `TableConfig(name, max_size=1)`.

    A version is a number that grows with each publication, also when the learner or a server starts again: the first
    number of a publisher is the time in milliseconds since 1970, and each further number is larger by one. Readers take
    only a version with a larger number than the one that they have. So a table must have one publisher at a time.

    Of several servers one gets each version: the first, in an order that depends on the table's name alone, that is up
    and answers. Readers look at all servers.

    Attributes:
        version: number of the version that `publish`, `latest` or `poll` has last written or returned; 0 before the
            first. An actor records it beside its actions, from which a dataset computes how old a sample's policy is.

    Example:
        learner = rw.Variables("localhost:8000", "weights")
        learner.publish(network.weights)

        actor = rw.Variables("localhost:8000", "weights")
        weights = actor.latest()
        for step in steps:
            weights = actor.poll(weights)
    """

    def __repr__(self) -> str:
        return f"<Variables of {self._table} at {self._client.address}>"

    def __init__(
        self,
        client: Any,
        table: str,
        timeout_s: float | None = None,
        *,
        interval_s: float = 0.1,
        connect_timeout_s: float | None = None,
    ) -> None:
        """Find the table.

        Args:
            client: a `Client`, an address or several, a target, or a `reverb.Client`.
            table: its name.
            timeout_s: how long a call waits at most, seconds; None for the client's.
            interval_s: how often `poll` asks the server, seconds, >= 0.
            connect_timeout_s: time-out of the constructor, which waits for the server, seconds; None for `timeout_s`.

        Raises:
            SpecError: a number is invalid.
            StructureError: there is no such table, or it holds more than one item.
            ServerUnavailableError: no server answers within the time-out.
        """
        self._interval_s = number("interval_s", interval_s)
        if self._interval_s < 0:
            raise SpecError(f"`interval_s` must be >= 0 seconds, got {interval_s!r}.")
        if connect_timeout_s is not None:
            connect_timeout_s = check_timeout(connect_timeout_s, "connect_timeout_s")
        self._client, self._owns_client = as_client(client, timeout_s)
        self._table = table
        self._timeout_s = self._client.timeout_s if timeout_s is None else check_timeout(timeout_s)
        self._ask_at = 0.0
        self._news: Outcome[_News] | None = None  # the request of `poll` that is in flight
        self._seen: Mapping[str, _Count] = {}
        self._publishes_to: str | None = None
        self._last_number = 0  # the largest that `publish` has given out by itself
        self.version = 0
        self._lock = threading.Lock()
        try:
            for shard, info in answering(self._shards(), connect_timeout_s or self._timeout_s).items():
                check_tables_exist([table], info, shard.address)
                _check_table(info.tables[table])
        except BaseException:
            self.close()
            raise

    def publish(self, nest: Any, version: int | None = None) -> int:
        """Make a nest the newest version; returns when the server has it.

        Args:
            nest: of arrays, in dicts with keys of type `str`, lists, tuples and named tuples; 1 GB at most. Tensors may
                have gradients and be on any device.
            version: its number, larger than all before it, such as the number of updates so far; None for one more than
                the last, or for the first the time in milliseconds. Give it always or never. With None the number of a
                call that fails is not used again: a server may have got that version.

        Returns:
            The version's number.

        Raises:
            SpecError: `version` is no integer >= 1, or not larger than `Variables.version`. Nothing changed.
            StructureError: Reverb cannot store the nest, or it is too large. Nothing changed.
            ReplayTimeoutError: not confirmed in time.
        """
        if version is not None:
            hint = "Readers take only larger numbers than the one that they have."
            version = integer("version", version, minimum=self.version + 1, hint=hint)
        leaves = [host_array(leaf) for leaf in tree.flatten(nest)]
        num_bytes = sum(leaf.nbytes for leaf in leaves)
        if num_bytes > MAX_BYTES:
            raise StructureError(f"a nest of {num_bytes} bytes, expected at most {MAX_BYTES}. Publish it in parts.")
        spec = tree.unflatten_as(nest, [ArraySpec(leaf.shape, leaf.dtype) for leaf in leaves])
        encoded = encode_spec(spec)
        with self._lock:  # taken for good, also if this fails: a server may have the version all the same
            if version is None:
                first = 0 if self._last_number else time.time_ns() // 1_000_000
                version = self._last_number = max(self._last_number + 1, self.version + 1, first)
        structure = np.array([encoded, str(version).encode()], object)
        self._insert([structure, *(leaf[None] for leaf in leaves)])
        with self._lock:
            self.version = max(self.version, version)
        return version

    def _insert(self, data: list[Any]) -> None:
        """Insert an item on the first server that answers, in the order of the table's name."""
        deadline = Deadline(self._timeout_s)
        shards = {shard.name: shard for shard in self._shards("up")}
        chosen = first_that_answers([shards[name] for name in rank_shards(self._table, shards)], deadline)
        if self._publishes_to not in (None, chosen.name):
            _LOG.warning("table `%s`: publications now go to %s.", self._table, chosen.name)
        self._publishes_to = chosen.name
        chosen.insert(data, {self._table: 1.0}, deadline)

    def latest(self, timeout_s: float | None = None) -> Any:
        """Return the newest version; wait for the first one.

        Args:
            timeout_s: seconds to wait at most; None for the object's.

        Returns:
            The nest, its leaves owned by the caller. A trajectory comes as `Trajectory`.

        Raises:
            ReplayTimeoutError: nothing was published in time.
            FormatError: what is in the table was not written by `publish`.
        """
        deadline = Deadline(self._timeout_s if timeout_s is None else check_timeout(timeout_s))
        pause_s, longest_s = _PAUSE_S
        why = "waiting for the server"
        with logged(lambda: f"table `{self._table}`: {why} at {self._client.address}"):
            while not (news := self._look({}, deadline)).version:
                why = "nothing was published yet, waiting for it"
                time.sleep(min(pause_s, max(deadline.timeout_s - deadline.spent_s, 0.0)))
                if deadline.spent_s >= deadline.timeout_s:
                    raise ReplayTimeoutError(
                        f"table `{self._table}` is empty at {self._client.address} after {deadline.timeout_s:.1f} s. "
                        "Nothing was published yet: start the learner, or raise `timeout_s`."
                    )
                pause_s = min(2 * pause_s, longest_s)
        with self._lock:
            self._seen, self.version = news.seen, news.version
            self._news = None  # its answer may be older
        return news.nest

    def poll(self, default: Any = None) -> Any:
        """Return the newest version if its number is larger than that of `version`, else `default`.

        Never waits for the server, so it may be called at every step: it has a thread ask every `interval_s` seconds,
        and fetch a new version, for one of the next calls. Without a connection it returns `default`.

        Raises:
            StructureError: the table does not exist any more.
            FormatError: what is in the table was not written by `publish`.
        """
        with self._lock:
            if self._news is None:
                now = time.monotonic()
                if now >= self._ask_at:
                    self._client.check_usable()
                    self._ask_at = now + self._interval_s
                    self._news = in_background(functools.partial(self._look, self._seen, Deadline(self._timeout_s)))
                return default
            if not self._news.done():
                return default
            answer, self._news = self._news, None
            try:
                news = answer.result()
            except (ReplayTimeoutError, ServerUnavailableError):
                return default
            self._seen = news.seen
            if news.version <= self.version:
                return default
            self.version = news.version
            return news.nest

    def _look(self, seen: Mapping[str, _Count], deadline: Deadline) -> _News:
        """Read the servers that answer and whose counts are not those that were `seen`."""
        changed: dict[Server, _Count] = {}
        for shard, info in answering(self._shards(), deadline.left_s()).items():
            check_tables_exist([self._table], info, shard.address)
            table = info.tables[self._table]
            count = info.state_id, table.rate_limiter.num_inserts
            if table.current_size and count != seen.get(shard.name):
                changed[shard] = count
        read, failed = on_each([*changed], lambda shard: self._read(shard, deadline))
        if failed and not read:
            raise next(iter(failed.values()))
        seen = {**seen, **{shard.name: changed[shard] for shard in read}}
        version, nest = max(read.values(), key=lambda one: one[0], default=(0, None))
        return _News(seen, version, nest)

    def _shards(self, *states: ShardState) -> Sequence[Server]:
        self._client.check_usable()
        return self._client.in_state(*(states or ("up", "draining")))

    def _read(self, shard: Server, deadline: Deadline) -> tuple[int, Any]:
        """Return the version that a server has, and its nest."""
        (sample,) = shard.sample(self._table, 1, deadline)
        structure, *leaves = tree.flatten(sample.data)
        if (
            structure.shape != (2,)
            or not all(isinstance(part, bytes) for part in structure)
            or not structure[1].isdigit()
        ):
            raise FormatError(
                f"table `{self._table}`: an item that `publish` has not written. Give it a table of its own."
            )
        spec = decode_spec(structure[0])
        if len(tree.flatten(spec)) != len(leaves):
            raise FormatError(f"table `{self._table}`: {len(leaves)} arrays, expected {len(tree.flatten(spec))}.")
        return int(structure[1]), tree.unflatten_as(spec, [leaf[0] for leaf in leaves])

    def close(self) -> None:
        """Close the client, if it is this object's own. Idempotent."""
        if self._owns_client:
            self._client.close()

    def __enter__(self) -> Variables:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_table(table: TableInfo) -> None:
    if table.max_size != 1 or table.max_times_sampled > 0:
        raise StructureError(
            f"table `{table.name}`: max_size {table.max_size}, max_times_sampled {table.max_times_sampled}, expected 1 "
            "and 0 because it holds one version, which many actors read."
        )
