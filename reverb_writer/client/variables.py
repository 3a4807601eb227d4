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
from reverb_writer.background import Flag, Outcome, in_background
from reverb_writer.client.client import as_client
from reverb_writer.client.on_shards import answering, first_that_answers, on_each
from reverb_writer.client.server_calls import Server
from reverb_writer.client.targets import ShardState, rank_shards
from reverb_writer.client.waiting_log import logged
from reverb_writer.deadline import Deadline
from reverb_writer.errors import FormatError, ReplayTimeoutError, ServerUnavailableError, SpecError, StructureError
from reverb_writer.leaves import host_array
from reverb_writer.protocol.signatures import ArraySpec
from reverb_writer.protocol.specs import decode_spec, encode_spec
from reverb_writer.tables.table_info import ServerInfo, TableInfo, check_tables_exist
from reverb_writer.transport.server_info import try_server_info

_LOG = logging.getLogger(__package__)
_RETRY_S = 0.05
_ANSWER_WITHIN_S = 2.0  # each of several servers
_REMEDY = "Nothing was published yet: start the learner, or raise `timeout_s`."

MAX_BYTES = 1_000_000_000
"""Size of the largest nest that can be published, in bytes."""


class _Read(NamedTuple):
    """What was read from a server."""

    version: int
    nest: Any


class _News(NamedTuple):
    """The answer to a question of `poll`."""

    seen: Mapping[str, _Count]
    read: _Read | None  # the newest version, if it is newer than the known one


_Count = tuple[int, int]
"""A server's state id and its number of inserts: it differs after each publication, and after a restart."""


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
        self._seen: Mapping[str, _Count] = {}  # by server: the count at which its version was read
        self._publishes_to: str | None = None
        self._last_number = 0  # the largest that `publish` has given out by itself
        self.version = 0
        self._lock = threading.Lock()
        try:
            for info in self._infos(connect_timeout_s or self._timeout_s).values():
                _check_table(info.tables[self._table])
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
        answered = Flag()

        def waiting() -> str:
            why = "nothing was published yet, waiting for it" if answered.is_set() else "waiting for the server"
            return f"table `{self._table}`: {why} at {self._client.address}"

        with logged(waiting):
            shards, counts = self._published(deadline, answered)
            read, failed = on_each(shards, lambda shard: self._read(shard, deadline))
        if not read:
            raise next(iter(failed.values()))
        newest = max(read.values(), key=lambda one: one.version)
        with self._lock:
            self._seen = {shard.name: counts[shard.name] for shard in read}
            self.version = newest.version
            self._news = None  # its answer may be older
        return newest.nest

    def _published(self, deadline: Deadline, answered: Flag) -> tuple[list[Server], dict[str, _Count]]:
        """Return the servers that have a version, as soon as one of several has; and their counts.

        `answered` is set while the newest question has an answer.
        """
        while True:
            answered.clear()
            infos = self._infos(deadline.left_s())
            answered.set()
            shards = [shard for shard, info in infos.items() if info.tables[self._table].current_size]
            if shards or len(infos) == len(self._shards()) == 1:
                return shards or [*infos], self._counts(infos)
            try:
                time.sleep(min(_RETRY_S, deadline.left_s()))
                deadline.left_s()
            except ReplayTimeoutError:
                text = f"table `{self._table}` is empty at {self._client.address} after {deadline.timeout_s:.1f} s."
                raise ReplayTimeoutError(f"{text} {_REMEDY}") from None

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
                    self._news = in_background(functools.partial(self._newer, self._seen, self.version))
                return default
            if not self._news.done():
                return default
            news, self._news = self._news, None
            try:
                self._seen, read = news.result()
            except (ReplayTimeoutError, ServerUnavailableError):
                return default
            if read is None:
                return default
            self.version = read.version
            return read.nest

    def _newer(self, seen: Mapping[str, _Count], version: int) -> _News:
        """Read the servers whose counts have changed; return what was seen, and the newest version if it is newer."""
        shards = self._shards()
        timeout_s = self._timeout_s if len(shards) == 1 else min(self._timeout_s, _ANSWER_WITHIN_S)
        infos, _ = on_each(shards, lambda shard: try_server_info(shard.channel, timeout_s))
        there = self._checked({shard: info for shard, info in infos.items() if info is not None})
        counts = self._counts(there)
        changed = [
            shard
            for shard, info in there.items()
            if info.tables[self._table].current_size and counts[shard.name] != seen.get(shard.name)
        ]
        deadline = Deadline(self._timeout_s)
        read, failed = on_each(changed, lambda shard: self._read(shard, deadline))
        if failed and not read:
            raise next(iter(failed.values()))
        seen = {**seen, **{shard.name: counts[shard.name] for shard in read}}
        newest = max(read.values(), key=lambda one: one.version, default=None)
        return _News(seen, newest if newest is not None and newest.version > version else None)

    def _shards(self, *states: ShardState) -> Sequence[Server]:
        self._client.check_usable()
        return self._client.in_state(*(states or ("up", "draining")))

    def _infos(self, timeout_s: float) -> dict[Server, ServerInfo]:
        """Return what the servers that answer tell; all of them must have the table."""
        return self._checked(answering(self._shards(), timeout_s))

    def _checked(self, infos: dict[Server, ServerInfo]) -> dict[Server, ServerInfo]:
        for shard, info in infos.items():
            check_tables_exist([self._table], info, shard.address)
        return infos

    def _counts(self, infos: Mapping[Server, ServerInfo]) -> dict[str, _Count]:
        return {
            shard.name: (info.state_id, info.tables[self._table].rate_limiter.num_inserts)
            for shard, info in infos.items()
        }

    def _read(self, shard: Server, deadline: Deadline) -> _Read:
        """Return the version that a server has."""
        (sample,) = shard.sample(self._table, 1, deadline, remedy=_REMEDY)
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
        return _Read(int(structure[1]), tree.unflatten_as(spec, [leaf[0] for leaf in leaves]))

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
