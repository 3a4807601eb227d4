"""The server side: what is configured is what is served, a port has one server, and every ending is clean.

Servers in this process need dm-reverb; where only the client is installed, those tests are skipped.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server_process import HAS_REVERB, SERVER_PYTHON, START_TIMEOUT_S, StartServer
from service_process import run_command, service
from threads import at_once

import reverb_writer as rw
from reverb_writer.protocol.signatures import ArraySpec
from reverb_writer.tables import Selector

pytestmark = [
    pytest.mark.only_server("reverb", "it is about dm-reverb's server; test_local_server.py is about ours"),
    pytest.mark.skipif(not HAS_REVERB, reason="dm-reverb is not installed"),
]


@pytest.fixture(scope="session")
def server_package() -> Any:
    return pytest.importorskip("reverb_writer_server", reason="the server is not installed on this interpreter")


def server_info(address: str) -> dict[str, Any]:
    with rw.Client(address) as client:
        return client.server_info()


SELECTORS: dict[str, Selector] = {
    "prioritized": rw.Prioritized(0.5),
    **{name: name for name in ("fifo", "lifo", "uniform", "max_heap", "min_heap")},
}
SIGNATURE = {
    "obs": (ArraySpec((None, 84, 84), np.dtype(np.uint8), "camera"), ArraySpec((None,), np.dtype(object))),
    "r": [ArraySpec((2,), np.dtype(np.float32))],
}


def test_tables_are_served_as_they_are_configured(replay_server: StartServer) -> None:
    ratio = rw.SampleToInsertRatio(8, 100, 200)
    info = server_info(
        replay_server(
            *(rw.TableConfig(name, 10, selector, selector) for name, selector in SELECTORS.items()),
            rw.TableConfig("ratio", 1000, rate_limiter=ratio, max_times_sampled=3),
            rw.TableConfig("signed", signature=SIGNATURE),
        ).address
    )
    for name in SELECTORS:
        assert (info[name].sampler, info[name].remover, info[name].max_size) == (name, name, 10)
    limiter = info["ratio"].rate_limiter
    assert (limiter.samples_per_insert, limiter.min_size_to_sample) == (8, 100)
    assert (limiter.min_diff, limiter.max_diff) == (600, 1000)
    assert info["ratio"].max_times_sampled == 3
    assert info["signed"].signature == SIGNATURE
    assert info["ratio"].signature is None


ONE = [rw.TableConfig("a")]


@pytest.mark.parametrize(
    ("tables", "options", "message"),
    [
        ([], {}, "`tables` must not be empty"),
        ([*ONE, rw.TableConfig("b"), *ONE], {}, "must have unique names, got a more than once"),
        (rw.TableConfig("a"), {}, "`tables` must be a sequence of TableConfig"),
        (["a"], {}, r"`tables` must be a sequence of TableConfig, got \['a'\]"),
        ([rw.TableConfig("a", signature={"x": 3})], {}, "table `a`: a leaf of `signature` must be an object with"),
        *((ONE, {"port": port}, "`port` must be") for port in (0, -1, 65536, 80.0, "8000")),
        *((ONE, {"bind": bind}, "`bind` must be") for bind in ("10.0.0.1", "", None)),
    ],
)
def test_tables_ports_and_addresses_that_cannot_be_served_are_refused(
    server_package: Any, tables: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(rw.errors.SpecError, match=message):
        server_package.ReplayServer(tables, **options)


def test_stopped_server_frees_its_port_ends_all_waits_and_takes_its_checkpoints_along(server_package: Any) -> None:
    server = server_package.ReplayServer(ONE)
    assert server.address == f"localhost:{server.port}"
    with rw.Client(server.address) as client:
        path = Path(client.checkpoint())
    assert path.is_dir()
    assert not server.wait(0.01)
    threading.Timer(0.1, server.stop).start()
    assert server.wait(60)
    server.stop()
    assert not path.parent.exists()
    successor = server_package.ReplayServer([rw.TableConfig("b")], server.port)
    assert set(server_info(successor.address)) == {"b"}
    with pytest.raises(KeyError), successor:
        raise KeyError
    assert successor.wait(0)
    with rw.Client(successor.address) as client, pytest.raises(rw.errors.ServerUnavailableError):
        client.server_info(timeout_s=2.0)


@contextlib.contextmanager
def listener(family: socket.AddressFamily, host: str) -> Iterator[int]:
    with socket.create_server((host, 0), family=family) as taken:
        yield taken.getsockname()[1]


@pytest.mark.parametrize(
    ("family", "host"),
    [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::1")],  # noqa: S104
)
def test_port_of_any_listener_is_refused(server_package: Any, family: socket.AddressFamily, host: str) -> None:
    with listener(family, host) as port, pytest.raises(server_package.PortInUseError) as refusal:
        server_package.ReplayServer(ONE, port)
    assert f"port {port} is in use. Stop the process that uses it, or choose another port" in str(refusal.value)


def test_port_of_another_replay_server_is_refused_and_that_one_goes_on(
    replay_server: StartServer, lone_server: StartServer
) -> None:
    first = replay_server(rw.TableConfig("first"))
    with pytest.raises(RuntimeError, match=f"PortInUseError.*port {first.port} is in use"):
        lone_server(rw.TableConfig("second"), port=first.port)
    for _ in range(10):  # the kernel would deal connections out to both
        assert set(server_info(first.address)) == {"first"}


def test_of_many_servers_that_start_on_one_port_at_once_one_gets_it(server_package: Any) -> None:
    with server_package.ReplayServer([rw.TableConfig("a")]) as server:
        port = server.port
    started: list[Any] = []
    refused: list[Exception] = []
    together = threading.Barrier(8)

    def start() -> None:
        together.wait()
        try:
            started.append(server_package.ReplayServer([rw.TableConfig("a")], port))
        except server_package.PortInUseError as error:
            refused.append(error)

    at_once(*[start] * 8)
    for server in started:
        server.stop()
    assert (len(started), len(refused)) == (1, 7)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_command_serves_until_it_is_signalled(number: signal.Signals) -> None:
    line = [SERVER_PYTHON, "-m", "reverb_writer_server", "--port", "0", "--table", "a", "--table", "b"]
    line += ["--max-size", "9", "--min-size", "2", "--sampler", "prioritized", "--sampler-exponent", "0.6"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            tables = server_info(ready.removeprefix("reverb_writer_server: ready at ").partition(",")[0])
            process.send_signal(number)
            rest, log = process.communicate(timeout=START_TIMEOUT_S)
        finally:
            process.kill()
    assert process.returncode == 0
    assert ready.endswith("tables: a, b\n")
    assert rest == ""
    assert not [noise for noise in ("tensorrt", "cuda", "absl::", "[reverb/cc") if noise in log.lower()]
    assert {*tables} == {"a", "b"}
    for info in tables.values():
        assert (info.max_size, info.rate_limiter.min_size_to_sample) == (9, 2)
        assert (info.sampler, info.sampler_exponent) == ("prioritized", 0.6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-size", "0"], "command line: `tables.replay.max_size`: got 0 (integer), allowed:"),
        (["--table", "a", "--table", "a"], "`tables` must have unique names, got a more than once.\n"),
    ],
)
def test_command_that_cannot_work_says_so_in_a_line(arguments: list[str], message: str) -> None:
    done = run_command(*arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith(f"reverb_writer_server: {message}")


def test_command_refuses_a_port_that_is_taken() -> None:
    with listener(socket.AF_INET, "127.0.0.1") as port:
        done = run_command("--port", str(port))
    assert done.returncode == 1
    said = f"port {port} is in use. Stop the process that uses it, or choose another port."
    assert done.stderr.splitlines()[-1] == f"reverb_writer_server: {said}"
    assert ".cc:" not in done.stderr


# Who reaches a server: this machine, unless it is told otherwise. The other machine is a network namespace.

IP = shutil.which("ip") or "/sbin/ip"
_NETWORK = f"10.213.{os.getpid() >> 6 & 255}"  # several processes of tests may have a cable each
OURS, OTHERS = (f"{_NETWORK}.{os.getpid() % 64 * 4 + number}" for number in (1, 2))
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10).close()"
TABLE = "[tables.replay]\nmax_size = 10\n"
WARNING = "everyone who reaches its port"


def ip(*line: str, check: bool = True) -> bool:
    return not subprocess.run([IP, *line], capture_output=True, check=check, timeout=30).returncode


@pytest.fixture
def other_machine() -> Iterator[str]:
    """The name of a network namespace whose only way out is a cable to this machine."""
    name = f"rw{os.getpid()}"
    if not Path(IP).exists() or not ip("netns", "add", name, check=False):
        pytest.skip("this user cannot make a network namespace")
    try:
        ip("link", "add", f"{name}a", "type", "veth", "peer", f"{name}b", "netns", name)
        ip("addr", "add", f"{OURS}/30", "dev", f"{name}a")
        ip("link", "set", f"{name}a", "up")
        for line in (("addr", "add", f"{OTHERS}/30", "dev", f"{name}b"), ("link", "set", f"{name}b", "up")):
            ip("-n", name, *line)
        yield name
    finally:
        ip("link", "delete", f"{name}a", check=False)  # at once; with the namespace alone it would go some time later
        ip("netns", "delete", name)


def reaches(machine: str, port: int) -> bool:
    line = [IP, "netns", "exec", machine, sys.executable, "-c", CONNECT, OURS, str(port)]
    return not subprocess.run(line, capture_output=True, timeout=60, check=False).returncode


def test_server_serves_this_machine_only(other_machine: str, tmp_path: Path) -> None:
    with service(tmp_path, TABLE) as process:
        assert not reaches(other_machine, process.port)
        for address in (f"127.0.0.1:{process.port}", f"[::1]:{process.port}"):
            with rw.Client(address) as client:
                assert "replay" in client.server_info()
        assert WARNING not in process.log()


@pytest.mark.slow
def test_server_told_to_serve_other_machines_says_so_unless_it_has_a_gateway(
    other_machine: str, tmp_path: Path
) -> None:
    certificate = tmp_path / "server.crt"
    certificate.touch()
    for gateway in ("", f'gateway.certificate = "{certificate}"\n'):
        with service(tmp_path, gateway + TABLE, "--bind", "0.0.0.0") as process:  # noqa: S104
            assert reaches(other_machine, process.port)
            lines = [line for line in process.log().splitlines() if WARNING in line]
            if not gateway:
                assert f"{WARNING} can read, change and delete all data" in lines[0]
            assert len(lines) == 1  # in the one log of both: the server behind a gateway adds none


def test_server_of_this_process_serves_this_machine_only(server_package: Any, other_machine: str) -> None:
    with server_package.ReplayServer([rw.TableConfig("a")]) as one:
        assert not reaches(other_machine, one.port)
        with rw.Client(one.address) as client:
            assert "a" in client.server_info()
    with server_package.ReplayServer([rw.TableConfig("a")], bind="0.0.0.0") as one:  # noqa: S104
        assert reaches(other_machine, one.port)
