"""Processes that host replay servers for the tests, and the tests' end of the line to each.

    tests --Nursery--> a process that has loaded a server's package --fork--> hosts of servers, which may be killed
      +--------------------ServerProcess: requests and replies, pickled--------------------------+

There are three kinds of servers: "reverb" is dm-reverb's, "local" is `LocalServer`, and "inside" is a `LocalServer` in
the process of the tests, which reach it without sockets. The tests may run on an interpreter
without dm-reverb. Servers of the first kind then run on the one that REVERB_WRITER_SERVER_PYTHON names; if it names
none, there are none. Each process ends when the tests' end of its line closes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal, TypeAlias

from ports import free_port

from reverb_writer.tables import TableConfig

Kind: TypeAlias = Literal["reverb", "local", "inside"]

SERVER_PYTHON = os.environ.get("REVERB_WRITER_SERVER_PYTHON") or sys.executable
START_TIMEOUT_S = 180.0  # TensorFlow takes three seconds to load, and far more on a busy machine
HAS_REVERB = bool(os.environ.get("REVERB_WRITER_SERVER_PYTHON")) or all(
    importlib.util.find_spec(package) for package in ("reverb", "reverb_writer_server")
)
_NUMBER_BYTES = 4
_PACKAGES = {"reverb": "reverb_writer_server.reverb.replay_server", "local": "reverb_writer.local"}


class Nursery:
    """Forks processes that have the package of a kind of servers loaded already."""

    def __init__(self, kind: Kind) -> None:
        """Start to load it."""
        self.kind = kind
        self._python = SERVER_PYTHON if kind == "reverb" else sys.executable
        self._line, theirs = socket.socketpair()
        self._line.settimeout(START_TIMEOUT_S)
        with theirs:
            self._process = subprocess.Popen(
                [self._python, __file__, kind, str(theirs.fileno())],
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
            hint = f"{self._python} ran it; is dm-reverb there? REVERB_WRITER_SERVER_PYTHON names another interpreter"
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
        self.kind = nursery.kind
        self._nursery = nursery
        self._servers: dict[int, HostedServer] = {}
        self._folder = tempfile.TemporaryDirectory()  # for what a killed process leaves behind
        self._spawn()

    def start(self, *tables: TableConfig, port: int | None = None) -> HostedServer:
        """Start a server with `tables`, or with one table `replay` of the default configuration."""
        tables = tables or (TableConfig("replay"),)
        server = HostedServer(self, tables, self._ask("start", tables, port or free_port()))
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


class SameProcess:
    """Servers in the process of the tests: they cannot be killed."""

    kind: Kind = "inside"

    def __init__(self) -> None:
        """Begin without servers."""
        self._servers: dict[int, Callable[[], None]] = {}

    def start(self, *tables: TableConfig, port: int | None = None) -> HostedServer:
        """Start a server, as `ServerProcess` does."""
        tables = tables or (TableConfig("replay"),)
        port, stop = serve_local(tables, port)
        self._servers[port] = stop
        return HostedServer(self, tables, port)

    def stop(self, server: HostedServer) -> None:
        """Stop one server."""
        if stop := self._servers.pop(server.port, None):
            stop()

    def close(self) -> None:
        """Stop all servers."""
        for stop in self._servers.values():
            stop()


@dataclass(frozen=True)
class HostedServer:
    """A replay server in a process of the tests."""

    process: Any  # a ServerProcess, or SameProcess
    tables: Sequence[TableConfig]
    port: int

    @property
    def address(self) -> str:
        """Where a client finds it."""
        return f"127.0.0.1:{self.port}" if self.kind == "inside" else f"localhost:{self.port}"

    @property
    def kind(self) -> Kind:
        """Which server it is."""
        kind: Kind = self.process.kind
        return kind

    def stop(self) -> None:
        """Stop it; the process goes on."""
        self.process.stop(self)


StartServer: TypeAlias = Callable[..., HostedServer]


def serve_reverb(tables: Sequence[TableConfig], port: int | None) -> tuple[int, Callable[[], None]]:
    """Start dm-reverb's server; return its port and what stops it."""
    from reverb_writer_server import ReplayServer  # only this side has dm-reverb

    server = ReplayServer(tables, port)
    return server.port, server.stop


def serve_local(tables: Sequence[TableConfig], port: int | None) -> tuple[int, Callable[[], None]]:
    """Start a `LocalServer`; return its port and what stops it."""
    from reverb_writer.local import LocalServer

    server = LocalServer(tables, port)
    return server.port, server.close


def host(line: Connection, serve: Callable[..., tuple[int, Callable[[], None]]]) -> None:
    """Carry out requests until the tests' end of `line` closes."""
    servers: dict[int, Callable[[], None]] = {}
    with contextlib.suppress(EOFError):
        while True:
            verb, *arguments = line.recv()
            try:
                if verb == "start":
                    port, stop = serve(*arguments)
                    servers[port] = stop
                    line.send((None, port))
                else:
                    servers.pop(*arguments)()
                    line.send((None, None))
            except Exception as error:  # noqa: BLE001  # the other side raises it
                line.send((repr(error), None))
    for stop in servers.values():
        stop()


def raise_hosts(kind: str, line: socket.socket) -> None:
    """Fork a host for each request, until the tests' end of `line` closes."""
    importlib.import_module(_PACKAGES[kind])  # what takes seconds, and is done before the fork

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # leaves no zombies
    while True:
        folder, lines, _, _ = socket.recv_fds(line, 4096, 1)
        if not lines:
            return
        number = os.fork()
        if not number:
            line.close()
            tempfile.tempdir = folder.decode()
            host(Connection(lines[0]), serve_reverb if kind == "reverb" else serve_local)
            os._exit(0)
        os.close(lines[0])
        line.sendall(number.to_bytes(_NUMBER_BYTES, "big"))


if __name__ == "__main__":
    raise_hosts(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
