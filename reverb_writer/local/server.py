"""`LocalServer`: a replay server in this process, for machines and tests that have no dm-reverb."""

from __future__ import annotations

import functools
import os
import queue
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc

from reverb_writer.arguments import integer
from reverb_writer.background import Flag, in_background, may_be_interrupted
from reverb_writer.errors import ClosedError, ServerUnavailableError
from reverb_writer.local import saved_tables
from reverb_writer.local.endpoint import LocalEndpoint
from reverb_writer.local.grpc_service import Service
from reverb_writer.local.store import Store
from reverb_writer.progress import progress
from reverb_writer.tables import SAVES, TableConfig, check_tables
from reverb_writer.transport import endpoints, process_hooks

_HOST = "127.0.0.1"
_SHARE = 4  # the default limit is a quarter of the machine's memory
_MACHINE_BYTES = 8 << 30  # assumed where the system does not report it, such as Windows
_STOP_S = 5.0
_GRACE_S = 0.1  # with none, gRPC prints a line of its own in each process that is connected
_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.so_reuseport", 0),  # refuse a port that is in use, instead of sharing it
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
]


class LocalServer:
    """Serve tables from threads of this process until `close()` or the end of the `with` block.

        with rw.LocalServer([rw.TableConfig("replay")]) as server:
            client = rw.Client(server.address)

    It speaks Reverb's protocol, so dm-reverb's clients also work with it. It listens on the loopback interface only.

    Args:
        tables: The tables to serve: at least one, with different names.
        port: 1 to 65535, or None for a free port.
        max_bytes: Bound on the memory of items and chunks, in bytes, > 0; None for a quarter of the machine's memory,
            or 2 GiB if the system does not report it (Windows). A write that would exceed the bound is refused with
            RESOURCE_EXHAUSTED, and stored data stay.
        max_item_bytes: Bound on an item, all steps and leaves together, uncompressed, in bytes, > 0; None for no bound.
            Larger items of any client are refused.

    Attributes:
        port: The port of the server.
        address: "127.0.0.1:PORT", for clients on this machine.

    Raises:
        SpecError: A table or a number is invalid, or two tables have the same name.
        StructureError: Reverb could not store the signature of a table.
        ServerUnavailableError: Another process has the port.

    Thread safety: any thread. A forked child cannot use the server, and `close()` does nothing there. A child that is
    forked later cannot use any client either: start it with `spawn`.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        port: int | None = None,
        *,
        max_bytes: int | None = None,
        max_item_bytes: int | None = None,
    ) -> None:
        """Start to serve; clients can connect when this returns."""
        check_tables(tables)
        wanted, bound, item_bound = _checked(port, max_bytes, max_item_bytes)
        # Another thread makes the server, and drops it if an interrupt stops the main thread.
        in_background(lambda: self._serve(Store(tables, bound, item_bound), wanted)).result()

    @classmethod
    def restore(
        cls,
        folder: str | os.PathLike[str],
        port: int | None = None,
        *,
        max_bytes: int | None = None,
        max_item_bytes: int | None = None,
    ) -> LocalServer:
        """Return a running server with the tables of a checkpoint, of a local server or of dm-reverb.

        Tables, items, priorities, samples per item, and the rate limiters' counts are restored. The server has a new
        state id, so clients notice the restart.

        Args:
            folder: A checkpoint, or a folder of checkpoints, whose newest one is taken: a folder of `save`, or of
                `reverb-writer-server`.
            port: As for a new server.
            max_bytes: As for a new server, in bytes.
            max_item_bytes: As for a new server, in bytes; it applies to new items.

        Raises:
            FormatError: The checkpoint is missing or damaged, no `TableConfig` has its rules, or it exceeds
                `max_bytes`.
            SpecError, ServerUnavailableError: As for a new server.
        """
        wanted, bound, item_bound = _checked(port, max_bytes, max_item_bytes)
        server = cls.__new__(cls)
        with progress(f"restoring {folder}"):
            store = saved_tables.load(folder, bound, item_bound)
        in_background(lambda: server._serve(store, wanted)).result()  # noqa: SLF001  # of this class
        return server

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write all tables into a folder, in place of an earlier save; clients may continue meanwhile.

        Args:
            folder: Folder, which is created if it does not exist. A real server can also restore it:
                `reverb-writer-server serve --checkpoints FOLDER`. Saves into one folder take turns.

        Returns:
            The checkpoint in the folder, for `ReplayServer(tables, restore=...)`.

        Raises:
            OSError: The folder cannot be written. An earlier save in it is unchanged.
        """
        with progress(f"saving {self.address}"):
            return in_background(lambda: saved_tables.save(self._store, folder)).result()

    def _serve(self, store: Store, port: int) -> None:
        process_hooks.claim()
        self._store = store
        threads: Any = _DaemonThreads()  # gRPC takes any executor
        endpoint = LocalEndpoint(store)
        self._server: Any = grpc.server(threads, handlers=[Service(store)], options=_OPTIONS)
        self.port = _bind(self._server, port)
        self.address = f"{_HOST}:{self.port}"
        self._closed = Flag()
        self._server.start()
        # The server also ends without `close`: at garbage collection, or with the interpreter.
        endpoints.BY_ADDRESS[self.address] = endpoint
        self._end = functools.partial(_end, self._server, threads, self.address, endpoint, os.getpid())
        self._stop = weakref.finalize(self, _stop, self._end)

    @property
    def num_bytes(self) -> int:
        """Memory of items and chunks in bytes, as counted for `max_bytes`."""
        return self._store.chunks.num_bytes

    def __repr__(self) -> str:
        """Return the address, and the number of items in each table."""
        every = self._store.tables.items()
        tables = (f"{name}: {len(table)} items" for name, table in every if name != SAVES)
        return f"<LocalServer at {self.address}: {', '.join(tables)}>"

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until another thread has called `close()`, and return whether it has.

        Args:
            timeout_s: time-out in seconds; None for ever.
        """
        return self._closed.wait(timeout_s)

    def close(self) -> None:
        """End all streams, free the port and forget the data. Idempotent; does nothing in a forked child."""
        in_background(self._close).result()

    def _close(self) -> None:
        if self._stop.detach() is not None:
            self._end()
        self._closed.set()

    def __reduce__(self) -> Any:
        raise ClosedError(
            f"a LocalServer cannot be sent to another process. Pass its `address`, {self.address!r}, in its place."
        )

    def __enter__(self) -> LocalServer:
        """Return the running server."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()


