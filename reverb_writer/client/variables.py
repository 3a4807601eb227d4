"""Weights on their way from the learner back to the actors, through a table.

    learner: publish(nest) -> the table's only item -> actors: poll() at every step, latest() to wait

The first column of an item holds the nest's structure, so an actor needs no configuration, and the version's number.
"""

from __future__ import annotations

import functools
import threading
import time
from typing import Any, TypeAlias

import numpy as np
import tree

from reverb_writer.arguments import check_timeout, integer, number
from reverb_writer.background import Outcome, in_background
from reverb_writer.client.client import Client
from reverb_writer.client.shared_clients import as_client
from reverb_writer.client.waiting_log import logged
from reverb_writer.closing import ClosedAtExit
from reverb_writer.deadline import Deadline
from reverb_writer.errors import FormatError, ReplayTimeoutError, ServerUnavailableError, SpecError, StructureError
from reverb_writer.leaves import host_array
from reverb_writer.protocol.signatures import ArraySpec
from reverb_writer.protocol.table_specs import decode_spec, encode_spec
from reverb_writer.table_info import ServerInfo, TableInfo, check_tables_exist
from reverb_writer.transport.server_info import try_server_info

__all__ = ["MAX_BYTES", "Variables"]

_Stored: TypeAlias = tuple[int, int]  # what changes with every publication: the server's process, number of inserts

_REMEDY = "Nothing was published yet: start the learner, or raise `timeout_s`."

MAX_BYTES = 1_000_000_000
"""Size of the largest nest that can be published, in bytes."""


class Variables(ClosedAtExit):
    """The newest version of a nest of arrays, kept in a table of one item. Thread-safe; a context manager.

    The table must have `max_size` 1, and its items may be sampled any number of times: `TableConfig(name, max_size=1)`.

    Attributes:
        version: number of the version that `publish`, `latest` or `poll` has last written or returned; 0 before the
            first. An actor records it beside its actions, and a dataset makes the age of samples of it.

    Example:
        learner = rw.Variables("localhost:8000", "weights")
        learner.publish(network.weights)

        actor = rw.Variables("localhost:8000", "weights")
        weights = actor.latest()
        for step in steps:
            weights = actor.poll(weights)
    """

    def __repr__(self) -> str:
        """Return server and table."""
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
            client: a `Client` of one server, an address, or a `reverb.Client`.
            table: its name.
            timeout_s: how long a call waits at most, seconds; None for the client's.
            interval_s: how often `poll` asks the server, seconds, >= 0.
            connect_timeout_s: time-out of the constructor, which waits for the server, seconds; None for `timeout_s`.

        Raises:
            SpecError: several servers, of which only one would get the weights, or a number that is invalid.
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
        self._news: Outcome[tuple[_Stored, int, Any] | None] | None = None  # the request of `poll` that is in flight
        self._seen: _Stored | None = None
        self.version = 0
        self._lock = threading.Lock()
        try:
            _check_one_server(self._client)
            info = self._client.request_info(connect_timeout_s or self._timeout_s)
            check_tables_exist([table], info, self._client.address)
            _check_table(info.tables[table])
            self._num_published = info.tables[table].rate_limiter.num_inserts
        except BaseException:
            self.close()
            raise

    def publish(self, nest: Any, version: int | None = None) -> int:
        """Make a nest the newest version; returns when the server has it.

        Args:
            nest: of arrays, in dicts with keys of type `str`, lists, tuples and named tuples; 1 GB at most. Tensors may
                have gradients and be on any device.
            version: its number, >= 1, such as the number of updates so far; None for one more than the last, counted
                from the table's first publication on. Give it always or never.

        Returns:
            The version's number.

        Raises:
            SpecError: `version` is none. Nothing changed.
            StructureError: Reverb cannot store the nest, or it is too large. Nothing changed.
            ReplayTimeoutError: not confirmed in time.
        """
        if version is not None:
            version = integer("version", version, minimum=1)
        leaves = [host_array(leaf) for leaf in tree.flatten(nest)]
        num_bytes = sum(leaf.nbytes for leaf in leaves)
        if num_bytes > MAX_BYTES:
            raise StructureError(f"a nest of {num_bytes} bytes, expected at most {MAX_BYTES}. Publish it in parts.")
        spec = tree.unflatten_as(nest, [ArraySpec(leaf.shape, leaf.dtype) for leaf in leaves])
        if version is None:
            version = max(self._num_published, self.version) + 1
        structure = np.array([encode_spec(spec), str(version).encode()], object)
        self._client.insert([structure, *(leaf[None] for leaf in leaves)], {self._table: 1.0}, self._timeout_s)
        self.version = version
        return version

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
        timeout_s = self._timeout_s if timeout_s is None else check_timeout(timeout_s)
        stored, version, nest = self._newest(timeout_s)
        with self._lock:
            self._seen, self.version = stored, version
            self._news = None  # its answer may be older
        return nest

    def poll(self, default: Any = None) -> Any:
        """Return the newest version if it is newer than what `latest` or `poll` has returned, else `default`.

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
                    self._news = in_background(functools.partial(self._newer, self._seen))
                return default
            if not self._news.done():
                return default
            news, self._news = self._news, None
            try:
                found = news.result()
            except (ReplayTimeoutError, ServerUnavailableError):
                return default
            if found is None:
                return default
            self._seen, self.version, nest = found
            return nest

    def _newer(self, seen: _Stored | None) -> tuple[_Stored, int, Any] | None:
        """Return the newest version, unless it is the one that was seen or there is none."""
        info = try_server_info(self._client.shards[0].channel, self._timeout_s)
        stored = None if info is None else self._stored_in(info)
        return None if stored is None or stored == seen or not stored[1] else self._newest(self._timeout_s)

    def _newest(self, timeout_s: float) -> tuple[_Stored, int, Any]:
        """Return what tells it from earlier ones at least, its version's number, and the nest."""
        deadline = Deadline(timeout_s)
        self._client.check_usable()
        (shard,) = self._client.shards
        stored = self._stored_in(shard.request_info(deadline.left_s()))
        with logged(
            lambda: f"table `{self._table}`: nothing was published yet, waiting for it at {self._client.address}"
        ):
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
        return stored, int(structure[1]), tree.unflatten_as(spec, [leaf[0] for leaf in leaves])

    def _stored_in(self, info: ServerInfo) -> _Stored:
        """Return what changes with every `publish`, and with a restart of the server."""
        check_tables_exist([self._table], info, self._client.address)
        return info.state_id, info.tables[self._table].rate_limiter.num_inserts

    def close(self) -> None:
        """Close the client, if it is this object's own. Idempotent."""
        if self._owns_client:
            self._client.close()


def _check_one_server(client: Client) -> None:
    if len(client.shards) > 1:
        raise SpecError(
            f"`client` must be of one server, got one of {client.address}. Weights are kept in one place: name the "
            "server that has them."
        )


def _check_table(table: TableInfo) -> None:
    if table.max_size != 1 or table.max_times_sampled > 0:
        raise StructureError(
            f"table `{table.name}`: max_size {table.max_size}, max_times_sampled {table.max_times_sampled}, expected 1 "
            "and 0, for it keeps the newest version and hands it out to many."
        )
