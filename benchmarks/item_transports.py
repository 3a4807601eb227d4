"""Ways of whole items from one process to another: ours, and a bare stream of the same bytes.

Each class is what a writer and a reader use, in a process of its own each. `serve` starts the servers.
"""

from __future__ import annotations

import contextlib
import queue
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import reverb_writer as rw
from benchmarks.processes import TABLE, Remote, Server

MAX_BATCH = 256

_MESSAGE_BYTES = 1 << 20  # of the raw stream, as of ours
_UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]

Items = list[dict[str, Any]]


class Place(NamedTuple):
    """Where the servers of a transport are.

    Attributes:
        address: for the transport's writers and readers.
        cpu_s: returns the CPU time that the servers have taken so far, seconds.
    """

    address: Any
    cpu_s: Callable[[], float]


class Transport:
    """A way from one process to another, as each of them uses it."""

    name: ClassVar[str] = ""
    is_direct: ClassVar[bool] = False  # whether the reader must be there when the writer writes

    def __init__(self, make: Callable[[], Items], address: Any) -> None:
        """Make the items, and keep the address."""
        self._items, self._address = make(), address

    @classmethod
    def missing(cls) -> str:
        """Return what must be installed for the transport; empty if nothing is missing."""
        return ""

    @classmethod
    @contextlib.contextmanager
    def serve(cls) -> Iterator[Place]:
        """Start the servers; yield their place."""
        raise NotImplementedError

    def put(self, num_items: int, batch: int) -> tuple[float, float]:
        """Put items in batches, each until it is confirmed; return begin and end, as of `time.monotonic()`."""
        batches = [self.batch(self._items[at : at + batch]) for at in range(0, len(self._items), batch)]
        start = time.monotonic()
        for at in range(0, num_items, batch):
            self.put_batch(batches[at // batch % len(batches)])
        return start, time.monotonic()

    def open_reader(self, batch: int) -> None:
        """Prepare to get batches of a size, before the time is measured."""

    def get(self, num_items: int, batch: int) -> tuple[float, float]:
        """Get items in batches; return begin and end, as of `time.monotonic()`."""
        start = time.monotonic()
        self.get_all(num_items, batch)
        end = time.monotonic()
        self.close_reader()
        return start, end

    def close_reader(self) -> None:
        """End what `open_reader` began."""

    def peak_bytes(self) -> int:
        """Return the largest memory that the process has had resident."""
        found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
        return int(found[1]) << 10 if found else 0

    def batch(self, items: Items) -> Any:
        """Return items as the transport takes them, before the time is measured."""
        return items

    def put_batch(self, batch: Any) -> None:
        """Put a batch, and wait until it is confirmed."""
        raise NotImplementedError

    def get_all(self, num_items: int, batch: int) -> None:
        """Get items in batches."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what the process holds."""


class Ours(Transport):
    """`ItemWriter` and `ReplayDataset`, on dm-reverb's server."""

    name = "ItemWriter, ReplayDataset(collate='pad')"

    def __init__(self, make: Callable[[], Items], address: Any) -> None:
        super().__init__(make, address)
        self._writer = rw.ItemWriter(address, TABLE)

    @classmethod
    @contextlib.contextmanager
    def serve(cls) -> Iterator[Place]:
        with Server(sampler="fifo", max_times_sampled=1) as server:
            yield Place(server.address, server.cpu_s)

    def put_batch(self, batch: Any) -> None:
        for item in batch:
            self._writer.write(item)
        self._writer.flush()

    def open_reader(self, batch: int) -> None:
        self._dataset = rw.ReplayDataset(self._address, TABLE, batch, collate="pad")

    def get_all(self, num_items: int, batch: int) -> None:
        for _ in range(num_items // batch):
            next(self._dataset)

    def close_reader(self) -> None:
        self._dataset.close()

    def close(self) -> None:
        self._writer.close()


class OursOnLocal(Ours):
    """The same on the server in pure Python."""

    name = "the same, `reverb-writer local`"

    @classmethod
    @contextlib.contextmanager
    def serve(cls) -> Iterator[Place]:
        with Remote(ServedLocal) as server:
            yield Place(server.call("address"), server.cpu_s)


class ServedLocal:
    """A `LocalServer` with a queue; for `Remote`."""

    def __init__(self) -> None:
        self._server = rw.LocalServer([rw.TableConfig.queue(TABLE, 10_000_000)], max_bytes=4 << 30)

    def address(self) -> str:
        return self._server.address

    def close(self) -> None:
        self._server.close()


class RawStream(Transport):
    """Bare streams of gRPC to a server that keeps messages of the same bytes, and sends them on: a floor, no peer."""

    name = "raw gRPC stream of the same bytes"

    def __init__(self, make: Callable[[], Items], address: Any) -> None:
        import grpc

        super().__init__(make, address)
        self._grpc: Any = grpc.insecure_channel(address, options=_UNLIMITED)
        self._requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._answers: Any = self._grpc.stream_stream("/raw/put")(iter(self._requests.get, b""))  # type: ignore[arg-type]

    @classmethod
    @contextlib.contextmanager
    def serve(cls) -> Iterator[Place]:
        with Remote(ServedRaw) as server:
            yield Place(server.call("address"), server.cpu_s)

    def batch(self, items: Items) -> Any:
        data = [b"".join(leaf.tobytes() for leaf in item.values()) for item in items]
        per_message = max(_MESSAGE_BYTES * len(data) // sum(map(len, data)), 1)
        return [b"".join(data[at : at + per_message]) for at in range(0, len(data), per_message)]

    def put_batch(self, batch: Any) -> None:
        for message in batch:
            self._requests.put(message)
        for _ in batch:
            next(self._answers)

    def get_all(self, num_items: int, batch: int) -> None:
        batches = [len(self.batch(self._items[at : at + batch])) for at in range(0, len(self._items), batch)]
        num_messages = sum(batches[at // batch % len(batches)] for at in range(0, num_items, batch))
        stream = self._grpc.stream_stream("/raw/get")(iter([b"%d" % num_messages]))
        for _ in range(num_messages):
            next(stream)
        stream.cancel()

    def close(self) -> None:
        self._requests.put(b"")
        self._grpc.close()


class ServedRaw:
    """The server of `RawStream`; for `Remote`."""

    def __init__(self) -> None:
        import grpc

        self._messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        calls = {"put": self._put, "get": self._get}
        self._server = grpc.server(ThreadPoolExecutor(4), options=_UNLIMITED)
        handlers: Any = {name: grpc.stream_stream_rpc_method_handler(call) for name, call in calls.items()}
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("raw", handlers)])
        self._address = f"localhost:{self._server.add_insecure_port('localhost:0')}"
        self._server.start()

    def address(self) -> str:
        return self._address

    def _put(self, requests: Iterator[bytes], _: Any) -> Iterator[bytes]:
        for message in requests:
            self._messages.put(message)
            yield b"1"

    def _get(self, requests: Iterator[bytes], _: Any) -> Iterator[bytes]:
        for number in requests:
            for _ in range(int(number)):
                yield self._messages.get()

    def close(self) -> None:
        self._server.stop(None)
