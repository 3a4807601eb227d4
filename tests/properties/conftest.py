"""Servers of this process: what a property says of items does not depend on how bytes come to a server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from reading import Place, fifo

import reverb_writer as rw


@pytest.fixture
def place() -> Iterator[Place]:
    """A server with two tables whose items come out once each, oldest first."""
    with rw.LocalServer([fifo("a"), fifo("b")]) as server, rw.Client(server.address) as client:
        yield Place(server.address, client)


@pytest.fixture
def uniform() -> Iterator[Place]:
    """A server whose table gives its items as often as they are asked for."""
    with rw.LocalServer([rw.TableConfig("a", 1000)]) as server, rw.Client(server.address) as client:
        yield Place(server.address, client)
