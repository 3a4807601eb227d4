"""What every test may ask for: real replay servers, in processes of their own.

Each test that asks for one runs three times, on dm-reverb, on `LocalServer`, and on a `LocalServer` in the process of
the tests, unless it says `only_server` or needs a process that it may kill.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import signal
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings
from server_process import HAS_REVERB, HostedServer, Kind, Nursery, SameProcess, ServerProcess, StartServer

from reverb_writer.tables import TableConfig

# No test asserts a time; examples of a property share the server of its fixture.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
settings.load_profile("patient")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "only_server(*kinds, reason): runs on these kinds of servers, for that reason")
    config.addinivalue_line(
        "markers", "slow: takes long and finds little: `make slow` and CI run it, `make test` does not"
    )


def pytest_sessionstart() -> None:
    """Let programs that tests start take SIGINT: a job in the background of a shell ignores it otherwise."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what `only_server` rules out."""
    left_out = [item for item in items if _other_server(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def _other_server(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    kind = callspec.params.get("server_kind") if callspec else None
    if kind == "inside" and not {"nursery", "lone_server"}.isdisjoint(item.fixturenames):  # type: ignore[attr-defined]
        return True
    return kind is not None and any(kind not in mark.args[:-1] for mark in item.iter_markers("only_server"))


@pytest.fixture(scope="module", autouse=True)
def _no_old_objects_in_collections() -> None:
    """Keep what there is out of later collections: many tests collect, and each time would take most of a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", params=["reverb", "local", "inside"])
def server_kind(request: pytest.FixtureRequest) -> Kind:
    """Which server the test runs on."""
    kind: Kind = request.param
    if kind == "reverb" and not HAS_REVERB:
        pytest.skip("dm-reverb is not installed, and REVERB_WRITER_SERVER_PYTHON names no interpreter that has it")
    return kind


@pytest.fixture(scope="session")
def nurseries() -> Iterator[Callable[[Kind], Nursery]]:
    """One of each kind that is asked for. pytest ends what depends on `server_kind` whenever that changes."""
    with contextlib.ExitStack() as ends:
        yield functools.cache(lambda kind: ends.enter_context(contextlib.closing(Nursery(kind))))


@pytest.fixture(scope="session")
def nursery(server_kind: Kind, nurseries: Callable[[Kind], Nursery]) -> Nursery:
    """Whence all processes of servers come: loading TensorFlow takes seconds."""
    return nurseries(server_kind)


@pytest.fixture(scope="session")
def shared_process(server_kind: Kind, nurseries: Callable[[Kind], Nursery]) -> Iterator[ServerProcess | SameProcess]:
    """One process for all servers that no test wants to kill."""
    found = SameProcess() if server_kind == "inside" else ServerProcess(nurseries(server_kind))
    with contextlib.closing(found):
        yield found


@pytest.fixture
def replay_server(shared_process: ServerProcess | SameProcess) -> Iterator[StartServer]:
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
