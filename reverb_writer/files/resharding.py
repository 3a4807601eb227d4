"""Insert the items of saved servers into other servers: a replay on M shards becomes one on N.

    saved items -> how many of each table -> an equal share for each server, checked against its room
    saved items and their chunks, one saved server after the other -> an insert stream to each server

Items keep key, priority, data and, on each server, their order. How often they were sampled, and the counts of rate
limiters, begin at zero. An item that several servers have under one key is inserted once. Of a table with `max_size` 1,
as of weights, every server gets the newest item.
"""

from __future__ import annotations

import collections
import contextlib
import math
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from reverb_writer.client.client import Client, as_client
from reverb_writer.client.server_calls import Server
from reverb_writer.deadline import Deadline
from reverb_writer.errors import FormatError, IncompleteError, SpecError
from reverb_writer.files.saved_replay import SavedReplay, open_saved
from reverb_writer.files.transferred import Transferred
from reverb_writer.protocol import messages
from reverb_writer.protocol.item_encoding import as_request
from reverb_writer.tables.rate_limits import insert_room
from reverb_writer.tables.table_info import TableInfo, check_tables_exist
from reverb_writer.transport.in_flight import InsertRequest
from reverb_writer.transport.insert_call import Inserts

Counts: TypeAlias = dict[str, int]

_MAX_PENDING = 1024  # unconfirmed items for each server
_RUN = 256  # items at most that go to one server before the next one's turn, though they share chunks


def reshard(folders: Sequence[str | os.PathLike[str]], client: Any, timeout_s: float = 60.0) -> dict[str, Counts]:
    """Insert what M servers have saved into N servers, in equal shares, as `reverb-writer reshard` does.

    Items keep key, priority and data; how often they were sampled begins at zero. An item that several servers have is
    inserted once. Of a table with `max_size` 1, as of weights, every server gets the newest item. Takes the memory of
    the largest folder.

    Args:
        folders: of each server: a checkpoint, a folder of checkpoints, of which the newest is taken, or what
            `LocalServer.save` has written.
        client: a `Client` of the servers that get the items, their addresses, or a target.
        timeout_s: how long to wait for an answer, or for progress, seconds.

    Returns:
        How many items of each table each server got, by its address.

    Raises:
        SpecError: the servers lack room, or their rate limiters would block; says what to change. Nothing changed.
        StructureError: a server lacks a table. Nothing changed.
        FormatError: something that was saved is damaged.
        ServerUnavailableError, ReplayTimeoutError: a server does not answer, or makes no progress.
        IncompleteError: a server has fewer items in the end than it should.
    """
    client, owned = as_client(client, timeout_s)
    try:
        resharding = Resharding([open_saved(Path(folder)) for folder in folders], client, timeout_s)
        collections.deque(resharding.run(), maxlen=0)
        return resharding.counts()
    finally:
        if owned:
            client.close()


@dataclass
class _Server:
    """A server that gets items."""

    shard: Server  # its connection
    inserts: Inserts  # items under way to it
    tables: Mapping[str, TableInfo]  # as they were before
    # of each table, how many more items it gets
    left: collections.Counter[str] = field(default_factory=collections.Counter)
    sent: collections.Counter[str] = field(default_factory=collections.Counter)  # of each table, how many it got
    held: dict[int, bytes] = field(default_factory=dict)  # chunks of the current run of items, encoded, by key


