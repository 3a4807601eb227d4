"""The streams of a server: functions, without threads.

    request --> InsertStream.feed --> tables --> deliver(keys)
    request --> SampleStream.feed --> tables --> deliver(samples), at once or when the rate limiter allows it

Each function runs in the thread that calls it. If an answer has to wait, the thread whose change of a table ends the
wait delivers it. A function waits only for the lock of the store.

Source: Reverb 0.14 (`reverb_service_impl.cc`, InsertStream).
"""

from __future__ import annotations

import abc
import collections
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from reverb_writer.errors import FormatError
from reverb_writer.local.chunk_store import Chunk
from reverb_writer.local.item_size import check_item_size
from reverb_writer.local.read_items import ItemGroup, read_items
from reverb_writer.local.refusals import Refusal, Status, parse, refusal_of
from reverb_writer.local.store import Store
from reverb_writer.local.stored_items import Item, SharedChunks
from reverb_writer.local.table import SampleRequest
from reverb_writer.protocol import messages
from reverb_writer.protocol.responses import UnencodedSamples
from reverb_writer.protocol.views import chunk_parts, request_of
from reverb_writer.transport.endpoints import Answer

CLOSED = "the server was closed"
_MAX_WAITING = 1_000  # if more items of a stream wait for a rate limiter, its next requests wait


class LocalStream(abc.ABC):
    """One stream, with the messages that wait for their turn; see `transport.endpoints.Stream`. Thread-safe."""

    def __init__(self, store: Store, deliver: Callable[[Answer], object]) -> None:
        """Prepare; `deliver` gets the answers, in the thread that causes them, with the lock of the store."""
        self._store, self._deliver = store, deliver
        self._messages: collections.deque[bytes] = collections.deque()
        self._is_working = self._is_paused = False
        self._has_ended = False

    def open(self) -> None:
        """Begin; see `Stream`."""
        with self._store.lock:
            self._store.streams[self] = None
            if self._store.is_closed:
                self.fail(Refusal(Status.UNAVAILABLE, CLOSED))

    def feed(self, message: bytes) -> None:
        """Take a message; see `Stream`."""
        if not self._has_ended:
            self._messages.append(message)
            self.work()

    def pause(self) -> None:
        """Stop to answer until `resume`; see `Stream`."""
        self._is_paused = True

    def resume(self) -> None:
        """Continue to answer; see `Stream`."""
        self._is_paused = False
        self.work()

    def end(self) -> None:
        """Drop all waiting messages and end; see `Stream`."""
        with self._store.lock:
            if not self._has_ended:
                self._has_ended = True
                self._store.streams.pop(self, None)
                self._messages.clear()
                self._give_up()

    def fail(self, error: Refusal) -> None:
        """End with an error. The caller holds the lock."""
        if not self._has_ended:
            self.end()
            self._deliver(error)

    def work(self) -> None:
        """Process all messages that can be processed; a nested call makes the outer call continue."""
        with self._store.lock:
            if self._is_working:
                return
            self._is_working = True
            try:
                while not self._has_ended and self._may_work():
                    self._carry_out()
            except Exception as error:  # noqa: BLE001  # as with gRPC, the client gets every error
                self.fail(refusal_of(error))
            finally:
                self._is_working = False

    @abc.abstractmethod
    def _may_work(self) -> bool:
        """Whether a message can be processed now."""

    @abc.abstractmethod
    def _carry_out(self) -> None:
        """Process the next message."""

    @abc.abstractmethod
    def _give_up(self) -> None:
        """Drop what waits for a rate limiter."""


