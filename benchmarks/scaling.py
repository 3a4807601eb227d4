"""1, 2 and 4 actor processes, beside what the server takes: the same requests, encoded beforehand and replayed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable

from benchmarks.actors import Contender, Run, ours
from benchmarks.comparison import Comparison, Effort
from benchmarks.processes import Server
from benchmarks.recording import record
from benchmarks.report import Table
from benchmarks.workloads import EPISODE_LENGTH, Workload, small_steps
from reverb_writer.errors import ReverbWriterError
from reverb_writer.protocol import messages
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.pipes import ByteStream

_MAX_IN_FLIGHT_ITEMS = 16_384  # the most that an observer has by default
_MOST_STEPS_PER_S = 400_000  # that a server here takes
_REQUIRED = 0.7


class Replay:
    """Sends recorded requests over one stream as fast as the server confirms them. For `Remote`."""

    def __init__(self, address: str, workload: Workload, num_steps: int) -> None:
        """Record what our observer sends for `num_steps` steps; the server at `address` is not used again."""
        self._messages = [
            (message, len(messages.InsertStreamRequest.FromString(message).items))
            for message in record(address, workload, num_steps)
        ]
        self._steps_per_item = EPISODE_LENGTH / workload.num_windows
        self._changed = threading.Condition()

    def open(self, address: str) -> None:
        """Open a stream, and begin with the first request again."""
        self._requests = iter(self._messages)
        self._sent = self._confirmed = 0
        self._channel = Channel(address)
        self._stream = ByteStream(self._channel, messages.INSERT_STREAM)
        threading.Thread(target=self._count, args=(iter(self._stream.read, None),), daemon=True).start()

    def write(self, seconds: float) -> Run:
        """Send for `seconds`, or all that is left, and wait for the confirmations."""
        before = self._sent
        cpu_s, start = time.process_time(), time.perf_counter()
        while time.perf_counter() - start < seconds and (request := next(self._requests, None)):
            message, num_items = request
            with self._changed:
                self._changed.wait_for(lambda: self._sent - self._confirmed < _MAX_IN_FLIGHT_ITEMS)
            self._sent += num_items
            self._stream.send(message)
        with self._changed:
            self._changed.wait_for(lambda: self._confirmed == self._sent)
        end, cpu_s = time.perf_counter(), time.process_time() - cpu_s
        items = self._sent - before
        return Run(round(items * self._steps_per_item), items, start, end, cpu_s)

    def close(self) -> None:
        """End the stream."""
        self._channel.close()

    def _count(self, replies: Iterable[bytes]) -> None:
        with contextlib.suppress(ReverbWriterError):  # the channel was closed
            for reply in replies:
                with self._changed:
                    self._confirmed += len(messages.InsertStreamResponse.FromString(reply).keys)
                    self._changed.notify()


def actor_processes(effort: Effort) -> Table:
    """Six small leaves, L=20, S=1, from several processes."""
    workload = Workload(small_steps())
    rows = []
    for processes in (1, 2, 4):
        # The warm-up included, which must not send all there is.
        num_steps = max(int(1.25 * effort.seconds * _MOST_STEPS_PER_S / processes), 4 * _MAX_IN_FLIGHT_ITEMS)
        with Comparison() as comparison:
            comparison.add("actors", Contender, ours, workload, processes=processes)
            with Server() as server:
                comparison.add("replays", Replay, server.address, workload, num_steps, processes=processes)
            written, ceiling = comparison.rounds(effort).values()
        share = written.items_per_s / ceiling.items_per_s
        required = f">= {_REQUIRED:.0%}" + ("" if share >= _REQUIRED else ": missed")
        cells = [f"{written.items_per_s:,.0f}", f"{ceiling.items_per_s:,.0f}", f"{share:.0%}", required]
        cpu = [f"{1e6 * run.cpu_s / run.items:.2f}" for run in (written, ceiling)]
        rows.append([str(processes), *cells, *cpu])
    columns = ["actor processes", "items/s", "replayed, items/s", "share", "required", "CPU, us/item", "replayed"]
    return Table("Several actors, six small leaves, L=20, S=1", columns, rows)
