"""Many actors on 1, 2 and 4 shards: balanced books, the time of a call, memory of a connection, CPU time of an item.

The actors are simulated: coroutines in two processes, each with a connection of its own. An actor sends 20 steps and
their windows in one message, waits until the server has confirmed them, and sends the next ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.comparison import Effort, progress
from benchmarks.processes import TABLE, Remote, Server
from benchmarks.report import Table
from reverb_writer.protocol import messages, tensors

_NUM_ACTORS = int(os.environ.get("REVERB_WRITER_ACTORS", "1000"))
_SHARDS = (1, 2, 4)
_PROCESSES = 2
_STEPS, _ITEMS = 20, 10  # of a message
_LEAVES = 6
_SETTLE_S = 2.0


@dataclass(frozen=True)
class Sent:
    """What simulated actors have written.

    Attributes:
        items: confirmed ones, by shard.
        call_s: how long each message took until its items were confirmed.
        wall_s: duration.
        cpu_s: CPU time of the actors' process.
    """

    items: dict[str, int]
    call_s: Sequence[float]
    wall_s: float
    cpu_s: float


class SimulatedActors:
    """Coroutines that write, each over a connection of its own. For `Remote`."""

    def __init__(self, num_actors: int) -> None:
        """Make the message that all send, but for its keys."""
        self._num_actors, self._template = num_actors, _template()
        self._loop = asyncio.new_event_loop()
        self._channels: list[Any] = []
        self._streams: list[tuple[str, Any]] = []
        self._random = random.Random(os.getpid())  # noqa: S311  # keys need only differ

    def open(self, addresses: Sequence[str], pause_s: float) -> None:
        """Connect each actor to the shard of its number, and have each confirm one message.

        Args:
            addresses: of the shards.
            pause_s: how long an actor waits from one message to the next: the time that its environment takes.
        """
        self._pause_s = pause_s
        self._loop.run_until_complete(self._open(addresses))

    def write(self, seconds: float) -> Sent:
        """Let all write for `seconds`."""
        cpu_s, start = time.process_time(), time.perf_counter()
        items, times = self._loop.run_until_complete(self._write(seconds))
        return Sent(items, times, time.perf_counter() - start, time.process_time() - cpu_s)

    def close(self) -> None:
        """End all connections."""
        self._loop.run_until_complete(self._close())
        self._loop.close()

    async def _open(self, addresses: Sequence[str]) -> None:
        import grpc.aio

        options = [("grpc.use_local_subchannel_pool", 1)]  # or all would share one connection
        for number in range(self._num_actors):
            address = addresses[number % len(addresses)]
            channel = grpc.aio.insecure_channel(address, options)
            self._channels.append(channel)
            self._streams.append((address, channel.stream_stream(messages.INSERT_STREAM)()))
        await asyncio.gather(*(self._send(stream) for _, stream in self._streams))

    async def _close(self) -> None:
        for _, stream in self._streams:
            stream.cancel()
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def _write(self, seconds: float) -> tuple[dict[str, int], list[float]]:
        times: list[float] = []
        items = dict.fromkeys((address for address, _ in self._streams), 0)
        end = time.perf_counter() + seconds

        async def act(address: str, stream: Any) -> None:
            await asyncio.sleep(self._random.random() * self._pause_s)
            while (began := time.perf_counter()) < end:
                await self._send(stream)
                took_s = time.perf_counter() - began
                times.append(took_s)
                items[address] += _ITEMS
                await asyncio.sleep(max(0.0, self._pause_s - took_s))

        await asyncio.gather(*(act(*one) for one in self._streams))
        return items, times

    async def _send(self, stream: Any) -> None:
        await stream.write(self._message())
        confirmed = 0
        while confirmed < _ITEMS:
            confirmed += len(messages.InsertStreamResponse.FromString(await stream.read()).keys)

    def _message(self) -> bytes:
        """Return the message with keys that no other one has."""
        request = messages.InsertStreamRequest()
        request.CopyFrom(self._template)
        chunk = request.chunks[0]
        chunk.chunk_key = chunk.sequence_range.episode_id = self._random.getrandbits(64)
        for item in request.items:
            item.key = self._random.getrandbits(64)
            for column in item.flat_trajectory.columns:
                column.chunk_slices[0].chunk_key = chunk.chunk_key
        data: bytes = request.SerializeToString()
        return data


def _template() -> Any:
    """Return a message with a chunk of 20 steps, and 10 windows of 10 steps of it."""
    request = messages.InsertStreamRequest()
    chunk = request.chunks.add()
    chunk.sequence_range.end = _STEPS - 1
    chunk.data_tensors_len = _LEAVES
    noise = np.random.default_rng(0)
    for _ in range(_LEAVES):
        array = noise.standard_normal((_STEPS, 4), np.float32)
        prefix, encode = tensors.encoder(array.dtype, array.shape)
        content = encode(array)
        chunk.data.tensors.add().ParseFromString(prefix + tensors.varint(len(content)) + content)
        chunk.data_uncompressed_size += array.nbytes
    for start in range(_ITEMS):
        item = request.items.add(table=TABLE, priority=1.0)
        for column in range(_LEAVES):
            item.flat_trajectory.columns.add().chunk_slices.add(offset=start, length=_STEPS - _ITEMS, index=column)
    return request


@dataclass(frozen=True)
class Turn:
    """One turn of all actors on some shards.

    Attributes:
        items_per_s: confirmed, of all shards.
        p50_s, p99_s: of a message until its items were confirmed.
        server_cpu_us, client_cpu_us: of an item, microseconds.
        connection_bytes: resident memory of a server for each connection with its stream.
        largest_share: of the shard that got most items, over the mean.
    """

    items_per_s: float
    p50_s: float
    p99_s: float
    server_cpu_us: float
    client_cpu_us: float
    connection_bytes: float
    largest_share: float


def shards(effort: Effort) -> Table:
    """Throughput of 1, 2 and 4 shards on this machine, back to back, and the time of a call at a pace."""
    rows = []
    for name, pause_s in (("back to back", 0.0), ("one message a second", 1.0)):
        turns: dict[int, list[Turn]] = {number: [] for number in _SHARDS}
        for turn in range(effort.rounds):
            for number in _SHARDS:
                turns[number].append(_take_turn(number, pause_s, effort.seconds))
                progress(f"{name}, {number} shards, turn {turn + 1}: {turns[number][-1]}")
        for number, taken in turns.items():
            rows.append([name, str(number), *_cells(taken, number)])
    columns = ["actors write", "shards", "items/s", "of a shard", "p50 of a call, ms", "p99, ms"]
    columns += ["server CPU an item, us", "actors' CPU an item, us", "memory a connection, kB", "largest share"]
    return Table(
        f"{_NUM_ACTORS} simulated actors on shards of one machine",
        columns,
        rows,
        "An actor is a coroutine with a connection of its own, in one of two processes. A call is a message of 20 "
        "steps and 10 items until the last is confirmed. Medians of the turns. In each turn the servers have inserted "
        "what the actors were confirmed, to the item. Servers and actors share the machine: more shards are no more "
        "processors here.",
    )


def _take_turn(num_shards: int, pause_s: float, seconds: float) -> Turn:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(Server()) for _ in range(num_shards)]
        addresses = [server.address for server in servers]
        before = [server.rss_bytes() for server in servers]
        actors = [stack.enter_context(Remote(SimulatedActors, _NUM_ACTORS // _PROCESSES)) for _ in range(_PROCESSES)]
        for one in actors:
            one.start("open", addresses, pause_s)
        for one in actors:
            one.result()
        time.sleep(_SETTLE_S)
        grown = sum(server.rss_bytes() for server in servers) - sum(before)
        first = [server.num_items() for server in servers]
        cpu_s = sum(server.cpu_s() for server in servers)
        for one in actors:
            one.start("write", seconds)
        sent: list[Sent] = [one.result() for one in actors]
        cpu_s = sum(server.cpu_s() for server in servers) - cpu_s
        written = [server.num_items() - had for server, had in zip(servers, first, strict=True)]
    confirmed = [sum(one.items[address] for one in sent) for address in addresses]
    if written != confirmed:
        raise AssertionError(f"books do not balance: the servers have {written}, the actors were confirmed {confirmed}")
    total, call_s = sum(confirmed), np.concatenate([one.call_s for one in sent])
    return Turn(
        total / max(one.wall_s for one in sent),
        float(np.quantile(call_s, 0.5)),
        float(np.quantile(call_s, 0.99)),
        1e6 * cpu_s / total,
        1e6 * sum(one.cpu_s for one in sent) / total,
        grown / _NUM_ACTORS,
        max(confirmed) / (total / num_shards),
    )


def _cells(turns: Sequence[Turn], num_shards: int) -> list[str]:
    def middle(of: Callable[[Turn], float]) -> float:
        return statistics.median(map(of, turns))

    rate = middle(lambda turn: turn.items_per_s)
    return [
        f"{rate:,.0f}",
        f"{rate / num_shards:,.0f}",
        f"{1e3 * middle(lambda turn: turn.p50_s):.1f}",
        f"{1e3 * middle(lambda turn: turn.p99_s):.1f}",
        f"{middle(lambda turn: turn.server_cpu_us):.1f}",
        f"{middle(lambda turn: turn.client_cpu_us):.1f}",
        f"{middle(lambda turn: turn.connection_bytes) / 1e3:.0f}",
        f"{middle(lambda turn: turn.largest_share):.2f}",
    ]
