"""One server: one connection, its verbs."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tree

from reverb_writer.arguments import check_priority, check_timeout
from reverb_writer.client import largest_priorities
from reverb_writer.client.draw_samples import CACHE_BYTES, draw, make_assembler
from reverb_writer.client.single_item import column, one_item
from reverb_writer.client.targets import Shard
from reverb_writer.deadline import Deadline
from reverb_writer.decoding.batch_assembler import BatchAssembler
from reverb_writer.decoding.samples import SampleInfo
from reverb_writer.errors import (
    ReplayTimeoutError,
    ServerUnavailableError,
    SpecError,
    StructureError,
)
from reverb_writer.leaves import stored_dtype
from reverb_writer.nests import named_leaves
from reverb_writer.protocol import messages
from reverb_writer.protocol.responses import parse
from reverb_writer.protocol.specs import check_signature, packer, packer_of, spec_tensor
from reverb_writer.tables.rate_limits import explain_samples
from reverb_writer.tables.table_info import ServerInfo, check_tables_exist
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.insert_call import insert_items
from reverb_writer.transport.server_info import request_server_info, try_server_info

# What is kept of a sample's time, to ask why none came: this part of it, and these seconds at most.
_DIAGNOSIS_PART, _DIAGNOSIS_S = 0.1, 1.0
_MAX_ASSEMBLERS = 4


class Sample(NamedTuple):
    """An item as it was sampled.

    Attributes:
        data: the table's nest, or a tuple of columns where its structure is not known; leaves [T, ...], owned by
            the caller.
        info: key, priority, probability, table size and times sampled.
    """

    data: Any
    info: SampleInfo


class Server:
    """One of the servers of a `Client`, which documents the verbs. Thread-safe."""

    def __init__(self, shard: Shard, channel: Channel, timeout_s: float) -> None:
        """Take a connection, which is this object's alone from now on."""
        self.shard = shard  # what the client's target says of the server
        self.channel = channel  # the connection; it stays when the server has another address
        self.timeout_s = timeout_s  # time-out of calls that give none, seconds
        self._lock = threading.Lock()
        self._assemblers: dict[str, BatchAssembler] = {}  # of tables that were sampled last, none that is in use

    @property
    def address(self) -> str:
        """The server's address, as given."""
        return self.channel.address

    @property
    def name(self) -> str:
        """The shard's name, which stays when its address changes."""
        return self.shard.name

    def follow(self, shard: Shard) -> None:
        """Take what the newest target says; connect to another address if it says so."""
        if shard.address != self.shard.address:
            self.channel.redirect(shard.address)
        self.shard = shard

    def request_info(self, timeout_s: float | None = None) -> ServerInfo:
        """Return the tables together with the identity of the server's process."""
        return request_server_info(self.channel, self._timeout(timeout_s))

    def insert(
        self,
        data: Any,
        priorities: Mapping[str, float],
        deadline: Deadline,
        *,
        squeeze: Any = None,
        spec: Any = None,
    ) -> None:
        """Write one item, and return when the server has it."""
        if not priorities:
            raise SpecError("`priorities` must name at least one table, got none.")
        checked = {table: check_priority(priority) for table, priority in priorities.items()}
        paths, leaves = named_leaves(data, "`data`")
        is_scalar = [False] * len(leaves) if squeeze is None else list(map(bool, tree.flatten(squeeze)))
        if len(is_scalar) != len(leaves):
            raise StructureError(
                f"`squeeze` must have a leaf for each of the {len(leaves)} of `data`, got {squeeze!r}."
            )
        columns = [
            np.asarray(leaf)[None] if single else column(path, leaf)
            for path, leaf, single in zip(paths, leaves, is_scalar, strict=True)
        ]
        if not columns:
            raise StructureError(f"`data` must have at least one leaf, got {data!r}.")
        info = self.request_info(deadline.left_s())
        check_tables_exist(checked, info, self.address)
        _check_signatures(info, checked, paths, columns, is_scalar)
        tensor = b"" if spec is None else spec_tensor(spec)
        insert_items(self.channel, [one_item(columns, is_scalar, checked, tensor)], deadline)

    def sample(
        self,
        table: str,
        num_samples: int,
        deadline: Deadline,
        *,
        remedy: str = "Start the actors or raise `timeout_s`.",
    ) -> Iterator[Sample]:
        """Sample items one after the other; an error says what they wait for, and the `remedy`."""
        until = deadline.earlier(min(_DIAGNOSIS_PART * deadline.timeout_s, _DIAGNOSIS_S))
        info = self.request_info(until.left_s(f"table `{table}`: {num_samples} samples did not come"))
        check_tables_exist([table], info, self.address)
        signature = info.tables[table].signature
        pack = None if signature is None else packer(signature)
        with self._lock:
            assembler = self._assemblers.pop(table, None) or make_assembler()
        is_whole = False
        try:
            for columns, sample_info, spec in draw(self.channel, info, table, num_samples, until, assembler):
                is_whole = True
                yield Sample((pack or packer_of(spec))(columns), sample_info)
                is_whole = False
            is_whole = True
        except ReplayTimeoutError as error:
            why = self._explain_samples(table, info, deadline, remedy)
            raise ReplayTimeoutError(f"{error} {why}") from None
        finally:
            if is_whole and assembler.cache_bytes <= CACHE_BYTES:  # an interrupt may leave it half changed
                self._keep(table, assembler)

    def mutate_priorities(
        self, table: str, updates: Mapping[int, float], deletes: Sequence[int] = (), *, deadline: Deadline
    ) -> None:
        """Change priorities and delete items; both are checked by the caller."""
        request = messages.MutatePrioritiesRequest(
            table=table,
            updates=[messages.KeyWithPriority(key=key, priority=value) for key, value in updates.items()],
            delete_keys=deletes,
        )
        self._call(messages.MUTATE_PRIORITIES, request, deadline)
        if updates:
            largest_priorities.note(self.address, table, max(updates.values()))

    def reset(self, table: str, deadline: Deadline) -> None:
        """Remove all items of a table, and set its rate limiter to zero."""
        self._call(messages.RESET, messages.ResetRequest(table=table), deadline)
        largest_priorities.forget(self.address, table)

    def checkpoint(self, deadline: Deadline) -> str:
        """Have the server write a checkpoint; return its path on the server's machine."""
        try:
            reply = self.channel.call_once(messages.CHECKPOINT, b"", deadline.left_s())
        except ServerUnavailableError as error:
            raise ServerUnavailableError(
                f"{error} If it had begun to write the checkpoint, it may finish it: look at its checkpoints before "
                "you ask again."
            ) from error
        return str(parse("CheckpointResponse", messages.CheckpointResponse, reply).checkpoint_path)

    def close(self) -> None:
        """Close the connection. Idempotent; does nothing in a forked child."""
        self.channel.close()

    def _keep(self, table: str, assembler: BatchAssembler) -> None:
        """Keep what is known of a table's chunks for the next call."""
        with self._lock:
            self._assemblers[table] = assembler
            while len(self._assemblers) > _MAX_ASSEMBLERS:
                del self._assemblers[next(iter(self._assemblers))]

    def _explain_samples(self, table: str, before: ServerInfo, deadline: Deadline, remedy: str) -> str:
        try:
            now = try_server_info(self.channel, deadline.left_s())
        except (ReplayTimeoutError, ServerUnavailableError) as error:
            return str(error)
        if now is None:
            return f"The server at {self.address} does not answer."
        return explain_samples(now, table, before, remedy=remedy)

    def _timeout(self, timeout_s: float | None) -> float:
        return self.timeout_s if timeout_s is None else check_timeout(timeout_s)

    def _call(self, method: str, request: Any, deadline: Deadline) -> bytes:
        try:
            return self.channel.call(method, request.SerializeToString(), deadline.left_s())
        except StructureError:  # there is no such table: this error names those that there are
            check_tables_exist([request.table], self.request_info(deadline.left_s()), self.address)
            raise


def _check_signatures(
    info: ServerInfo, tables: Iterable[str], paths: Sequence[str], columns: Sequence[Any], is_scalar: Sequence[bool]
) -> None:
    for table in tables:
        signature = info.tables[table].signature
        if signature is not None:
            check_signature(
                table,
                signature,
                paths,
                [stored_dtype(column.dtype) for column in columns],
                [column.shape[1:] for column in columns],
                [() if single else column.shape[:1] for column, single in zip(columns, is_scalar, strict=True)],
            )
