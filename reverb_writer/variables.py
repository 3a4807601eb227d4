"""Weights on their way from the learner back to the actors, through a table.

    learner: publish(nest) -> the table's only item -> actors: poll() at every step, latest() to wait

An item holds the nest's structure in its first column, so that no one needs to be told.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import tree

from reverb_writer.arguments import check_timeout
from reverb_writer.client import as_client
from reverb_writer.errors import FormatError, StructureError
from reverb_writer.structure import decode_spec, encode_spec
from reverb_writer.wire import messages
from reverb_writer.wire.server_info import ServerInfo, TableInfo, parse_server_info, unknown_table
from reverb_writer.wire.signatures import ArraySpec

__all__ = ["MAX_BYTES", "Variables"]

MAX_BYTES = 1_000_000_000
"""Size of the largest nest that can be published, in bytes."""


class Variables:
    """The newest version of a nest of arrays, kept in a table of one item. Thread-safe; a context manager.

    The table must have `max_size` 1, and its items may be sampled without end: `TableConfig(name, max_size=1)`.

    Example:
        learner = rw.Variables("localhost:8000", "weights")
        learner.publish(network.weights)

        actor = rw.Variables("localhost:8000", "weights")
        weights = actor.latest()
        for step in steps:
            weights = actor.poll(weights)
    """

    def __init__(self, client: Any, table: str, timeout_s: float | None = None, *, interval_s: float = 0.1) -> None:
        """Find the table.

        Args:
            client: a `Client`, an address, or a `reverb.Client`.
            table: its name.
            timeout_s: how long a call waits at most, seconds; None for the client's.
            interval_s: how often `poll` asks the server, seconds.

        Raises:
            StructureError: there is no such table, or it holds more than one item.
            ServerUnavailableError: no server answers within the time-out.
        """
        self._client, self._owns_client = as_client(client, timeout_s)
        self._table = table
        self._timeout_s = self._client.timeout_s if timeout_s is None else timeout_s
        self._interval_s = interval_s
        self._ask_at = 0.0
        self._question: Any = None  # of `poll`, on its way
        self._seen: tuple[int, int] | None = None
        self._lock = threading.Lock()
        try:
            info = self._client.request_info(self._timeout_s)
            unknown_table([table], info, self._client.address)
            _check_table(info.tables[table])
        except BaseException:
            self.close()
            raise

    def publish(self, nest: Any) -> None:
        """Make a nest the newest version; returns when the server has it.

        Args:
            nest: of arrays, in dicts with keys of type `str`, lists, tuples and named tuples; 1 GB at most.

        Raises:
            StructureError: Reverb cannot store the nest, or it is too large. Nothing changed.
            ReplayTimeoutError: not confirmed in time.
        """
        leaves = [np.asarray(leaf) for leaf in tree.flatten(nest)]
        num_bytes = sum(leaf.nbytes for leaf in leaves)
        if num_bytes > MAX_BYTES:
            raise StructureError(f"a nest of {num_bytes} bytes, expected at most {MAX_BYTES}. Publish it in parts.")
        spec = tree.unflatten_as(nest, [ArraySpec(leaf.shape, leaf.dtype) for leaf in leaves])
        structure = np.array([encode_spec(spec)], object)
        self._client.insert([structure, *(leaf[None] for leaf in leaves)], {self._table: 1.0}, self._timeout_s)

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
        deadline = time.monotonic() + timeout_s
        version = self._version_in(self._client.request_info(timeout_s))
        (sample,) = self._client.sample(self._table, 1, max(deadline - time.monotonic(), 0.001))
        structure, *leaves = tree.flatten(sample.data)
        if structure.shape != (1,) or not isinstance(structure[0], bytes):
            raise FormatError(
                f"table `{self._table}`: an item that `publish` has not written. Give it a table of its own."
            )
        spec = decode_spec(structure[0])
        if len(tree.flatten(spec)) != len(leaves):
            raise FormatError(f"table `{self._table}`: {len(leaves)} arrays, expected {len(tree.flatten(spec))}.")
        with self._lock:
            self._seen = version
        return tree.unflatten_as(spec, [leaf[0] for leaf in leaves])

    def poll(self, default: Any = None) -> Any:
        """Return the newest version if it is newer than what `latest` or `poll` has returned, else `default`.

        Never waits for the server's answer, so it may be called at every step: it puts a question every `interval_s`
        seconds, and looks whether it is answered. Only what is new is waited for. While the server is gone, nothing is
        new.
        """
        with self._lock:
            question, now = self._question, time.monotonic()
            if question is None and now >= self._ask_at:
                channel = self._client.shards[0].channel
                self._question = channel.future(messages.SERVER_INFO, b"", self._timeout_s)
                self._ask_at = now + self._interval_s
            if question is None or not question.done():
                return default
            self._question = None
        if question.exception() is not None:
            return default
        version = self._version_in(parse_server_info(question.result(), now))
        return default if version == self._seen or not version[1] else self.latest()

    def _version_in(self, info: ServerInfo) -> tuple[int, int]:
        """Return what changes with every `publish`, and with a restart of the server."""
        unknown_table([self._table], info, self._client.address)
        return info.state_id, info.tables[self._table].rate_limiter.num_inserts

    def close(self) -> None:
        """Close the client, if it is this object's own. Idempotent."""
        if self._owns_client:
            self._client.close()

    def __enter__(self) -> Variables:
        """Return the object itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


def _check_table(table: TableInfo) -> None:
    if table.max_size != 1 or table.max_times_sampled > 0:
        raise StructureError(
            f"table `{table.name}`: max_size {table.max_size}, max_times_sampled {table.max_times_sampled}, expected 1 "
            "and 0, for it keeps the newest version and hands it out to many."
        )