class Resharding:
    """Items of saved servers on their way to others.

    Attributes:
        num_items: how many there are to insert, copies not counted.
        num_twice: items that several saved servers have, which are inserted once.
    """

    def __init__(self, saved: Sequence[SavedReplay], client: Client, timeout_s: float) -> None:
        """Read all items, and find out whether the servers have room for them. Nothing is changed.

        Args:
            saved: what was saved, one for each server.
            client: of the servers that get the items.
            timeout_s: how long to wait for an answer, or for progress, seconds.

        Raises:
            SpecError: the servers lack room, or their rate limiters would block; says what to change.
            StructureError: a server lacks a table.
            FormatError: something that was saved is damaged.
            ServerUnavailableError, ReplayTimeoutError: a server does not answer.
        """
        self._saved, self._timeout_s = saved, timeout_s
        deadline = Deadline(timeout_s)
        infos = {shard: shard.request_info(deadline.left_s()) for shard in client.shards}
        self._newest: dict[str, tuple[tuple[int, int], int]] = {}  # by table: time and key
        counts = self._count()
        for shard, info in infos.items():
            check_tables_exist(counts, info, shard.address)
        self._servers = [_Server(shard, Inserts(shard.channel), info.tables) for shard, info in infos.items()]
        self._single = {name for name in counts if all(server.tables[name].max_size == 1 for server in self._servers)}
        for name in counts.keys() - self._single:
            self._share(name, counts[name])
        self.num_items = sum(counts[name] for name in counts.keys() - self._single)

    def run(self) -> Generator[Transferred, None, None]:
        """Send the items; yields each. At the end all are confirmed; if it is closed before, some may be missing.

        Raises:
            ReplayTimeoutError, ServerUnavailableError: a server makes no progress.
            FormatError: a chunk is missing.
            IncompleteError: a server has fewer items in the end than it should; another client may have removed them.
        """
        with contextlib.ExitStack() as streams:
            for server in self._servers:
                streams.callback(server.inserts.close)
            seen: set[tuple[str, int]] = set()
            for saved in self._saved:
                yield from self._send_all(saved, dict(saved.keyed_chunks()), seen)
                for server in self._servers:
                    self._release(server)
            for server in self._servers:
                server.inserts.wait(self._timeout_s, extends=True)
            self._check()

    def counts(self) -> dict[str, Counts]:
        """Return how many items of each table each server got, by its address."""
        return {server.shard.address: dict(server.sent) for server in self._servers}

    def _count(self) -> collections.Counter[str]:
        """Return how many items each table has, each key once."""
        counts: collections.Counter[str] = collections.Counter()
        seen: set[tuple[str, int]] = set()
        self.num_twice = 0
        for saved in self._saved:
            for item in saved.parsed_items(messages.PrioritizedItem):
                at = (item.inserted_at.seconds, item.inserted_at.nanos)
                self._newest[item.table] = max(self._newest.get(item.table, (at, item.key)), (at, item.key))
                if (item.table, item.key) in seen:
                    self.num_twice += 1
                else:
                    seen.add((item.table, item.key))
                    counts[item.table] += 1
        return counts

    def _share(self, table: str, num_items: int) -> None:
        """Divide the items of a table equally, as far as there is room."""
        rooms = {server.shard.address: _room(server.tables[table]) for server in self._servers}
        if num_items > sum(rooms.values()):
            raise SpecError(
                f"table `{table}`: {num_items} items were saved, and the servers have room for {sum(rooms.values())} ("
                f"{', '.join(f'{room} at {address}' for address, room in rooms.items())}). Raise its `max_size` to "
                f"{math.ceil(num_items / len(rooms))} or more on each, or empty it there."
            )
        left = num_items
        by_room = sorted(self._servers, key=lambda server: _room(server.tables[table]))
        for turn, server in enumerate(by_room):  # the one with the least room first: the others take what it cannot
            info = server.tables[table]
            server.left[table] = share = min(_room(info), -(-left // (len(by_room) - turn)))
            left -= share
            if share > (allowed := insert_room(info)):
                raise SpecError(
                    f"table `{table}`: the rate limiter at {server.shard.address} lets {allowed:,.0f} of {share:,} "
                    'items in before some are sampled. Start the servers with `rate_limiter = "min_size"`, insert the '
                    "items, save a checkpoint, and start them again with the old rate limiter and "
                    '`on_mismatch = "config"`.'
                )

    def _send_all(
        self, saved: SavedReplay, chunks: Mapping[int, bytes], seen: set[tuple[str, int]]
    ) -> Iterator[Transferred]:
        server, run, last_chunks = self._servers[0], 0, frozenset[int]()
        for item in saved.parsed_items(messages.PrioritizedItem):
            name = item.table
            if name in self._single:
                if self._newest[name][1] == item.key:
                    self._send_everywhere(item, chunks, seen)
            elif (name, item.key) not in seen:
                seen.add((name, item.key))
                its_chunks = _chunk_keys(item)
                if run >= _RUN or not server.left[name] or not last_chunks & its_chunks:
                    self._release(server)
                    server, run = max(self._servers, key=lambda one: one.left[name]), 0
                server.left[name] -= 1
                self._send(server, item, chunks)
                run, last_chunks = run + 1, its_chunks
                yield Transferred(str(item.key), _num_steps(item))

    def _send_everywhere(self, item: Any, chunks: Mapping[int, bytes], seen: set[tuple[str, int]]) -> None:
        if (item.table, item.key) not in seen:
            seen.add((item.table, item.key))
            for server in self._servers:
                if item.table in server.tables:
                    self._send(server, item, chunks)

    def _send(self, server: _Server, item: Any, chunks: Mapping[int, bytes]) -> None:
        """Send an item, and the chunks that the items of its run before did not need."""
        keys = sorted(_chunk_keys(item))
        if missing := [key for key in keys if key not in chunks]:
            raise FormatError(f"item {item.key} of table `{item.table}` needs chunk {missing[0]}, which was not saved.")
        item.ClearField("times_sampled")
        item.ClearField("inserted_at")
        row = np.frombuffer(as_request(item=item.SerializeToString()), np.uint8)[None]
        new = {key: as_request(chunk=chunks[key]) for key in keys if key not in server.held}
        encoded = {key: new[key] if key in new else server.held[key] for key in keys}
        num_bytes = row.nbytes + sum(map(len, new.values()))
        request = InsertRequest(frozenset([item.table]), item.key, [row], encoded, num_bytes)
        server.inserts.wait(self._timeout_s, max_pending=_MAX_PENDING, extends=True)
        server.inserts.write(request, hold=new)
        server.held.update(new)
        server.sent[item.table] += 1

    def _release(self, server: _Server) -> None:
        """Let the server forget the chunks of a run."""
        if server.held:
            server.inserts.write(None, release=list(server.held))
            server.held.clear()

    def _check(self) -> None:
        """See whether the servers have what was sent."""
        for server in self._servers:
            now = server.shard.request_info(self._timeout_s).tables
            for name, sent in server.sent.items():
                if name in self._single:
                    continue
                expected = server.tables[name].current_size + sent
                if name not in now or now[name].current_size < expected:
                    found = now[name].current_size if name in now else 0
                    raise IncompleteError(
                        f"table `{name}` at {server.shard.address} has {found} items, expected {expected}. If no other "
                        "client has removed or sampled any, empty it and insert the items again."
                    )


def _chunk_keys(item: Any) -> frozenset[int]:
    return frozenset(part.chunk_key for column in item.flat_trajectory.columns for part in column.chunk_slices)


def _num_steps(item: Any) -> int:
    return max((sum(part.length for part in column.chunk_slices) for column in item.flat_trajectory.columns), default=0)


def _room(table: TableInfo) -> int:
    return max(table.max_size - table.current_size, 0)
