"""Processes that host replay servers for the tests, and the tests' end of the line to each.

    tests --Nursery--> a process that has loaded dm-reverb --fork--> hosts of servers, which may be killed
      +--------------------ServerProcess: requests and replies, pickled---------------+

The tests may run on an interpreter without dm-reverb. The servers then run on the one that REVERB_WRITER_SERVER_PYTHON
names. Each process ends when the tests' end of its line closes.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from reverb_writer.tables import TableConfig

SERVER_PYTHON = os.environ.get("REVERB_WRITER_SERVER_PYTHON") or sys.executable
START_TIMEOUT_S = 180.0  # TensorFlow takes three seconds to load, and far more on a busy machine
_NUMBER_BYTES = 4


class Nursery:
    """Forks processes that have dm-reverb loaded already."""

    def __init__(self) -> None:
        """Start to load it."""
        self._line, theirs = socket.socketpair()
        self._line.settimeout(START_TIMEOUT_S)
        with theirs:
            self._process = subprocess.Popen(
                [SERVER_PYTHON, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the tests, which then close this process
            )

    def fork(self, folder: str) -> tuple[int, Connection]:
        """Start a process whose temporary files go to `folder`; return its number and the line to it."""
        ours, theirs = socket.socketpair()
        number = b""
        with theirs, contextlib.suppress(ConnectionError):
            socket.send_fds(self._line, [folder.encode()], [theirs.fileno()])
            number = self._line.recv(_NUMBER_BYTES)
        if not number:
            hint = f"{SERVER_PYTHON} ran it; is dm-reverb there? REVERB_WRITER_SERVER_PYTHON names another interpreter"
            raise RuntimeError(f"the server process has ended: {hint}")
        return int.from_bytes(number, "big"), Connection(ours.detach())

    def close(self) -> None:
        """End the process; those that it has forked go on."""
        self._line.close()
        self._process.kill()
        self._process.wait(START_TIMEOUT_S)


class ServerProcess:
    """Hosts servers until it is closed; can be killed, paused and restarted."""

    def __init__(self, nursery: Nursery) -> None:
        """Start the process, with no server in it yet."""
        self._nursery = nursery
        self._servers: dict[int, HostedServer] = {}
        self._folder = tempfile.TemporaryDirectory()  # for what a killed process leaves behind
        self._spawn()

    def start(self, *tables: TableConfig, port: int | None = None) -> HostedServer:
        """Start a server with `tables`, or with one table `replay` of the default configuration."""
        tables = tables or (TableConfig("replay"),)
        server = HostedServer(self, tables, self._ask("start", tables, port))
        self._servers[server.port] = server
        return server

    def stop(self, server: HostedServer) -> None:
        """Stop one server; the process goes on."""
        if self._servers.pop(server.port, None):
            self._ask("stop", server.port)

    def kill(self) -> None:
        """End the process by SIGKILL: no server says goodbye."""
        self._signal(signal.SIGKILL)
        self._line.close()
        ended, _, _ = select.select([self._process], [], [], START_TIMEOUT_S)
        assert ended, "a killed process has not ended"

    def pause(self) -> None:
        """Stop the process by SIGSTOP: its ports accept connections, and nothing answers.

        The signal takes effect when one of its threads runs next. Until then the others go on, on a busy machine for
        long, so this returns once all have stopped.
        """
        self._signal(signal.SIGSTOP)
        end = time.monotonic() + START_TIMEOUT_S
        while not self._has_stopped():
            assert time.monotonic() < end, "a process that was told to stop goes on"
            time.sleep(0.001)

    def resume(self) -> None:
        """Let a paused process go on."""
        self._signal(signal.SIGCONT)

    def restart(self) -> None:
        """After `kill()`: start a new process with the same servers on the same ports, empty."""
        os.close(self._process)
        self._spawn()
        for server in self._servers.values():
            self._ask("start", server.tables, server.port)

    def close(self) -> None:
        """End the process, paused or not."""
        self.kill()
        os.close(self._process)
        self._folder.cleanup()

    def _spawn(self) -> None:
        self._number, self._line = self._nursery.fork(self._folder.name)
        self._process = os.pidfd_open(self._number)  # readable when the process has ended and its ports are free

    def _has_stopped(self) -> bool:
        threads = pathlib.Path(f"/proc/{self._number}/task")
        return all((thread / "stat").read_text().rpartition(") ")[2].startswith("T") for thread in threads.iterdir())

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, number)

    def _ask(self, *request: Any) -> Any:
        self._line.send(request)
        if not self._line.poll(START_TIMEOUT_S):
            raise TimeoutError(f"the server process did not answer {request!r}")
        error, value = self._line.recv()
        if error:
            raise RuntimeError(error)
        return value


@dataclass(frozen=True)
class HostedServer:
    """A replay server in a process of the tests."""

    process: ServerProcess
    tables: Sequence[TableConfig]
    port: int

    @property
    def address(self) -> str:
        """Where a client finds it."""
        return f"localhost:{self.port}"

    def stop(self) -> None:
        """Stop it; the process goes on."""
        self.process.stop(self)


def host(line: Connection) -> None:
    """Carry out requests until the tests' end of `line` closes."""
    from reverb_writer_server import ReplayServer  # only this side has dm-reverb

    servers: dict[int, ReplayServer] = {}
    with contextlib.suppress(EOFError):
        while True:
            verb, *arguments = line.recv()
            try:
                if verb == "start":
                    server = ReplayServer(*arguments)
                    servers[server.port] = server
                    line.send((None, server.port))
                else:
                    servers.pop(*arguments).stop()
                    line.send((None, None))
            except Exception as error:  # noqa: BLE001  # the other side raises it
                line.send((repr(error), None))
    for server in servers.values():
        server.stop()


def raise_hosts(line: socket.socket) -> None:
    """Fork a host for each request, until the tests' end of `line` closes."""
    import reverb_writer_server.reverb.replay_server  # noqa: F401  # what takes seconds, and is done before the fork

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # leaves no zombies
    while True:
        folder, lines, _, _ = socket.recv_fds(line, 4096, 1)
        if not lines:
            return
        number = os.fork()
        if not number:
            line.close()
            tempfile.tempdir = folder.decode()
            host(Connection(lines[0]))
            os._exit(0)
        os.close(lines[0])
        line.sendall(number.to_bytes(_NUMBER_BYTES, "big"))


if __name__ == "__main__":
    raise_hosts(socket.socket(fileno=int(sys.argv[1])))
