"""For the test suites of those who use the package: a replay server in a line.

    # pytest.ini, or [tool.pytest.ini_options]
    reverb_writer_server = true

    def test_my_actor(replay_server):
        server = replay_server()                               # with one table, `replay`
        my_actor(server.address)

The plugin comes with the package, and is off unless that line, or `pytest --reverb-writer-server`, asks for it. Instead
of either, a conftest.py may say `pytest_plugins = ["reverb_writer.testing"]`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from reverb_writer.local import LocalServer
from reverb_writer.tables import TableConfig

__all__ = ["replay_server"]


@pytest.fixture
def replay_server() -> Iterator[Callable[..., LocalServer]]:
    """Start a `LocalServer` by `replay_server(*tables)`, by default with one table `replay`; it ends with the test."""
    with contextlib.ExitStack() as servers:

        def start(*tables: TableConfig, max_bytes: int | None = None) -> LocalServer:
            return servers.enter_context(LocalServer(tables or (TableConfig("replay"),), max_bytes=max_bytes))

        yield start
