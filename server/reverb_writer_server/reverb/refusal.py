"""In the service: refuses inserts, with the reason, while the Reverb process takes more memory than it may.

`WriterGuard` ends the connections of writers. When they reconnect, the kernel leads them to a server of the service
that listens on the same port (SO_REUSEPORT), and answers every call with RESOURCE_EXHAUSTED and the reason. Learners
that are connected to Reverb stay so. Nothing is read or forwarded here, so it is no way around a restriction of
Reverb's port.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from reverb_writer_server.reverb.loopback import LOOPBACK_INTERFACE
from reverb_writer_server.reverb.writer_guard import RESUME_SHARE, resident_bytes
from reverb_writer_server.watch_thread import WatchThread

_logger = logging.getLogger(__name__)
_EVERY_S = 0.25
_GRACE_S = 0.5
_JOIN_S = 5.0
_NUM_THREADS = 8
_ATTACH_REUSEPORT_CBPF = 51  # SO_ATTACH_REUSEPORT_CBPF of Linux
_RETURN = 0x06  # BPF_RET | BPF_K
_COPY_BYTES = 1 << 16
_LISTENING = "0A"  # in /proc/net/tcp


class MemoryLimit(WatchThread):
    """Watches the Reverb process in a thread of its own, and refuses inserts while it is above its limit."""

    def __init__(
        self, port: int, process: int, max_bytes: int, told: Callable[[str], None], *, on_loopback: bool
    ) -> None:
        """Start the thread.

        Args:
            port: the port of the Reverb process.
            process: its id.
            max_bytes: its limit of resident memory; `WriterGuard` has the same.
            told: called with the reason when inserts are refused, and with "" when they are accepted again.
            on_loopback: whether the Reverb process accepts connections from this machine only.
        """
        self._interface = LOOPBACK_INTERFACE if on_loopback else None
        self._port, self._process, self._max_bytes, self._told = port, process, max_bytes, told
        super().__init__("memory-limit", _JOIN_S)

    def _run(self) -> None:
        while not self._closed.wait(_EVERY_S):
            used = resident_bytes(self._process)
            if used > self._max_bytes:
                reason = (
                    f"the Reverb process takes {used:,} bytes, memory.max_total_bytes is {self._max_bytes:,}. Lower "
                    "max_size of its tables, or raise the limit"
                )
                _logger.error("inserts are refused: %s", reason)
                try:
                    with _refusing(self._port, f"inserts are refused: {reason}.", self._interface):
                        self._told(reason)
                        while resident_bytes(self._process) > RESUME_SHARE * self._max_bytes:
                            if self._closed.wait(_EVERY_S):
                                return
                except (OSError, RuntimeError) as error:
                    _logger.error("writers are disconnected, but cannot be told why: %s", error)  # noqa: TRY400  # nothing to trace
                    self._closed.wait(_JOIN_S)
                _logger.info("inserts are accepted again")
                self._told("")


@contextlib.contextmanager
def _refusing(port: int, reason: str, interface: bytes | None) -> Iterator[None]:
    """Answer all new connections to `port` within the block."""
    index, family = _listeners(port)
    pool = ThreadPoolExecutor(_NUM_THREADS, "refusal")
    server = grpc.server(pool, handlers=[_Refusal(reason)])
    try:
        inner = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with socket.socket(family) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            if interface is not None:  # the kernel shares a port among listeners of one interface
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface)
            listener.bind(("", port))
            listener.listen()
            with _relay(listener, inner):
                _lead_connections_to(listener, index)
                try:
                    yield
                finally:
                    _lead_connections_to(listener, 0)
    finally:
        server.stop(_GRACE_S).wait(_JOIN_S)
        pool.shutdown(wait=False)


@contextlib.contextmanager
def _relay(listener: socket.socket, port: int) -> Iterator[None]:
    """Connect those who come to `listener` with a port of this machine: gRPC cannot be given a socket."""
    loop = asyncio.new_event_loop()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(_copy(reader, inner_writer), _copy(inner_reader, writer))

    accepting = loop.run_until_complete(asyncio.start_server(connect, sock=listener))
    thread = threading.Thread(target=loop.run_forever, name="refusal-relay", daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(accepting.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_JOIN_S)
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(_COPY_BYTES):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


class _Refusal(grpc.GenericRpcHandler):
    """Refuses every call."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def service(self, details: grpc.HandlerCallDetails) -> Any:  # noqa: ARG002  # whatever the method is
        return grpc.stream_stream_rpc_method_handler(self._refuse)

    def _refuse(self, _: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, self._reason)
        yield b""  # never reached: it makes this an iterator


def _listeners(port: int) -> tuple[int, socket.AddressFamily]:
    """Return how many sockets of this machine listen on a port, and their address family."""
    found, family = 0, socket.AF_INET
    for table, of_table in (("/proc/net/tcp", socket.AF_INET), ("/proc/net/tcp6", socket.AF_INET6)):
        for line in Path(table).read_text().splitlines()[1:]:
            row = line.split()
            if row[3] == _LISTENING and int(row[1].rpartition(":")[2], 16) == port:
                found, family = found + 1, of_table
    return found, family


def _lead_connections_to(listener: socket.socket, index: int) -> None:
    """Have the kernel give new connections to the listener of this index among those that share the port."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN, 0, 0, index))
    listener.setsockopt(socket.SOL_SOCKET, _ATTACH_REUSEPORT_CBPF, struct.pack("HL", 1, ctypes.addressof(program)))
