"""The client of a replay server: one connection, the server's verbs."""

from __future__ import annotations

import secrets
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import grpc
import numpy as np
import tree

from reverb_writer.arguments import integer
from reverb_writer.errors import ReverbWriterError, SpecError, StructureError
from reverb_writer.priorities import check_priority
from reverb_writer.wire import messages, sample_stream
from reverb_writer.wire.channel import TLS, Channel, describe
from reverb_writer.wire.in_flight import InsertRequest
from reverb_writer.wire.insert_stream import InsertStream
from reverb_writer.wire.items import KEY_BITS, encode_chunk
from reverb_writer.wire.sample_stream import SampleInfo
from reverb_writer.wire.server_info import ServerInfo, TableInfo, request_server_info, unknown_table

__all__ = ["Client", "Sample", "as_client"]


class Sample(NamedTuple):
    """An item as it was sampled.

    Attributes:
        data: nest of the table's signature; a tuple of columns where it has none. Leaves [T, ...], owned by the caller.
        info: key, priority, probability, table size and times sampled.
    """

    data: Any
    info: SampleInfo


class Client:
    """A connection to a replay server.

    Thread-safe. Not usable in a forked child: make one there. A context manager.

    Example:
        with rw.Client("localhost:8000") as client:
            client.insert({"obs": np.zeros((3, 4), np.float32)}, {"replay": 1.0})
            print(client.server_info()["replay"].current_size)
    """

    def __init__(
        self,
        address: str,
        tls: TLS | bool | None = None,
        token: str | None = None,
        timeout_s: float = 30.0,
        *,
        use_proxy: bool = False,
    ) -> None:
        """Prepare the connection; it is made when it is first needed.

        Args:
            address: `host:port`, `unix:path` or `dns:host:port`.
            tls: certificates; True for the system's; None or False for plain text.
            token: sent as bearer token with every call; needs `tls`, or a `unix:` address.
            timeout_s: how long each call waits at most, seconds, > 0; a server that is not up yet is waited for.
            use_proxy: whether `http_proxy` and its relatives in the environment count.

        Raises:
            SpecError: an argument can never work.
        """
        self.timeout_s = check_timeout(timeout_s)
        self._channel = Channel(address, tls=tls, token=token, use_proxy=use_proxy)
        self._lock = threading.Lock()
        self._inserts: InsertStream | None = None

    @property
    def address(self) -> str:
        """The server's address, as given."""
        return self._channel.address

    def server_info(self, timeout_s: float | None = None) -> dict[str, TableInfo]:
        """Return what the server tells about its tables, by name.

        Raises:
            ServerUnavailableError: nothing answers at the address within the time-out.
            ReplayTimeoutError: the server is there but does not answer.
        """
        return self.request_info(timeout_s).tables

    def request_info(self, timeout_s: float | None = None) -> ServerInfo:
        """Return the tables together with the identity of the server's process."""
        return request_server_info(self._channel, self._timeout(timeout_s))

    def insert(
        self, data: Any, priorities: Mapping[str, float], timeout_s: float | None = None, *, squeeze: Any = None
    ) -> None:
        """Write one item, and return when the server has it.

        Args:
            data: nest whose leaves are arrays [T_i, ...]; lengths may differ from leaf to leaf, T_i >= 1.
            priorities: the tables that get the item, and its priority in each, finite and >= 0.
            timeout_s: None for the client's.
            squeeze: nest of booleans like `data`: which leaves are one value, [...] without time, here and when it is
                sampled; None for none of them.

        Raises:
            SpecError: no table, or a priority that is none.
            StructureError: an unknown table, no leaf, or a leaf without steps.
            ReplayTimeoutError: not confirmed in time; says why. The item may still arrive.
        """
        timeout_s = self._timeout(timeout_s)
        if not priorities:
            raise SpecError("`priorities` must name at least one table, got none.")
        checked = {table: check_priority(priority) for table, priority in priorities.items()}
        leaves = tree.flatten_with_path(data)
        squeezed = [False] * len(leaves) if squeeze is None else list(map(bool, tree.flatten(squeeze)))
        if len(squeezed) != len(leaves):
            raise StructureError(
                f"`squeeze` must have a leaf for each of the {len(leaves)} of `data`, got {squeeze!r}."
            )
        columns = [
            np.asarray(leaf)[None] if single else _column(path, leaf)
            for (path, leaf), single in zip(leaves, squeezed, strict=True)
        ]
        if not columns:
            raise StructureError(f"`data` must have at least one leaf, got {data!r}.")
        stream = self._insert_stream()
        unknown_table(checked, self.request_info(timeout_s), self.address)
        stream.wait_for_room(timeout_s)
        request = _one_item(columns, squeezed, checked)
        stream.write(request)
        stream.flush(timeout_s, request)

    def sample(self, table: str, num_samples: int = 1, timeout_s: float | None = None) -> Iterator[Sample]:
        """Sample items one after the other.

        A request that times out stays with the server: a table with `max_times_sampled` may give it its next item,
        which is lost then. Wait with `server_info` where each item counts.

        Args:
            table: its name.
            num_samples: how many, >= 1.
            timeout_s: for all of them together; None for the client's.

        Yields:
            Samples.

        Raises:
            ReplayTimeoutError: not all came in time.
            UnsafeDataError, FormatError: what came must not or cannot be decoded.
        """
        num_samples = integer("num_samples", num_samples, minimum=1)
        timeout_s = self._timeout(timeout_s)
        info = self.request_info(timeout_s)
        unknown_table([table], info, self.address)
        signature = info.tables[table].signature
        for columns, sample_info in sample_stream.sample(self._channel, table, num_samples, timeout_s):
            if signature is not None and len(tree.flatten(signature)) == len(columns):
                yield Sample(tree.unflatten_as(signature, columns), sample_info)
            else:
                yield Sample(tuple(columns), sample_info)

    def mutate_priorities(
        self,
        table: str,
        updates: Mapping[int, float] | None = None,
        deletes: Sequence[int] = (),
        timeout_s: float | None = None,
    ) -> None:
        """Change priorities and delete items; keys that the table does not have are ignored by the server.

        Args:
            table: its name.
            updates: new priority, finite and >= 0, by key.
            deletes: keys of items to remove.
            timeout_s: None for the client's.

        Raises:
            SpecError: a key or a priority that is none. Nothing changed.
            StructureError: there is no such table.
        """
        request = messages.MutatePrioritiesRequest(
            table=table,
            updates=[
                messages.KeyWithPriority(key=_key(key), priority=check_priority(priority))
                for key, priority in (updates or {}).items()
            ],
            delete_keys=[_key(key) for key in deletes],
        )
        self._call(messages.MUTATE_PRIORITIES, request, timeout_s)

    def reset(self, table: str, timeout_s: float | None = None) -> None:
        """Remove all items of a table and set its rate limiter to zero."""
        self._call(messages.RESET, messages.ResetRequest(table=table), timeout_s)

    def checkpoint(self, timeout_s: float | None = None) -> str:
        """Have the server write a checkpoint; return its path on the server's machine."""
        reply = self._call(messages.CHECKPOINT, messages.CheckpointRequest(), timeout_s)
        return str(messages.CheckpointResponse.FromString(reply).checkpoint_path)

    def open_stream(self, **options: Any) -> InsertStream:
        """Open an insert stream of your own, for `SequenceWriter`s; close it before the client.

        Args:
            **options: bounds and policies, see `InsertStream`.
        """
        self._channel.check_usable()
        return InsertStream(self._channel, **options)

    def close(self, timeout_s: float | None = None) -> None:
        """Close the connection. Idempotent; does nothing in a forked child.

        Raises:
            ReplayTimeoutError: an `insert` of another thread was still under way; says how many items were lost.
        """
        with self._lock:
            inserts, self._inserts = self._inserts, None
        try:
            if inserts is not None:
                inserts.close(self._timeout(timeout_s))
        finally:
            self._channel.close()

    def __enter__(self) -> Client:
        """Return the client itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _timeout(self, timeout_s: float | None) -> float:
        return self.timeout_s if timeout_s is None else check_timeout(timeout_s)

    def _insert_stream(self) -> InsertStream:
        self._channel.check_usable()
        with self._lock:
            if self._inserts is None:
                self._inserts = self.open_stream()
            return self._inserts

    def _call(self, method: str, request: Any, timeout_s: float | None) -> bytes:
        try:
            return self._channel.call(method, request.SerializeToString(), self._timeout(timeout_s))
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                unknown_table([request.table], self.request_info(timeout_s), self.address)
            raise ReverbWriterError(f"the server at {self.address} refused: {describe(error)}.") from error


def as_client(client: Any, timeout_s: float | None = None) -> tuple[Client, bool]:
    """Return a client for whatever was given, and whether it was made here and is the caller's to close.

    Args:
        client: a `Client`, an address, or anything with a `server_address`, such as `reverb.Client`.
        timeout_s: for a client made here; None for the default.
    """
    if isinstance(client, Client):
        return client, False
    address = client if isinstance(client, str) else getattr(client, "server_address", None)
    if not isinstance(address, str):
        raise SpecError(f"`client` must be a Client, an address or a reverb.Client, got {type(client).__name__}.")
    return (Client(address) if timeout_s is None else Client(address, timeout_s=timeout_s)), True


def check_timeout(timeout_s: float) -> float:
    """Return a time-out as a float.

    Raises:
        SpecError: it is no number > 0.
    """
    try:
        seconds = float(timeout_s)
    except (TypeError, ValueError):
        seconds = 0.0
    if not seconds > 0:
        raise SpecError(f"`timeout_s` must be > 0 seconds, got {timeout_s!r}. To wait for ever, pass float('inf').")
    return seconds


def _key(key: Any) -> int:
    return integer("key", key, minimum=0, maximum=(1 << 64) - 1)


def _column(path: Sequence[Any], leaf: Any) -> Any:
    array = np.asarray(leaf)
    if array.ndim == 0 or array.shape[0] == 0:
        name = "/".join(map(str, path))
        raise StructureError(
            f"leaf `{name}`: shape {array.shape}, expected [T, ...] with T >= 1. For a single value pass `value[None]`."
        )
    return array


def _one_item(columns: Sequence[Any], squeezed: Sequence[bool], priorities: Mapping[str, float]) -> InsertRequest:
    """Encode one item a table over one chunk, the columns of which may differ in length; squeezed ones have one row."""
    chunk_key, first_key, episode_id = (secrets.randbits(KEY_BITS) for _ in range(3))
    chunk = encode_chunk(chunk_key, episode_id, 0, columns)
    slices = messages.FlatTrajectory(
        columns=[
            messages.FlatTrajectory.Column(
                chunk_slices=[
                    messages.FlatTrajectory.ChunkSlice(chunk_key=chunk_key, offset=0, length=len(column), index=index)
                ],
                squeeze=squeeze,
            )
            for index, (column, squeeze) in enumerate(zip(columns, squeezed, strict=True))
        ]
    )
    rows = []
    for key, (table, priority) in enumerate(priorities.items(), first_key):
        item = messages.PrioritizedItem(key=key, table=table, priority=priority, flat_trajectory=slices)
        encoded = messages.InsertStreamRequest(items=[item]).SerializeToString()
        rows.append((key, np.frombuffer(encoded, np.uint8)[None]))
    return InsertRequest(frozenset(priorities), first_key, rows, {chunk_key: chunk}, len(chunk))
