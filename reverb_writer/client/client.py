"""The client of a replay server, or of several with the same tables.

Each server is a `Server`. Samples come from the servers in turn, inserts go to one server after the other, and every
other call goes to all servers at once. Servers that the target says are lost are left out.

Clients of one process with the same address and options share a connection, because gRPC's channels do.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from reverb_writer.arguments import check_key, check_priority, check_timeout, integer
from reverb_writer.client.server_calls import Sample, Server
from reverb_writer.client.server_set import ServerSet, first_target, first_that_answers, on_all
from reverb_writer.client.targets import Shard, Target, source_of
from reverb_writer.client.weights import sample_shards
from reverb_writer.deadline import LEAST_S, Deadline
from reverb_writer.errors import SpecError
from reverb_writer.tables.table_info import TableInfo, merge_tables
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.wire import TLS

if TYPE_CHECKING:
    from typing_extensions import Self

_T = TypeVar("_T")


class Client:
    """A connection to a replay server, or one to each of several.

    Thread-safe. A context manager. Not usable in a forked child, where no other client can be made either if the
    parent had a client or a `LocalServer` before the fork: start children with `spawn`.

    Attributes:
        connections: to the servers.
        timeout_s: time-out of a call that gives none of its own, seconds.

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
        connect_timeout_s: float | None = None,
    ) -> None:
        """Prepare the connections; they are made when they are first needed.

        Args:
            replay: the address of a server, `host:port`, `unix:path` or `dns:host:port`; or a list of addresses of
                servers with the same tables. For servers that may change: `file:PATH`, a `Target`, or any
                `TargetSource`, whose first target the client waits for. Or an object with an address, such as a
                `LocalServer`, a `ReplayServer`, a `ReplayCluster` or a `reverb.Client`.
            tls: certificates; True for the system's; None or False for plain text.
            token: sent as bearer token with every call; needs `tls`, or a `unix:` address.
            timeout_s: time-out of each call, seconds, > 0; a call also waits for a server that is not up yet.
            use_proxy: whether `http_proxy` and the like in the environment are used.
            connect_timeout_s: time-out of the constructor, which then waits for all servers, seconds; None not to wait.

        Raises:
            SpecError: an argument can never work.
            ServerUnavailableError, ReplayTimeoutError: a server does not answer within `connect_timeout_s`, or the
                source returns no target within that time or `timeout_s`.
        """
        source, timeout_s = source_of(replay), check_timeout(timeout_s)
        first_s = timeout_s if connect_timeout_s is None else check_timeout(connect_timeout_s, "connect_timeout_s")
        deadline = Deadline(first_s)
        self.__setstate__(((source, tls, token, timeout_s, use_proxy), first_target(source, deadline)))
        if connect_timeout_s is not None:
            try:
                self.server_info(max(first_s - deadline.spent_s, LEAST_S))
            except BaseException:
                self.close()
                raise

    def __getstate__(self) -> tuple[tuple[Any, ...], Target]:
        """Return how to make a client of the same servers in another process; certificates are read there again.

        It begins with the target of this client, so that it can be made while the source is gone.
        """
        return self._arguments, self.target

    def __setstate__(self, state: tuple[tuple[Any, ...], Target]) -> None:
        """Prepare the connections."""
        self._arguments, target = state
        source, tls, token, timeout_s, use_proxy = self._arguments

        def connect(shard: Shard) -> Server:
            channel = Channel(shard.address, tls=tls, token=token, use_proxy=use_proxy)
            return Server(shard, channel, timeout_s)

        self.connections = ServerSet(source, target, connect)
        self.timeout_s = timeout_s
        self._turns = itertools.count()

    @property
    def target(self) -> Target:
        """The last target that the source has returned."""
        return self.connections.target

    @property
    def shards(self) -> tuple[Server, ...]:
        """The connections to the servers of the target, in its order."""
        return self.connections.shards

    @property
    def address(self) -> str:
        """The server's address, as given; several with commas between them."""
        return self.connections.address

    @property
    def server_address(self) -> str:
        """The same, by the name that `reverb.Client` has for it."""
        return self.address

    def server_info(self, timeout_s: float | None = None) -> dict[str, TableInfo]:
        """Return the server's tables by name.

        Tables of several servers are added up, bounds of rate limiters included; `TableInfo.servers` has each one's.
        `client.server_info()["replay"].as_scalars("replay/")` is one flat dict of numbers for a logger of metrics.

        Raises:
            ServerUnavailableError: nothing answers at the address within the time-out.
            ReplayTimeoutError: the server holds the connection but does not answer.
        """
        infos = self._all(lambda shard, deadline: shard.request_info(deadline.timeout_s), timeout_s)
        return merge_tables([info.tables for info in infos])

    def __repr__(self) -> str:
        """Return the servers' addresses; does not ask them."""
        return f"<Client of {self.address}{' (closed)' if self.connections.is_closed else ''}>"

    def insert(
        self,
        data: Any,
        priorities: Mapping[str, float],
        timeout_s: float | None = None,
        *,
        squeeze: Any = None,
    ) -> None:
        """Write one item, and return when the server has it. An insert that waits does not block another one.

        A dict or a named tuple comes back as such, because the item carries its spec. A list of columns comes back as
        a tuple. Several servers get items in turn; one that does not answer is left out.

        Args:
            data: nest whose leaves are arrays [T_i, ...]; lengths may differ from leaf to leaf, T_i >= 1. No time axis
                is added, as `reverb.Client.insert` does: for a single value pass `value[None]`.
            priorities: the tables that get the item, and its priority in each, finite and >= 0.
            timeout_s: in seconds; None for the client's.
            squeeze: nest of booleans like `data`: leaves that are one value, [...] without time; None for none.

        Raises:
            SpecError: `priorities` is empty, or a priority is invalid.
            StructureError: an unknown table, no leaf, a leaf without steps, or one that does not match a table's
                signature. Nothing changed.
            ReplayTimeoutError: not confirmed in time; says why. It is not sent again, but if the server has taken it,
                it may still be inserted.
            ServerUnavailableError: not confirmed in time, because there is no connection to the server.
            ClosedError: another thread has closed the client.
        """
        deadline = self._deadline(timeout_s)
        self._next(deadline).insert(data, priorities, deadline, squeeze=squeeze)

    def sample(self, table: str, num_samples: int = 1, timeout_s: float | None = None) -> Iterator[Sample]:
        """Sample items one after the other, each as the nest of the table's signature, else of the item's own spec.

        Several servers are sampled as if one had all items, if the table is uniform or prioritized; other tables in
        turns. From a prioritized table with `max_times_sampled` in proportion to sizes. Servers that do not answer
        within two seconds, while another does, are left out; so are those that hand out nothing now, unless none does.
        From a table with `max_times_sampled` only items that are ready are requested: one that came late would be lost.

        Args:
            table: its name.
            num_samples: number of samples, >= 1.
            timeout_s: for all waits for the server together, in seconds; None for the client's. The time that the
                caller takes between two samples does not count.

        Returns:
            The samples, as an iterator. It raises all errors below but the first.

        Raises:
            SpecError: an argument is invalid.
            ClosedError: the client is closed, or this is a forked child, also between two samples.
            ReplayTimeoutError: not all came in time; says why.
            UnsafeDataError, FormatError: a sample must not or cannot be decoded.
        """
        num_samples = integer("num_samples", num_samples, minimum=1)
        deadline = self._deadline(timeout_s)
        (first, *others) = shards = self.connections.in_state("up", "draining")
        if others:
            samples = sample_shards(shards, next(self._turns), table, num_samples, deadline)
        else:
            samples = first.sample(table, num_samples, deadline)
        return self._without_callers_time(samples, deadline, time.monotonic())

    def _without_callers_time(self, samples: Iterator[Sample], deadline: Deadline, left_at: float) -> Iterator[Sample]:
        """Yield the samples; the deadline moves by the time that the caller takes, from `left_at` on."""
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
        """Change priorities and delete items; keys that the table does not have are ignored by the server.

        Args:
            table: its name.
            updates: new priority, finite and >= 0, by key.
            deletes: keys of items to remove.
            timeout_s: in seconds; None for the client's.

        Raises:
            SpecError: a key or a priority is invalid. Nothing changed.
            StructureError: there is no such table.
        """
        checked = {check_key(key): check_priority(priority) for key, priority in (updates or {}).items()}
        keys = [check_key(key) for key in deletes]
        self._all(lambda shard, deadline: shard.mutate_priorities(table, checked, keys, deadline=deadline), timeout_s)

    def reset(self, table: str, timeout_s: float | None = None) -> None:
        """Remove all items of `table`, and set its rate limiter to zero."""
        self._all(lambda shard, deadline: shard.reset(table, deadline), timeout_s)

    def checkpoint(self, timeout_s: float | None = None) -> str:
        """Have the server write a checkpoint; return its path on the server's machine, one a line of several."""
        return "\n".join(self._all(lambda shard, deadline: shard.checkpoint(deadline), timeout_s))

    def close(self) -> None:
        """Close the connections. Idempotent, also after an interrupt; does nothing in a forked child.

        An `insert` of another thread that is under way raises `ClosedError`.
        """
        self.connections.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _all(self, verb: Callable[[Server, Deadline], _T], timeout_s: float | None) -> list[_T]:
        """Ask all servers at once and return the answers in their order; raises as `on_all`."""
        deadline = self._deadline(timeout_s)
        return on_all(self.connections.in_state("up", "draining"), lambda shard: verb(shard, deadline))

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline(self.timeout_s if timeout_s is None else check_timeout(timeout_s))

    def _next(self, deadline: Deadline) -> Server:
        """Return the server whose turn it is, or the first after it that answers; if none does, that one."""
        shards, turn = self.connections.in_state("up"), next(self._turns)
        return first_that_answers([shards[(turn + step) % len(shards)] for step in range(len(shards))], deadline)


def as_client(client: Any, timeout_s: float | None = None) -> tuple[Client, bool]:
    """Return a client for a `replay` argument, and whether it was made here, for the caller to close.

    Args:
        client: a `Client`, or what `Client` takes.
        timeout_s: for a client made here; None for the default.
    """
    if isinstance(client, Client):
        return client, False
    return Client(client, timeout_s=Client.DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s), True


def only_server(client: Client) -> Server:
    """Return the server of a client that must not have several; raise `SpecError` if it has."""
    client.connections.check_usable()
    if len(client.shards) > 1:
        raise SpecError(f"this is for a client of one server, got {client.address}. Make a client of one server.")
    return client.shards[0]
