"""Shared by the conformance tests: the peers, and servers with tables for the two sides."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # our tests fail on warnings, and these two cannot be loaded without
    import reverb
    import tf_agents  # noqa: F401  # the tests use it

import reverb_writer as rw

from .nests import TABLES
from .serve import Table, serving, serving_locally

SERVERS = {"reverb": serving, "local": serving_locally}
QUEUES = ("ours", "ours_too", "theirs", "theirs_too")


def empty(client: Any, tables: Iterable[str]) -> None:
    """Empty tables."""
    for table in tables:
        client.reset(table)


@pytest.fixture(scope="session", params=SERVERS)
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a server with four queues; a test leaves them as empty as it found them."""
    with SERVERS[request.param]([Table(name) for name in QUEUES]) as address:
        yield address


@pytest.fixture(scope="session")
def _peer(address: str) -> Any:
    return reverb.Client(address)


@pytest.fixture
def peer(_peer: Any) -> Iterator[Any]:
    """dm-reverb's client of the server; whatever the test leaves behind in the queues is thrown away."""
    yield _peer
    empty(_peer, QUEUES)


@pytest.fixture(scope="session", params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a server with the tables of `nests`: with and without signatures, and with other selectors."""
    with SERVERS[request.param](TABLES) as address:
        yield address


@pytest.fixture
def theirs(server: str) -> Iterator[Any]:
    """dm-reverb's client of that server, the tables of which are empty before and after."""
    client = reverb.Client(server)
    yield client
    empty(client, [table.name for table in TABLES])


@pytest.fixture
def ours(server: str) -> Iterator[rw.Client]:
    """Our client of that server."""
    with rw.Client(server) as client:
        yield client
