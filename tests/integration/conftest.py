"""A server for tests that only write and read: tables `a` and `b`, emptied for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from reading import Place, fifo
from server_process import HostedServer, ServerProcess

import reverb_writer as rw


@pytest.fixture(scope="session")
def two_tables(shared_process: ServerProcess) -> Iterator[HostedServer]:
    server = shared_process.start(fifo("a"), fifo("b"))
    yield server
    server.stop()


@pytest.fixture
def place(two_tables: HostedServer) -> Iterator[Place]:
    with rw.Client(two_tables.address, timeout_s=20) as client:
        for table in ("a", "b"):
            client.reset(table)
        yield Place(two_tables.address, client)
