"""Who gets in: a real HAProxy with the configuration that ships, in front of a real server."""

from __future__ import annotations

import datetime as dt
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from gateway import FOLDER, HAPROXY, haproxy
from server_process import SERVER_PYTHON, HostedServer
from service_process import free_port, run_command

import reverb_writer as rw

pytest.importorskip("reverb_writer_server", reason="the server is not installed on this interpreter")
pytestmark = pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed")

StartServer = Callable[..., HostedServer]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `certs` makes for a server named localhost and a client named client."""
    folder = tmp_path_factory.mktemp("certificates")
    made = run_command("certs", str(folder), "--days", "2")
    assert made.returncode == 0, made.stderr
    return folder


@dataclass(frozen=True)
class Gateway:
    """A server behind its door."""

    server: HostedServer
    address: str
    certificates: Path

    def tls(self) -> rw.TLS:
        """Return what the right client brings."""
        folder = self.certificates
        return rw.TLS(folder / "ca.crt", folder / "client.crt", folder / "client.key")

    def options(self) -> list[str]:
        """Return the same for a command line."""
        folder = self.certificates
        files = ["--ca", folder / "ca.crt", "--cert", folder / "client.crt", "--key", folder / "client.key"]
        return [str(one) for one in files]


@pytest.fixture
def gateway(replay_server: StartServer, certificates: Path) -> Iterator[Gateway]:
    """A gateway with the configuration that ships."""
    yield from behind(replay_server(rw.TableConfig("replay"), rw.TableConfig.queue("queue", 2)), certificates)


def behind(server: HostedServer, certificates: Path, configuration: Path = FOLDER / "gateway.cfg") -> Iterator[Gateway]:
    port = free_port()
    with haproxy(
        configuration,
        port,
        REVERB_ADDRESS=f"127.0.0.1:{server.port}",
        GATEWAY_PORT=str(port),
        GATEWAY_SOURCE="127.0.0.2",
        CERTIFICATES=str(certificates),
    ):
        yield Gateway(server, f"localhost:{port}", certificates)


def refused(address: str, tls: rw.TLS | None) -> None:
    with rw.Client(address, tls) as client, pytest.raises((rw.ServerUnavailableError, rw.ReplayTimeoutError)):
        client.server_info(timeout_s=2.0)


def test_right_certificate_writes_and_samples(gateway: Gateway) -> None:
    with rw.Client(gateway.address, gateway.tls()) as client:
        with rw.TrajectoryObserver(client, "replay", sequence_length=2) as observer:
            for number in range(100):
                observer({"obs": np.full(3, number)})
        assert client.server_info()["replay"].current_size == 99
        assert len(list(client.sample("replay", 50))) == 50


def test_status_comes_in_by_certificate_too(gateway: Gateway) -> None:
    line = [SERVER_PYTHON, "-m", "reverb_writer.cli", "status", gateway.address, *gateway.options()]
    assert subprocess.run(line, capture_output=True, timeout=60, check=False).returncode == 0


@pytest.mark.only_server("reverb", "a local server is saved by its own process")
def test_checkpoint_is_asked_for_by_certificate_too(gateway: Gateway) -> None:
    saved = run_command("checkpoints", "save", gateway.address, *gateway.options())
    assert saved.returncode == 0, saved.stderr
    assert Path(saved.stdout.strip()).is_dir()


def test_client_without_a_certificate_is_refused(gateway: Gateway) -> None:
    refused(gateway.address, rw.TLS(gateway.certificates / "ca.crt"))


def test_plain_text_is_refused(gateway: Gateway) -> None:
    refused(gateway.address, None)


def test_certificate_of_another_authority_is_refused(gateway: Gateway, tmp_path: Path) -> None:
    assert run_command("certs", str(tmp_path), "--days", "2").returncode == 0
    ours = gateway.certificates / "ca.crt"
    refused(gateway.address, rw.TLS(ours, tmp_path / "client.crt", tmp_path / "client.key"))


def test_expired_certificate_is_refused(gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from reverb_writer_server import certs

    for name in ("ca.crt", "ca.key"):
        shutil.copy(gateway.certificates / name, tmp_path / name)
    monkeypatch.setattr(certs, "_CLOCK_SKEW", dt.timedelta(days=3))  # so that it was valid once
    certs.make_certificates(tmp_path, ["localhost"], ["client"], days=-1)
    refused(gateway.address, rw.TLS(tmp_path / "ca.crt", tmp_path / "client.crt", tmp_path / "client.key"))


def test_client_refuses_a_gateway_of_another_name(gateway: Gateway) -> None:
    refused(gateway.address.replace("localhost", "127.0.0.1"), gateway.tls())


def test_older_tls_is_refused(gateway: Gateway) -> None:
    context = ssl.create_default_context(cafile=str(gateway.certificates / "ca.crt"))
    context.load_cert_chain(gateway.certificates / "client.crt", gateway.certificates / "client.key")
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    host, _, port = gateway.address.partition(":")
    with socket.create_connection((host, int(port))) as plain, pytest.raises(ssl.SSLError):
        context.wrap_socket(plain, server_hostname="localhost")


def test_stream_that_is_silent_for_longer_than_every_time_out_survives(
    replay_server: StartServer, certificates: Path, tmp_path: Path
) -> None:
    text = (FOLDER / "gateway.cfg").read_text()
    for name in ("client ", "server ", "client-fin ", "server-fin "):
        text = text.replace(f"timeout {name}30s", f"timeout {name}1s")
    short = tmp_path / "gateway.cfg"
    short.write_text(text)
    assert "30s" not in text
    for gateway in behind(replay_server(rw.TableConfig.queue("queue", 1)), certificates, short):
        with rw.Client(gateway.address, gateway.tls()) as client:
            observer = rw.TrajectoryObserver(client, "queue", sequence_length=1)
            for number in range(2):
                observer({"obs": np.array([number])})
            blocked = threading.Thread(target=observer.flush)
            blocked.start()
            time.sleep(4)  # the silence: four times the time-outs
            samples = client.sample("queue", 2, timeout_s=30)
            assert [int(np.squeeze(sample.data["obs"])) for sample in samples] == [0, 1]
            blocked.join()
            assert observer.stats().reconnects == 0
            observer.close()


@pytest.mark.only_server("reverb", "a local server makes no checkpoints, and has no users but this machine's")
def test_reverb_takes_nobody_who_comes_through_for_itself(gateway: Gateway) -> None:
    folder = gateway.certificates
    files = [(folder / name).read_bytes() for name in ("ca.crt", "client.key", "client.crt")]
    with grpc.insecure_channel(f"127.0.0.1:{gateway.server.port}") as channel:
        assert memory_address(channel, gateway.server) != 0  # whoever calls from here and knows the number
    with grpc.secure_channel(gateway.address, grpc.ssl_channel_credentials(*files)) as channel:
        assert memory_address(channel, gateway.server) == 0


def memory_address(channel: grpc.Channel, server: HostedServer) -> int:
    """Ask as dm-reverb's clients do for a table of the process that they take for their own; 0 is a refusal."""
    details = Path(f"/proc/self/fdinfo/{server.process._process}").read_text()
    process = next(int(line.split()[1]) for line in details.splitlines() if line.startswith("Pid:"))
    request = initialize_request(pid=process, table=b"replay")
    call: Any = channel.stream_stream("/deepmind.reverb.ReverbService/InitializeConnection", bytes, bytes)(
        iter([request]), timeout=30
    )
    reply = next(call, b"")  # a refusal has no reply
    call.cancel()
    return int.from_bytes(reply[1:], "little")  # field 1, a varint; nothing where it is 0


def initialize_request(pid: int, table: bytes) -> bytes:
    """Return an InitializeConnectionRequest: pid is field 1, the table's name field 2."""
    varint = bytes([0x80 | pid & 0x7F, 0x80 | pid >> 7 & 0x7F, pid >> 14])
    return b"\x08" + varint + b"\x12" + bytes([len(table)]) + table


def test_dm_reverb_gets_in_through_a_sidecar(gateway: Gateway) -> None:
    port = free_port()
    with haproxy(
        FOLDER / "sidecar.cfg",
        port,
        SIDECAR_PORT=str(port),
        GATEWAY_ADDRESS=gateway.address,
        GATEWAY_NAME="localhost",
        CERTIFICATES=str(gateway.certificates),
    ):
        script = (
            "import numpy, reverb\n"
            f"client = reverb.Client('127.0.0.1:{port}')\n"
            "client.insert([numpy.zeros(3)], {'replay': 1.0})\n"
            "assert len(list(client.sample('replay', 3))) == 3\n"
        )
        done = subprocess.run([SERVER_PYTHON, "-c", script], capture_output=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr.decode()
