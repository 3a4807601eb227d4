"""What every test may ask for: real replay servers, in processes of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings
from server_process import HostedServer, Nursery, ServerProcess

from reverb_writer.tables import TableConfig

settings.register_profile("patient", deadline=None)  # no test asserts a time
settings.load_profile("patient")

StartServer = Callable[..., HostedServer]


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Whence all processes of servers come: loading TensorFlow takes seconds."""
    with contextlib.closing(Nursery()) as nursery:
        yield nursery


@pytest.fixture(scope="session")
def shared_process(nursery: Nursery) -> Iterator[ServerProcess]:
    """One process for all servers that no test wants to kill."""
    with contextlib.closing(ServerProcess(nursery)) as process:
        yield process


@pytest.fixture
def replay_server(shared_process: ServerProcess) -> Iterator[StartServer]:
    """`replay_server(*tables, port=None)` starts a server, which ends with the test."""
    with contextlib.ExitStack() as servers:

        def start(*tables: TableConfig, port: int | None = None) -> HostedServer:
            server = shared_process.start(*tables, port=port)
            servers.callback(server.stop)
            return server

        yield start


@pytest.fixture
def lone_server(nursery: Nursery) -> Iterator[StartServer]:
    """`lone_server(*tables, port=None)` starts a server whose `process` the test may kill, pause and restart."""
    with contextlib.ExitStack() as processes:

        def start(*tables: TableConfig, port: int | None = None) -> HostedServer:
            return processes.enter_context(contextlib.closing(ServerProcess(nursery))).start(*tables, port=port)

        yield start
