"""Who reaches a server: this machine, unless it is told otherwise. The other machine is a network namespace."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from service_process import service

import reverb_writer as rw

server = pytest.importorskip("reverb_writer_server", reason="the server is not installed on this interpreter")

IP = shutil.which("ip") or "/sbin/ip"
_NETWORK = f"10.213.{os.getpid() >> 6 & 255}"  # several processes of tests may have a cable each
OURS, OTHERS = (f"{_NETWORK}.{os.getpid() % 64 * 4 + number}" for number in (1, 2))
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10).close()"
TABLE = "[tables.replay]\nmax_size = 10\n"
WARNING = "everyone who reaches port"


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
def test_server_told_to_serve_other_machines_does_and_says_what_that_means(other_machine: str, tmp_path: Path) -> None:
    with service(tmp_path, TABLE, "--bind", "0.0.0.0") as process:  # noqa: S104
        assert reaches(other_machine, process.port)
        lines = [line for line in process.log().splitlines() if WARNING in line]
        assert len(lines) == 1
        assert f"{WARNING} {process.port} can read, change and delete all data" in lines[0]


@pytest.mark.slow
def test_server_behind_a_gateway_says_nothing_of_it(tmp_path: Path) -> None:
    certificate = tmp_path / "server.crt"
    certificate.touch()
    behind = f'bind = "0.0.0.0"\ngateway.certificate = "{certificate}"\n'
    with service(tmp_path, behind + TABLE) as process:
        assert WARNING not in process.log()


def test_server_of_this_process_serves_this_machine_only(other_machine: str) -> None:
    with server.ReplayServer([rw.TableConfig("a")]) as one:
        assert not reaches(other_machine, one.port)
        with rw.Client(one.address) as client:
            assert "a" in client.server_info()
    with server.ReplayServer([rw.TableConfig("a")], bind="0.0.0.0") as one:  # noqa: S104
        assert reaches(other_machine, one.port)


@pytest.mark.parametrize("bind", ["10.0.0.1", "", None])
def test_address_that_reverb_cannot_listen_on_is_refused(bind: Any) -> None:
    with pytest.raises(rw.errors.SpecError, match="`bind` must be"):
        server.ReplayServer([rw.TableConfig("a")], bind=bind)
