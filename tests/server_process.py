"""A process that hosts replay servers for the tests, and the tests' end of the line to it.

The tests may run on an interpreter without dm-reverb. The servers then run on the one that REVERB_WRITER_SERVER_PYTHON
names. Requests and replies are pickled over a socket pair; when the tests' end closes, the process ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from reverb_writer.tables import TableConfig

SERVER_PYTHON = os.environ.get("REVERB_WRITER_SERVER_PYTHON") or sys.executable
START_TIMEOUT_S = 60.0  # TensorFlow takes three seconds to load, more on a busy machine


class ServerProcess:
    """Hosts servers until it is closed; can be killed, paused and restarted."""

    def __init__(self) -> None:
        """Start the process, with no server in it yet."""
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
        self._process.kill()
        self._process.wait(START_TIMEOUT_S)

    def pause(self) -> None:
        """Stop the process by SIGSTOP: its ports accept connections, and nothing answers."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused process go on."""
        self._process.send_signal(signal.SIGCONT)

    def restart(self) -> None:
        """After `kill()`: start a new process with the same servers on the same ports, empty."""
        self._line.close()
        self._spawn()
        for server in self._servers.values():
            self._ask("start", server.tables, server.port)

    def close(self) -> None:
        """End the process, paused or not."""
        self._line.close()
        self.kill()
        self._folder.cleanup()

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [SERVER_PYTHON, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "TMPDIR": self._folder.name},
                start_new_session=True,  # Ctrl-C is for the tests, which then close this process
            )
        self._line = Connection(ours.detach())

    def _ask(self, *request: Any) -> Any:
        try:
            self._line.send(request)
            if not self._line.poll(START_TIMEOUT_S):
                raise TimeoutError(f"the server process did not answer {request!r}")
            error, value = self._line.recv()
        except (EOFError, ConnectionError) as ended:
            hint = f"{SERVER_PYTHON} ran it; is dm-reverb there? REVERB_WRITER_SERVER_PYTHON names another interpreter"
            raise RuntimeError(f"the server process has ended: {hint}") from ended
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


if __name__ == "__main__":
    host(Connection(int(sys.argv[1])))
