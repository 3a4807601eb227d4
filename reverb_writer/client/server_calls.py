"""One server: its connection and its verbs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reverb_writer.arguments import check_priority
from reverb_writer.background import Flag
from reverb_writer.client.same_process import forget_priorities, note_priority
from reverb_writer.client.whole_items import item_request, read_item
from reverb_writer.deadline import Deadline
from reverb_writer.decoding.batch_assembler import MAX_SAMPLE_BYTES, BatchAssembler
from reverb_writer.decoding.samples import SampleInfo
from reverb_writer.errors import (
    ReplayTimeoutError,
    ServerUnavailableError,
    SpecError,
    StructureError,
)
from reverb_writer.protocol import messages
from reverb_writer.protocol.responses import Samples, parse
from reverb_writer.tables.table_info import check_tables_exist
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.sample_stream import SampleStream
from reverb_writer.transport.single_request import InsertStreams

_LOG = logging.getLogger(__package__)

_LOOK_EVERY_S = 0.2  # interval of questions for the cause of a wait
_MAX_IN_FLIGHT = 2048  # samples; more are requested when half have arrived
_CACHE_BYTES = 64 << 20  # limit of a table's decoded chunks; one larger sample may exceed it


class _Sample(NamedTuple):
    data: Any
    info: SampleInfo


class Sample(_Sample):
    """A sampled item, which can be unpacked: `data, info = sample`.

    Attributes:
        data: the table's nest, or a tuple of columns if its structure is unknown; leaves [T, ...], owned by the caller.
        info: key, priority, probability, table size and times sampled.
        kinds: uint8 [T], the kinds of the rows (`reverb_writer.rows`); None if the writer stored none.
    """

    kinds: npt.NDArray[np.uint8] | None = None

    @classmethod
    def of(cls, data: Any, info: SampleInfo, kinds: npt.NDArray[np.uint8] | None) -> Sample:
        """Return a sample whose rows have these kinds."""
        sample = cls(data, info)
        sample.kinds = kinds
        return sample

    def _replace(self, **fields: Any) -> Sample:
        """Return a sample with other fields and the same kinds."""
        return self.of(*super()._replace(**fields), self.kinds)


class Server:
    """A server of a `Client`, which documents the verbs. Thread-safe."""

    def __init__(self, channel: Channel) -> None:
        """Take the ownership of a connection."""
        self.channel = channel  # another address does not replace it
        self._streams = InsertStreams(channel)
        self._assemblers: dict[str, BatchAssembler] = {}  # unused ones by table, with decoded chunks of the table

    @property
    def address(self) -> str:
        """The server's address, as given."""
        return self.channel.address

    def insert(
        self,
        data: Any,
        priorities: Mapping[str, float],
        deadline: Deadline,
        *,
        squeeze: Any = None,
    ) -> None:
        """Write one item, and return when the server has it; the item carries its spec if the columns have names."""
        if not isinstance(priorities, Mapping) or not priorities:
            raise SpecError(f'`priorities` must name tables, such as {{"replay": 1.0}}, got {priorities!r}.')
        checked = {table: check_priority(priority) for table, priority in priorities.items()}
        layout, columns = read_item(data, squeeze)
        with self._streams.one(checked, lambda: self.channel.server_info(deadline.left_s())) as stream:
            check_tables_exist(checked, stream.info, self.address)
            layout.check(columns, {table: stream.info.tables[table].signature for table in checked})
            stream.insert(item_request(layout, columns, checked), deadline.left_s())

    def sample(self, table: str, num_samples: int, deadline: Deadline) -> Iterator[Sample]:
        """Sample items one by one; an error names the cause of the wait.

        The deadline bounds each wait. The caller may extend it between two samples, so the stream has no deadline.
        """
        num_used = num_read = 0

        def missing() -> str:
            return f"table `{table}`: {num_samples - num_used} of {num_samples} samples did not come"

        def left_s() -> float:
            return deadline.left_s(missing())

        info = self.channel.server_info(left_s())
        check_tables_exist([table], info, self.address)
        signature = info.tables[table].signature
        removes_items = info.tables[table].max_times_sampled > 0
        changed = Flag()
        stream = SampleStream(
            self.channel, table, info, changed=changed.set, removes_items=removes_items, max_total=num_samples
        )
        assembler = self._assemblers.pop(table, None) or BatchAssembler(_CACHE_BYTES, MAX_SAMPLE_BYTES)
        is_whole = True  # an interrupt may leave the assembler half changed
        try:
            while num_used < num_samples:
                began_at = time.monotonic()
                samples = _read(stream, left_s, changed, began_at)
                num_read += len(samples)
                is_whole = False
                if errors := assembler.add(samples):
                    raise errors[0]
                found = assembler.take_each(signature)
                is_whole = True
                for data, sample_info, kinds in found:
                    num_used += 1
                    yield Sample.of(data, sample_info, kinds)
        except ReplayTimeoutError as error:
            raise ReplayTimeoutError(f"{error} {stream.explain(began_at)}") from None
        except ServerUnavailableError as error:
            raise ServerUnavailableError(f"{missing()}: {error}") from None
        finally:
            stream.close()
            num_lost = stream.num_lost + num_read - num_used
            if removes_items and num_lost:
                _LOG.warning("Up to %d samples were taken out of `%s` and are lost.", num_lost, table)
            if is_whole and assembler.cache_bytes <= _CACHE_BYTES:
                self._assemblers[table] = assembler

    def mutate_priorities(
        self, table: str, updates: Mapping[int, float], deletes: Sequence[int] = (), *, deadline: Deadline
    ) -> None:
        """Change priorities and delete items, both checked by the caller."""
        request = messages.MutatePrioritiesRequest(
            table=table,
            updates=[messages.KeyWithPriority(key=key, priority=value) for key, value in updates.items()],
            delete_keys=deletes,
        )
        self._call(messages.MUTATE_PRIORITIES, request, deadline)
        if updates:
            note_priority(self.address, table, max(updates.values()))

    def reset(self, table: str, deadline: Deadline) -> None:
        """Remove all items of a table, and set its rate limiter to zero."""
        self._call(messages.RESET, messages.ResetRequest(table=table), deadline)
        forget_priorities(self.address, table)

    def checkpoint(self, deadline: Deadline) -> str:
        """Wait until the server answers, have it write one checkpoint, and return the path on its machine."""
        try:
            self.channel.server_info(deadline.left_s())
            reply = self.channel.start(messages.CHECKPOINT, b"", deadline.left_s()).result()
        except ServerUnavailableError as error:
            raise ServerUnavailableError(
                f"{error} If it had begun to write the checkpoint, it may finish it: look at its checkpoints before "
                "you ask again."
            ) from error
        return str(parse("CheckpointResponse", messages.CheckpointResponse, reply).checkpoint_path)

    def close(self) -> None:
        """Close the connection. Idempotent; does nothing in a forked child."""
        self.channel.close()
        self._streams.close()

    def _call(self, method: str, request: Any, deadline: Deadline) -> bytes:
        try:
            return self.channel.call(method, request.SerializeToString(), deadline.left_s())
        except StructureError:  # the table does not exist: the next error names the existing tables
            check_tables_exist([request.table], self.channel.server_info(deadline.left_s()), self.address)
            raise


def _read(stream: SampleStream, left_s: Callable[[], float], changed: Flag, began_at: float) -> Samples:
    """Return the samples of the next message, or raise the cause of a vain wait, which began at `began_at`."""
    pause_s = min(_LOOK_EVERY_S, left_s() / 4)
    while True:
        changed.clear()
        now = time.monotonic()
        next_at = stream.proceed(now, 0, _MAX_IN_FLIGHT)
        samples = stream.read()
        if stream.loss is not None:
            raise stream.loss
        if samples:
            return samples
        if not (stream.has_unread or changed.wait(min(next_at - now, left_s(), pause_s))):
            stream.ask_why(time.monotonic(), began_at)
