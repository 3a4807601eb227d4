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
from reverb_writer.errors import ServerUnavailableError
from reverb_writer.local import saved_tables
from reverb_writer.local.endpoint import LocalEndpoint
from reverb_writer.local.grpc_service import Service
from reverb_writer.local.store import Store
from reverb_writer.progress import progress
from reverb_writer.tables import TableConfig, check_tables
from reverb_writer.transport import endpoints, process_hooks

_HOST = "127.0.0.1"
_SHARE = 4  # of the machine's memory, by default
_MACHINE_BYTES = 8 << 30  # where the system does not tell it, as Windows
_STOP_S = 5.0
_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.so_reuseport", 0),  # a port that is taken is refused, not shared
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
]


class LocalServer:
    """Serve tables from threads of this process until `close()` or the end of the `with` block.

        with rw.LocalServer([rw.TableConfig("replay")]) as server:
            client = rw.Client(server.address)

    It speaks Reverb's protocol, so dm-reverb's clients work with it, too. It listens on the loopback interface only.

    Args:
        tables: The tables to serve: at least one, no two of one name.
        port: 1 to 65535, or None for a free one.
        max_bytes: Bound on the memory that items and chunks take, in bytes, > 0; None for a quarter of the machine's,
            or 2 GiB where the system does not report it, as Windows. A write that would exceed it is refused with
            RESOURCE_EXHAUSTED, and nothing that is stored is lost.
        max_item_bytes: Bound on an item, all steps and leaves together, uncompressed, in bytes, > 0; None for none. A
            larger item is refused from any client.

    Attributes:
        port: The port that it listens on.
        address: "127.0.0.1:PORT", for clients on this machine.

    Raises:
        SpecError: There are no tables, two of one name or something else among them, or a number is out of range.
        StructureError: The signature of a table is none that Reverb could store.
        ServerUnavailableError: Another process has the port.

    Thread safety: any thread. In a forked child it is of no use, and `close()` does nothing. A child that is forked
    afterwards can use no client of its own either: start it with `spawn`.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        port: int | None = None,
        *,
        max_bytes: int | None = None,
        max_item_bytes: int | None = None,
    ) -> None:
        """Start to serve; when this returns, clients can connect."""
        check_tables(tables)
        wanted, bound, item_bound = _checked(port, max_bytes, max_item_bytes)
        # An interrupt of the main thread leaves no half of a server: another thread makes it, and drops it then.
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

        Tables, items, priorities, how often each item was sampled, and the rate limiters' counts are as they were; the
        server's state id is a new one, so clients see that it was started again.

        Args:
            folder: A checkpoint, or a folder of checkpoints, of which the newest is taken: one that `save` has written,
                or one of `reverb-writer-server`.
            port: As for a new server.
            max_bytes: As for a new server, in bytes.
            max_item_bytes: As for a new server, in bytes; it is for items to come.

        Raises:
            FormatError: There is nothing that was saved, it is damaged, it has rules that no `TableConfig` has, or it
                takes more than `max_bytes`.
            SpecError, ServerUnavailableError: As for a new server.
        """
        wanted, bound, item_bound = _checked(port, max_bytes, max_item_bytes)
        server = cls.__new__(cls)
        with progress(f"restoring {folder}"):
            store = saved_tables.load(folder, bound, item_bound)
        in_background(lambda: server._serve(store, wanted)).result()  # noqa: SLF001  # of this class
        return server

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write all tables into a folder, in place of what was saved there; clients may go on meanwhile.

        Args:
            folder: Made if it is not there. A real server starts with its tables, too: `reverb-writer-server serve
                --checkpoints FOLDER`. Saves into one folder take turns.

        Returns:
            The checkpoint in the folder, as `ReplayServer(tables, restore=...)` takes it.

        Raises:
            OSError: It cannot be written. An earlier save in that folder is unchanged.
        """
        with progress(f"saving {self.address}"):
            return in_background(lambda: saved_tables.save(self._store, folder)).result()

    def _serve(self, store: Store, port: int) -> None:
        process_hooks.claim()
        self._store = store
        threads: Any = _DaemonThreads()  # any executor will do
        endpoint = LocalEndpoint(store)
        self._server: Any = grpc.server(threads, handlers=[Service(endpoint)], options=_OPTIONS)
        self.port = _bind(self._server, port)
        self.address = f"{_HOST}:{self.port}"
        self._closed = Flag()
        self._server.start()
        # It also ends without `close`: at garbage collection, or when the interpreter ends.
        endpoints.BY_ADDRESS[self.address] = endpoint
        self._end = functools.partial(_end, self._server, threads, self.address, endpoint, os.getpid())
        self._stop = weakref.finalize(self, _stop, self._end)

    @property
    def num_bytes(self) -> int:
        """Memory that items and chunks take, as it is counted for `max_bytes`."""
        return self._store.chunks.num_bytes

    def __repr__(self) -> str:
        """Return the address and how many items each table holds."""
        tables = (f"{table}: {size} items" for table, size in self._store.sizes().items())
        return f"<LocalServer at {self.address}: {', '.join(tables)}>"

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until another thread has called `close()`, and return whether that came true.

        Args:
            timeout_s: time to wait, seconds; None for ever. It has no default.
        """
        return self._closed.wait(timeout_s)

    def close(self) -> None:
        """End all streams, free the port and forget the data. Idempotent; does nothing in a forked child."""
        in_background(self._close).result()

    def _close(self) -> None:
        if self._stop.detach() is not None:
            self._end()
        self._closed.set()

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

    Threads of a `ThreadPoolExecutor` are joined when the interpreter ends, and a stream that waits for a rate limiter
    would never return. Their number has no bound, because a stream has a thread for as long as it is open.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._has_ended = False

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Future[Any]:
        """Run a call, and return its future; a RuntimeError after `shutdown`."""
        if self._has_ended:
            raise RuntimeError("the threads have ended.")
        future: Future[Any] = Future()

        def task() -> None:
            try:
                future.set_result(call(*arguments, **keywords))
            except BaseException as error:  # noqa: BLE001  # it is raised where the future is read
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
    """Return the arguments as numbers: port 0 is a free one."""
    return (
        0 if port is None else integer("port", port, minimum=1, maximum=65535),
        _machine_bytes() // _SHARE if max_bytes is None else integer("max_bytes", max_bytes, minimum=1),
        None if max_item_bytes is None else integer("max_item_bytes", max_item_bytes, minimum=1),
    )


def _bind(server: Any, port: int) -> int:
    """Listen on a port, 0 for a free one; return which."""
    try:
        if port:
            socket.create_server((_HOST, port)).close()  # before gRPC, which would log lines of its own
        bound: int = server.add_insecure_port(f"{_HOST}:{port}")
    except (OSError, RuntimeError) as error:  # grpcio says no more than that it failed
        why = "this process may not listen there" if isinstance(error, PermissionError) else "the port is taken"
        raise ServerUnavailableError(
            f"cannot listen on {_HOST}:{port}: {why}. Give another `port`, or None for a free one."
        ) from error
    return bound


def _end(server: Any, threads: Executor, address: str, endpoint: LocalEndpoint, process: int) -> None:
    if os.getpid() == process:
        if endpoints.BY_ADDRESS.get(address) is endpoint:  # not another server that has the address since
            del endpoints.BY_ADDRESS[address]
        endpoint.close()
        server.stop(None).wait(_STOP_S)
        threads.shutdown(wait=False)


def _stop(end: Callable[[], None]) -> None:
    """End the server in another thread: the garbage collector may call this in the middle of one of its functions."""
    ended = in_background(end)
    if may_be_interrupted():
        ended.wait(_STOP_S)
