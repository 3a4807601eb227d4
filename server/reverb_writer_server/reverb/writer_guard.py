"""In the Reverb process: ends the connections of writers while the process takes more memory than it may.

Reverb has no limit of memory, and its rate limiters cannot be changed while it runs. So the connections over which data
arrive are shut down; those of learners, over which data leave, stay. `refusal` answers the writers when they come back.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import socket
import struct
import threading
from pathlib import Path

RESUME_SHARE = 0.95  # of the limit, below which inserts are accepted again

_EVERY_S = 0.25
_TRIM_EVERY = 8  # turns
_ACKED_AND_RECEIVED = struct.Struct("120x2Q")  # of Linux's tcp_info: bytes that the other side has, bytes from there
_QUIET_BYTES = 64 << 10  # that any client sends
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes(process: int | str) -> int:
    """Return the resident memory of a process; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


class WriterGuard:
    """Watches this process from a thread of its own, until the process ends."""

    def __init__(self, port: int, max_bytes: int) -> None:
        """Start the thread.

        Args:
            port: the port that writers connect to.
            max_bytes: resident memory of this process from which on they are disconnected.
        """
        self._port, self._max_bytes = port, max_bytes
        self._received: dict[int, int] = {}
        threading.Thread(target=self._run, name="writer-guard", daemon=True).start()

    def _run(self) -> None:
        pause = threading.Event()
        # glibc keeps what was freed, which would stay refused; jemalloc gives it back by itself.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", int)
        for turn in itertools.count():
            pause.wait(_EVERY_S)
            if resident_bytes("self") > RESUME_SHARE * self._max_bytes:
                if turn % _TRIM_EVERY == 0:
                    trim(0)
                if resident_bytes("self") > self._max_bytes:
                    self._end_writers()

    def _end_writers(self) -> None:
        before, self._received = self._received, {}
        for entry in list(Path("/proc/self/fd").iterdir()):
            with contextlib.suppress(OSError):
                if not str(entry.readlink()).startswith("socket:"):
                    continue
                one = socket.socket(fileno=int(entry.name))
                try:
                    self._end_if_writer(one, before)
                finally:
                    one.detach()  # it belongs to gRPC

    def _end_if_writer(self, one: socket.socket, before: dict[int, int]) -> None:
        if one.family not in (socket.AF_INET, socket.AF_INET6) or one.getsockname()[1] != self._port:
            return
        remote = one.getpeername()[1]  # a listener has none: OSError
        sent, received = _ACKED_AND_RECEIVED.unpack(
            one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED_AND_RECEIVED.size)
        )
        self._received[remote] = received
        is_sending = received - before.get(remote, received) > _QUIET_BYTES
        if is_sending or received > sent + _QUIET_BYTES:
            one.shutdown(socket.SHUT_RDWR)
