"""In the service: refuses inserts, with the reason, while the Reverb process takes more memory than it may.

`WriterGuard` ends the connections of writers. When they reconnect, the kernel leads them to a server of the service
that listens on the same port (SO_REUSEPORT), and answers every call with RESOURCE_EXHAUSTED and the reason. Learners
that are connected to Reverb stay so. Nothing is read or forwarded here, so it is no way around a restriction of
Reverb's port.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from reverb_writer_server.reverb.writer_guard import RESUME_SHARE, resident_bytes

__all__ = ["MemoryLimit"]

_logger = logging.getLogger(__name__)
_EVERY_S = 0.25
_GRACE_S = 0.5
_JOIN_S = 5.0
_NUM_THREADS = 8
_ATTACH_REUSEPORT_CBPF = 51  # SO_ATTACH_REUSEPORT_CBPF of Linux
_RETURN = 0x06  # BPF_RET | BPF_K
_INTERNET = (socket.AF_INET, socket.AF_INET6)
_LISTENING = "0A"  # in /proc/net/tcp


class MemoryLimit:
    """Watches the Reverb process in a thread of its own, and refuses inserts while it is above its limit."""

    def __init__(self, port: int, process: int, max_bytes: int, told: Callable[[str], None]) -> None:
        """Start the thread.

        Args:
            port: the port of the Reverb process.
            process: its id.
            max_bytes: its limit of resident memory; `WriterGuard` has the same.
            told: called with the reason when inserts are refused, and with "" when they are accepted again.
        """
        self._port, self._process, self._max_bytes, self._told = port, process, max_bytes, told
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-limit", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching, and refuse no more. Idempotent."""
        self._closed.set()
        self._thread.join(_JOIN_S)

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
                    with _refusing(self._port, f"inserts are refused: {reason}."):
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
def _refusing(port: int, reason: str) -> Iterator[None]:
    """Answer all new connections to `port` within the block."""
    index = _num_listeners(port)
    pool = ThreadPoolExecutor(_NUM_THREADS, "refusal")
    server = grpc.server(pool, handlers=[_Refusal(reason)], options=[("grpc.so_reuseport", 1)])
    try:
        server.add_insecure_port(f"[::]:{port}")
        server.start()
        listener = _own_listener(port)
        _lead_connections_to(listener, index)
        try:
            yield
        finally:
            _lead_connections_to(listener, 0)
    finally:
        server.stop(_GRACE_S).wait(_JOIN_S)
        pool.shutdown(wait=False)


class _Refusal(grpc.GenericRpcHandler):
    """Refuses every call."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def service(self, details: grpc.HandlerCallDetails) -> Any:  # noqa: ARG002  # whatever the method is
        return grpc.stream_stream_rpc_method_handler(self._refuse)

    def _refuse(self, _: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, self._reason)
        yield b""  # never reached: it makes this an iterator


def _num_listeners(port: int) -> int:
    found = 0
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        rows = (line.split() for line in Path(table).read_text().splitlines()[1:])
        found += sum(row[3] == _LISTENING and int(row[1].rpartition(":")[2], 16) == port for row in rows)
    return found


def _own_listener(port: int) -> int:
    """Return the descriptor of this process's socket that listens on `port`."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):
            if str(entry.readlink()).startswith("socket:"):
                one = socket.socket(fileno=int(entry.name))
                try:
                    listens = one.family in _INTERNET and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    if listens and one.getsockname()[1] == port:
                        return int(entry.name)
                finally:
                    one.detach()
    raise OSError(f"nothing of this process listens on port {port}")


def _lead_connections_to(listener: int, index: int) -> None:
    """Have the kernel give new connections to the listener of this index among those that share the port."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN, 0, 0, index))
    one = socket.socket(fileno=os.dup(listener))
    with one:
        one.setsockopt(socket.SOL_SOCKET, _ATTACH_REUSEPORT_CBPF, struct.pack("HL", 1, ctypes.addressof(program)))
