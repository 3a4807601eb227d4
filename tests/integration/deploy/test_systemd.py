"""What systemd hears from the service, on a socket like its own."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from service_process import service

pytest.importorskip("reverb_writer_server", reason="the server is not installed on this interpreter")
pytestmark = pytest.mark.slow

TABLE = "[tables.replay]\nmax_size = 10\n"


@pytest.fixture
def listener(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[socket.socket]:
    """The socket that NOTIFY_SOCKET names to the processes that a test starts."""
    is_abstract = getattr(request, "param", "") == "abstract"
    name = f"@reverb-writer-{os.getpid()}" if is_abstract else str(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", name)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
        one.bind(name.replace("@", "\0"))
        one.settimeout(60)
        yield one


def hear(listener: socket.socket, line: str) -> set[str]:
    """Return the first message with a line."""
    while True:
        lines = set(listener.recv(65536).decode().split("\n"))
        if line in lines:
            return lines


def test_systemd_hears_when_the_service_serves_and_no_watchdog_while_reverb_is_stopped(
    listener: socket.socket, tmp_path: Path
) -> None:
    with service(tmp_path, f"http.max_silence_s = 2\n{TABLE}") as process:
        assert "READY=1" not in set(listener.recv(65536).decode().split("\n"))
        assert hear(listener, "READY=1") >= {"WATCHDOG=1", "STATUS=serving"}
        os.kill(process.child(), signal.SIGSTOP)
        while "WATCHDOG=1" in (message := listener.recv(65536).decode()):
            pass
        assert "http.max_silence_s is 2" in message
        os.kill(process.child(), signal.SIGCONT)
        hear(listener, "WATCHDOG=1")


@pytest.mark.parametrize("listener", ["path", "abstract"], indirect=True)
def test_stop_within_a_second_is_told(listener: socket.socket) -> None:
    from reverb_writer_server.observability.state import ServiceState
    from reverb_writer_server.observability.systemd import notifying

    state = ServiceState()
    with notifying(state):
        hear(listener, "STATUS=starting")
        state.phase = "draining"
    hear(listener, "STOPPING=1")