class _DaemonThreads(Executor):
    """Runs each call in a daemon thread that is idle, or in a new one, for gRPC's server. Thread-safe.

    The interpreter joins the threads of a `ThreadPoolExecutor` at its end, and would wait for ever for a stream that
    waits for a rate limiter. The number of threads has no bound, because each open stream needs one.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._has_ended = False

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Future[Any]:
        """Run a call and return its future; raise RuntimeError after `shutdown`."""
        if self._has_ended:
            raise RuntimeError("the threads have ended.")
        future: Future[Any] = Future()

        def task() -> None:
            try:
                future.set_result(call(*arguments, **keywords))
            except BaseException as error:  # noqa: BLE001  # the reader of the future raises it
                future.set_exception(error)

        self._tasks.put(task)
        if not self._idle.acquire(blocking=False):
            threading.Thread(target=self._run, name="reverb-writer-local", daemon=True).start()
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:  # noqa: ARG002  # never waits
        """Let each thread end after its call. Idempotent."""
        self._has_ended = True
        self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task
            self._idle.release()
        self._tasks.put(None)  # for the next thread


def _machine_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return _MACHINE_BYTES


def _checked(port: int | None, max_bytes: int | None, max_item_bytes: int | None) -> tuple[int, int, int | None]:
    """Return the checked arguments; port 0 stands for a free port."""
    return (
        0 if port is None else integer("port", port, minimum=1, maximum=65535),
        _machine_bytes() // _SHARE if max_bytes is None else integer("max_bytes", max_bytes, minimum=1),
        None if max_item_bytes is None else integer("max_item_bytes", max_item_bytes, minimum=1),
    )


def _bind(server: Any, port: int) -> int:
    """Listen on a port, or on a free one if it is 0; return the port."""
    try:
        if port:
            socket.create_server((_HOST, port)).close()  # checked first, because gRPC would log its own lines
        bound: int = server.add_insecure_port(f"{_HOST}:{port}")
    except (OSError, RuntimeError) as error:  # grpcio does not give the reason
        why = "this process may not listen on it" if isinstance(error, PermissionError) else "the port is taken"
        raise ServerUnavailableError(
            f"cannot listen on {_HOST}:{port}: {why}. Pass another `port`, or None for a free one."
        ) from error
    return bound


def _end(server: Any, threads: Executor, address: str, endpoint: LocalEndpoint, process: int) -> None:
    if os.getpid() == process:
        if endpoints.BY_ADDRESS.get(address) is endpoint:  # a later server may have the address now
            del endpoints.BY_ADDRESS[address]
        endpoint.close()
        server.stop(_GRACE_S).wait(_STOP_S)
        threads.shutdown(wait=False)


def _stop(end: Callable[[], None]) -> None:
    """End the server in another thread, because the garbage collector may call this within a function of the server."""
    ended = in_background(end)
    if may_be_interrupted():
        ended.wait(_STOP_S)
