"""The client of one replay server, or of several servers with the same tables.

Each server is a `Server`. Samples and inserts use the servers in turn; every other call is sent to all servers at once.
Servers that are lost in the target are left out.

Clients of one process with the same address and options share a connection because gRPC's channels do.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from reverb_writer.arguments import check_key, check_priority, check_timeout, integer
from reverb_writer.client.server_calls import Sample, Server
from reverb_writer.deadline import Deadline
from reverb_writer.errors import SpecError
from reverb_writer.shards.calls import first_that_answers, on_all, sample_shards
from reverb_writer.shards.server_set import ServerSet, ShardServer, first_target
from reverb_writer.shards.targets import Target, source_of
from reverb_writer.tables.table_info import TableInfo, merge_tables
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.wire import TLS

if TYPE_CHECKING:
    from typing_extensions import Self

_T = TypeVar("_T")


class Client:
    """A connection to one replay server, or to each of several.

    Thread-safe. A context manager. A forked child cannot use it, and can make no other client if its parent had a
    client or a `LocalServer` before the fork: start children with `spawn`.

    Attributes:
        connections: to the servers.
        timeout_s: default time-out of a call, in seconds.

    Example:
        with rw.Client("localhost:8000") as client:
            client.insert({"obs": np.zeros((3, 4), np.float32)}, {"replay": 1.0})
            print(client.server_info()["replay"].current_size)
    """

    DEFAULT_TIMEOUT_S: ClassVar[float] = 30.0

    def __init__(
        self,
        replay: Any,
        tls: TLS | bool | None = None,
        token: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        *,
        use_proxy: bool = False,
    ) -> None:
        """Prepare the connections; the first call makes them.

        Args:
            replay: the address of a server, `host:port`, `unix:path` or `dns:host:port`; or a list of addresses of
                servers with the same tables. For servers that may change: `file:PATH`, a `Target`, or any
                `TargetSource`; the client waits for its first target. Or an object with an address, such as a
                `LocalServer`, a `ReplayServer`, a `ReplayCluster` or a `reverb.Client`.
            tls: certificates; True for the system's; None or False for plain text.
            token: bearer token of every call; needs `tls`, or a `unix:` address.
            timeout_s: time-out of each call, in seconds, > 0; a call also waits for a server that is not up yet.
            use_proxy: whether to use `http_proxy` and similar variables of the environment.

        Raises:
            SpecError: an argument is invalid.
            ServerUnavailableError, ReplayTimeoutError: the source returns no target within `timeout_s`.
        """
        source, timeout_s = source_of(replay), check_timeout(timeout_s)
        target = first_target(source, Deadline(timeout_s))
        self.__setstate__(((source, tls, token, timeout_s, use_proxy), target))

    def __getstate__(self) -> tuple[tuple[Any, ...], Target]:
        """Return the arguments and the target: another process can make a client while the source is unavailable."""
        return self._arguments, self.connections.target

    def __setstate__(self, state: tuple[tuple[Any, ...], Target]) -> None:
        """Prepare the connections; certificates are read again."""
        self._arguments, target = state
        source, tls, token, timeout_s, use_proxy = self._arguments

        def connect(address: str) -> Server:
            return Server(Channel(address, tls=tls, token=token, use_proxy=use_proxy))

        self.connections = ServerSet(source, target, connect)
        self.timeout_s = timeout_s
        self._turns = itertools.count()

    @property
    def shards(self) -> tuple[ShardServer, ...]:
        """The servers of the target, in its order."""
        return self.connections.shards

    @property
    def address(self) -> str:
        """The servers' addresses, as given, separated by commas."""
        return self.connections.address

    def server_info(self, timeout_s: float | None = None) -> dict[str, TableInfo]:
        """Return the server's tables by name.

        Numbers of several servers are added, also the bounds of rate limiters; `TableInfo.servers` has each server's.
        `client.server_info()["replay"].as_scalars("replay/")` is one flat dict of numbers for a logger of metrics.

        Raises:
            ServerUnavailableError: nothing answers at the address within the time-out.
            ReplayTimeoutError: the server is connected but does not answer.
        """
        infos = self._all(lambda server, deadline: server.channel.server_info(deadline.timeout_s), timeout_s)
        return merge_tables([info.tables for info in infos])

    def __repr__(self) -> str:
        """Return the addresses, without a call."""
        return f"<Client of {self.address}{' (closed)' if self.connections.is_closed else ''}>"

    def insert(
        self,
        data: Any,
        priorities: Mapping[str, float],
        timeout_s: float | None = None,
        *,
        squeeze: Any = None,
    ) -> None:
        """Write one item, and return when the server has it. A waiting insert does not block others.

        A dict or a named tuple is sampled as such because the item carries its spec; a list of columns is sampled as
        a tuple. Several servers get items in turn; a server that does not answer is left out.

        Args:
            data: nest whose leaves are arrays [T_i, ...]; leaves may differ in length, T_i >= 1. Unlike
                `reverb.Client.insert`, no time axis is added: for a single value pass `value[None]`.
            priorities: the item's priority in each table that gets it, finite and >= 0.
            timeout_s: in seconds; None for the client's.
            squeeze: nest of booleans like `data`; true for a leaf of one value, [...] without time; None for no leaf.

        Raises:
            SpecError: `priorities` is empty, or a priority is invalid.
            StructureError: an unknown table; no leaf; or a leaf that has no steps or does not match a table's
                signature. Nothing changed.
            ReplayTimeoutError: not confirmed in time; names the cause. The item is not sent again, but the server may
                still insert it.
            ServerUnavailableError: not confirmed in time because the server cannot be reached.
            ClosedError: another thread has closed the client.
        """
        deadline = self._deadline(timeout_s)
        self._next(deadline).insert(data, priorities, deadline, squeeze=squeeze)

    def sample(self, table: str, num_samples: int = 1, timeout_s: float | None = None) -> Iterator[Sample]:
        """Sample items one by one; the data are the nest of the table's signature, or else of the item's own spec.

        A uniform or prioritized table on several servers is sampled as if one server had all items; servers of other
        tables take turns. Servers of a prioritized table with `max_times_sampled` are drawn in proportion to sizes.
        If another server answers, servers that are silent for two seconds are left out. If another server has samples
        now, servers without samples are left out. From a table with `max_times_sampled` only ready items are
        requested, because a late one would be lost.

        Args:
            table: its name.
            num_samples: number of samples, >= 1.
            timeout_s: sum of all waits for servers, in seconds, without the time that the caller takes between two
                samples; None for the client's.

        Returns:
            An iterator over the samples. It raises all errors below except the first.

        Raises:
            SpecError: an argument is invalid.
            ClosedError: the client is closed, or this is a forked child.
            ReplayTimeoutError: not all samples arrived in time; names the cause.
            UnsafeDataError, FormatError: a sample must not or cannot be decoded.
        """
        num_samples = integer("num_samples", num_samples, minimum=1)
        deadline = self._deadline(timeout_s)
        (first, *others) = shards = self.connections.in_state("up", "draining")
        if others:
            samples = sample_shards(shards, next(self._turns), table, num_samples, deadline)
        else:
            samples = first.server.sample(table, num_samples, deadline)
        return self._without_callers_time(samples, deadline, time.monotonic())

    def _without_callers_time(self, samples: Iterator[Sample], deadline: Deadline, left_at: float) -> Iterator[Sample]:
        """Yield the samples; extend the deadline by the time that the caller takes, which began at `left_at`."""
        deadline.extend(time.monotonic() - left_at)
        for sample in samples:
            left_at = time.monotonic()
            yield sample
            self.connections.check_usable()
            deadline.extend(time.monotonic() - left_at)

    def mutate_priorities(
        self,
        table: str,
        updates: Mapping[int, float] | None = None,
        deletes: Sequence[int] = (),
        timeout_s: float | None = None,
    ) -> None:
        """Change priorities and delete items; the server ignores keys that are not in the table.

        Args:
            table: its name.
            updates: new priorities by key, finite and >= 0.
            deletes: keys of items to remove.
            timeout_s: in seconds; None for the client's.

        Raises:
            SpecError: a key or a priority is invalid. Nothing changed.
            StructureError: the table does not exist.
        """
        if not isinstance(updates, Mapping | None):
            raise SpecError(f"`updates` must be a dict of priorities by key, got {updates!r}.")
        checked = {check_key(key): check_priority(priority) for key, priority in (updates or {}).items()}
        keys = [check_key(key) for key in deletes]
        self._all(lambda server, deadline: server.mutate_priorities(table, checked, keys, deadline=deadline), timeout_s)

    def reset(self, table: str, timeout_s: float | None = None) -> None:
        """Remove all items of `table`, and set its rate limiter to zero."""
        self._all(lambda server, deadline: server.reset(table, deadline), timeout_s)

    def checkpoint(self, timeout_s: float | None = None) -> str:
        """Have each server write a checkpoint; return the path on its machine, one line per server."""
        return "\n".join(self._all(lambda server, deadline: server.checkpoint(deadline), timeout_s))

    def close(self) -> None:
        """Close the connections. Idempotent, also after an interrupt; does nothing in a forked child.

        An `insert` that waits in another thread raises `ClosedError`.
        """
        self.connections.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _all(self, verb: Callable[[Server, Deadline], _T], timeout_s: float | None) -> list[_T]:
        """Call all servers at once, and return the results in the servers' order; raises as `on_all`."""
        deadline = self._deadline(timeout_s)
        return on_all(self.connections.in_state("up", "draining"), lambda shard: verb(shard.server, deadline))

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline(self.timeout_s if timeout_s is None else check_timeout(timeout_s))

    def _next(self, deadline: Deadline) -> Server:
        """Return the server whose turn it is, or the next one that answers; if none answers, the first."""
        shards, turn = self.connections.in_state("up"), next(self._turns)
        return first_that_answers([*shards[turn % len(shards) :], *shards[: turn % len(shards)]], deadline).server


def as_client(client: Any, timeout_s: float | None = None) -> tuple[Client, bool]:
    """Return a client for a `replay` argument, and whether it is new, so that the caller must close it.

    `timeout_s` is the time-out of a new client; None for the default.
    """
    if isinstance(client, Client):
        return client, False
    return Client(client, timeout_s=Client.DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s), True


def only_server(client: Client) -> Server:
    """Return the only server of a client; raise `SpecError` if it has several."""
    client.connections.check_usable()
    if len(client.shards) > 1:
        raise SpecError(f"this is for a client of one server, got {client.address}. Make a client of one server.")
    return client.shards[0].server
