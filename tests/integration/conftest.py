"""Servers for tests that only write and read, their tables emptied for each test: `a` and `b`, or one of each kind."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from reading import SIGNATURE, Place, Serve, fifo
from server_process import HostedServer, ServerProcess, StartServer

import reverb_writer as rw


@pytest.fixture
def serve(replay_server: StartServer) -> Iterator[Serve]:
    """`serve(*tables)` starts a server and returns a client of it; both end with the test."""
    with contextlib.ExitStack() as clients:
        yield lambda *tables: clients.enter_context(rw.Client(replay_server(*tables).address, timeout_s=60))


@pytest.fixture(scope="session")
def two_tables(shared_process: ServerProcess) -> Iterator[HostedServer]:
    server = shared_process.start(fifo("a"), fifo("b"))
    yield server
    server.stop()


@pytest.fixture
def place(two_tables: HostedServer) -> Iterator[Place]:
    with rw.Client(two_tables.address, timeout_s=60) as client:
        for table in ("a", "b"):
            client.reset(table)
        yield Place(two_tables.address, client)


@pytest.fixture(scope="session")
def server(shared_process: ServerProcess) -> Iterator[HostedServer]:
    started = shared_process.start(
        fifo("a"),
        fifo("b"),
        fifo("late"),
        fifo("signed", signature=SIGNATURE),
        rw.TableConfig("replay", 1000, rw.Prioritized(1.0)),
        rw.TableConfig("heap", 1000, "max_heap", rate_limiter=rw.MinSize(2)),
        rw.TableConfig("pair", 1000, rate_limiter=rw.MinSize(2)),
    )
    yield started
    started.stop()


@pytest.fixture
def client(server: HostedServer) -> Iterator[rw.Client]:
    with rw.Client(server.address, timeout_s=60) as client:
        for table in client.server_info():
            client.reset(table)
        yield client


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A Chromium, headless."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("there is no Chromium on this machine")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()