class InsertStream(LocalStream):
    """Chunks, items that refer to them, and chunks that are kept for later items, in; keys of stored items out.

    A request is read completely before it changes a table: a damaged request, or one with a wrong reference, inserts
    nothing.
    """

    def __init__(self, store: Store, deliver: Callable[[Answer], object]) -> None:
        """Begin without kept chunks."""
        super().__init__(store, deliver)
        self._kept: dict[int, Chunk] = {}
        self._num_waiting = 0
        self._finished: Callable[[], object] | None = None

    @property
    def has_room(self) -> bool:
        """Whether a message would be processed at once: not while too many items wait for a rate limiter."""
        return self._has_ended or self._num_waiting < _MAX_WAITING

    def finish(self, then: Callable[[], object]) -> None:
        """Call a function when all items are confirmed; no more messages follow."""
        with self._store.lock:
            self._finished = then
            if not self._num_waiting:
                then()

    def take(self, message: bytes) -> None:
        """Process an InsertStreamRequest. The caller holds the lock.

        Raises:
            Refusal: the request is damaged, refers to an unknown table or chunk, or exceeds the memory; or an item
                exceeds `max_item_bytes`.
        """
        try:
            request = request_of(message) or messages.StoredRequest.FromString(message)
            chunks = [read_chunk(data) for data in request.chunks]
            groups = list(read_items(request.items))
        except (DecodeError, FormatError) as error:
            raise Refusal(
                Status.INVALID_ARGUMENT, f"{len(message)} bytes that are not an insert request: {error}"
            ) from None
        for chunk in chunks:
            if chunk.key not in self._kept:
                self._kept[chunk.key] = self._store.chunks.add(chunk)
        if groups:
            self._check_kept(request.keep_chunk_keys)
            items = self._items(groups, len(request.items))
            self._keep(request.keep_chunk_keys)
            self._insert(items)

    def _may_work(self) -> bool:
        return bool(self._messages) and self.has_room

    def _carry_out(self) -> None:
        self.take(self._messages.popleft())

    def _give_up(self) -> None:
        for table in self._store.tables.values():
            table.withdraw_inserts(self._confirm)
        self._store.chunks.release(self._kept.values())
        self._kept.clear()

    def _items(self, groups: Sequence[ItemGroup], num_items: int) -> list[Item]:
        """Return the items of a request in order; refuse an item that its table cannot hold."""
        items: list[Any] = [None] * num_items
        made: list[SharedChunks] = []
        for group in groups:
            self._check(group)
            stops = [*[start for start, _ in group.runs[1:]], len(group.keys)]
            of_items: list[SharedChunks] = []
            for (start, tensors), stop in zip(group.runs, stops, strict=True):
                shared = self._shared(group, start, stop, tensors)
                made.append(shared)
                of_items += [shared] * (stop - start)
            fields = (group.keys, group.priorities, group.trajectories, group.slices, of_items)
            for number, item in zip(group.numbers, map(Item, *fields), strict=True):
                items[number] = item
        self._store.chunks.take(sum([shared.num_items * shared.item_bytes for shared in made]))
        for shared in made:
            for chunk in shared.chunks:
                self._store.chunks.add(chunk)
        return items

    def _check(self, group: ItemGroup) -> None:
        table = self._store.table(group.table)
        for priority, key in dict(zip(group.priorities, group.keys, strict=True)).items():
            table.check_priority(key, priority)

    def _shared(self, group: ItemGroup, start: int, stop: int, tensors: dict[int, int]) -> SharedChunks:
        """Return the chunks of the items `start` to `stop` of a group."""
        try:
            chunks = [self._kept[key] for key in tensors]
        except KeyError as error:
            text = f"item {group.keys[start]} refers to chunk {error}, which this stream has not sent or not kept."
            raise Refusal(Status.INVALID_ARGUMENT, text) from None
        for chunk, tensor in zip(chunks, tensors.values(), strict=True):
            if tensor >= chunk.num_tensors:
                key, has = group.keys[start], chunk.num_tensors
                text = f"item {key} refers to tensor {tensor} of chunk {chunk.key}, which has {has}."
                raise Refusal(Status.INVALID_ARGUMENT, text)
        if self._store.max_item_bytes is not None:
            for key, slices in zip(group.keys[start:stop], group.slices[start:stop], strict=True):
                check_item_size(key, (group.layout, slices), self._kept, self._store.max_item_bytes)
        num_slices = sum(map(len, group.slices[start]))
        return SharedChunks(group.table, group.layout, chunks, stop - start, len(group.trajectories[start]), num_slices)

    def _insert(self, items: Sequence[Item]) -> None:
        """Queue the items at their tables, which insert them when the rate limiters allow it."""
        self._num_waiting += len(items)
        by_table: dict[str, list[Item]] = {}
        for item in items:
            by_table.setdefault(item.shared.table, []).append(item)
        for table, of_table in by_table.items():
            self._store.tables[table].insert(of_table, self._confirm)

    def _keep(self, keys: Sequence[int]) -> None:
        """Forget all kept chunks except these."""
        dropped = [self._kept.pop(key) for key in self._kept.keys() - set(keys)]
        self._store.chunks.release(dropped)

    def _check_kept(self, keys: Sequence[int]) -> None:
        for key in keys:
            if key not in self._kept:
                text = f"`keep_chunk_keys` refers to chunk {key}, which this stream has not sent or not kept."
                raise Refusal(Status.INVALID_ARGUMENT, text)

    def _confirm(self, keys: list[int]) -> None:
        self._num_waiting -= len(keys)
        self._deliver(messages.InsertStreamResponse(keys=keys).SerializeToString())
        if self._messages:
            self.work()
        if self._finished is not None and not self._num_waiting:
            self._finished()


