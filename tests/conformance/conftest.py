"""Shared by the conformance tests: the peers, and a server of each kind with tables for the two sides."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from server_process import Nursery, ServerProcess, StartServer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # our tests fail on warnings, and these two cannot be loaded without
    import reverb
    import tf_agents  # noqa: F401  # the tests use it

import reverb_writer as rw

from .nests import TABLES


@pytest.fixture(scope="session", params=["reverb", "local"])
def address(request: pytest.FixtureRequest, nurseries: Callable[..., Nursery]) -> Iterator[str]:
    """The address of a server with the tables of `nests`, in another process.

    Within one process dm-reverb's client reads the tables in memory and sends nothing.
    """
    with closing(ServerProcess(nurseries(request.param))) as process:
        yield process.start(*TABLES).address


@pytest.fixture(scope="module")
def start_reverb(nurseries: Callable[..., Nursery]) -> Iterator[StartServer]:
    """`start_reverb(*tables)` starts a server of dm-reverb's, which ends with the module."""
    with closing(ServerProcess(nurseries("reverb"))) as process:
        yield process.start


@pytest.fixture
def peer(address: str) -> Iterator[Any]:
    """dm-reverb's client of the server; what the test leaves in the tables is thrown away."""
    client = reverb.Client(address)
    yield client
    for table in TABLES:
        client.reset(table.name)


@pytest.fixture
def our_client(address: str) -> Iterator[rw.Client]:
    """Our client of the server."""
    with rw.Client(address) as client:
        yield client
