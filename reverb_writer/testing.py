"""A replay server in one line, for test suites of programs that use the package.

    # pytest.ini, or [tool.pytest.ini_options]
    reverb_writer_server = true

    def test_my_actor(replay_server):
        server = replay_server()                               # with one table, `replay`
        my_actor(server.address)

By an entry point, pytest loads this module in every suite. So it loads nothing heavy, and a suite has the fixture only
with that setting or `pytest --reverb-writer-server`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

import reverb_writer as rw

__all__ = ["replay_server"]

_HELP = "give tests the fixture `replay_server`, a reverb_writer.LocalServer"


def replay_server() -> Iterator[Callable[..., rw.LocalServer]]:
    """Start a `LocalServer` by `replay_server(*tables)`, by default with a table `replay`; it ends with the test."""
    with contextlib.ExitStack() as servers:

        def start(*tables: rw.TableConfig, max_bytes: int | None = None) -> rw.LocalServer:
            chosen = tables or (rw.TableConfig("replay"),)
            return servers.enter_context(rw.LocalServer(chosen, max_bytes=max_bytes))

        yield start


class _Fixtures:
    """A separate plugin, because pytest takes all fixtures of a module that it loads."""

    replay_server = staticmethod(pytest.fixture(replay_server))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--reverb-writer-server` and the setting `reverb_writer_server`."""
    parser.getgroup("reverb-writer").addoption("--reverb-writer-server", action="store_true", help=_HELP)
    parser.addini("reverb_writer_server", _HELP, type="bool", default=False)


def pytest_configure(config: pytest.Config) -> None:
    """Register the fixture if the option or the setting asks for it."""
    if config.getoption("--reverb-writer-server") or config.getini("reverb_writer_server"):
        config.pluginmanager.register(_Fixtures(), "reverb_writer.testing.fixtures")