class SampleStream(LocalStream):
    """Requests in, samples out; one request at a time waits at a table.

    Attributes:
        timeout_s: the client's time-out for the rate limiter; None for ever. The user of the stream enforces it.
    """

    def __init__(self, store: Store, deliver: Callable[[Answer], object]) -> None:
        """Begin without a request."""
        super().__init__(store, deliver)
        self._table, self._num_missing = "", 0
        self._waiting: SampleRequest | None = None
        self.timeout_s: float | None = None

    @property
    def is_asked(self) -> bool:
        """Whether samples of a request are missing; drawn samples are delivered."""
        with self._store.lock:
            return self._num_missing > 0

    def _may_work(self) -> bool:
        return self._waiting is None and not self._is_paused and bool(self._num_missing or self._messages)

    def _carry_out(self) -> None:
        if not self._num_missing:
            self._table, self._num_missing, self.timeout_s = _asked_for(self._messages.popleft())
        table, self._waiting = self._store.table(self._table), SampleRequest(self._num_missing, self._answer)
        table.request(self._waiting)

    def _give_up(self) -> None:
        if self._waiting is not None:
            self._store.table(self._table).withdraw(self._waiting)

    def _answer(self, answer: UnencodedSamples) -> None:
        self._waiting = None
        self._num_missing -= len(answer.samples)
        self._deliver(answer)
        self.work()


def read_chunk(data: bytes | memoryview) -> Chunk:
    """Read the fields of a ChunkData that the server needs, and check their form.

    The tensors of a large chunk are counted and not read: the readers check them.
    """
    parts = chunk_parts(data)
    if parts is not None:
        return Chunk(parts.chunk_key, parts.sequence_range.episode_id, len(parts.tensors), data)
    read = messages.ChunkData.FromString(bytes(data))
    return Chunk(read.chunk_key, read.sequence_range.episode_id, len(read.data.tensors), data)


def _asked_for(message: bytes) -> tuple[str, int, float | None]:
    """Return the table, the number of samples and the time-out in seconds of a SampleStreamRequest.

    Raises:
        Refusal: the request is damaged, or requests no samples.
    """
    request = parse(messages.SampleStreamRequest, message)
    if request.num_samples < 1:
        raise Refusal(Status.INVALID_ARGUMENT, f"`num_samples` must be >= 1, got {request.num_samples}.")
    milliseconds = request.rate_limiter_timeout.milliseconds if request.HasField("rate_limiter_timeout") else -1
    return request.table, request.num_samples, None if milliseconds < 0 else milliseconds / 1000
