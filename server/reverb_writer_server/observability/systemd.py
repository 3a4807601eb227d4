"""Messages to systemd: readiness, status and that the service is alive, over the socket of sd_notify(3).

starting, restoring  STATUS, and more time to start
serving              READY=1; WATCHDOG=1 as long as `/livez` would answer 200
draining             STOPPING=1, and more time to stop, because a last checkpoint may take minutes
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator, Mapping

from reverb_writer_server.observability.state import ServiceState

_EVERY_S = 1.0
_EXTENSION_S = 30


@contextlib.contextmanager
def notifying(state: ServiceState, environment: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Report the service's state to systemd once per second, until the end of the block; no effect without systemd."""
    address = environment.get("NOTIFY_SOCKET", "")
    if not address:
        yield
        return
    if address.startswith("@"):
        address = f"\0{address[1:]}"  # in the abstract namespace
    ended = threading.Event()

    def run() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
            while True:
                is_last = ended.is_set()  # a service that stops within a second also reports it
                with contextlib.suppress(OSError):  # systemd itself may be restarting
                    end.sendto("\n".join(_lines(state)).encode(), address)
                if is_last:
                    return
                ended.wait(_EVERY_S)

    thread = threading.Thread(target=run, name="systemd", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_EVERY_S)


def _lines(state: ServiceState) -> Iterator[str]:
    phase = state.phase
    is_alive, reason = state.alive()
    yield f"STATUS={state.ready()[1] if is_alive else reason}"
    if is_alive:
        yield "WATCHDOG=1"
    if phase == "serving":
        yield "READY=1"
    elif phase in ("draining", "stopped"):
        yield "STOPPING=1"
    if is_alive and phase != "serving":
        yield f"EXTEND_TIMEOUT_USEC={_EXTENSION_S * 1_000_000}"
