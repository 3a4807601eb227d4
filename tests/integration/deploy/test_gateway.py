"""Who gets in, and what for: the gateway that ships, in front of a real server."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import re
import shutil
import socket
import ssl
import struct
import subprocess
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from gateway import FOLDER, HAPROXY, NGINX, listening
from kinds import by_socket
from ports import free_port
from server_process import SERVER_PYTHON, HostedServer, StartServer
from service_process import run_command
from threads import soon
from waiting import eventually

import reverb_writer as rw

pytest.importorskip("reverb_writer_server", reason="the server is not installed on this interpreter")
pytestmark = [by_socket, pytest.mark.skipif(NGINX is None, reason="nginx is not installed")]

by_gateway = pytest.mark.only_server("local", "the gateway decides it, whatever server is behind it")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `certs` makes for a server named localhost and a client named client."""
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    return folder


def make_certificates(folder: Path, *clients: str) -> None:
    """Do what the command `certs` does, in this process: another one takes seconds to start on a busy machine."""
    from reverb_writer_server import certs

    certs.make_certificates(folder, ["localhost"], clients or ["client"], days=2)


@dataclass(frozen=True)
class Gateway:
    """A server behind its door, and the folder of its clients' certificates."""

    server: HostedServer
    address: str
    certificates: Path

    def tls(self, name: str = "client") -> rw.TLS:
        folder = self.certificates
        return rw.TLS(folder / "ca.crt", folder / f"{name}.crt", folder / f"{name}.key")

    def options(self) -> list[str]:
        folder = self.certificates
        files = ["--ca", folder / "ca.crt", "--cert", folder / "client.crt", "--key", folder / "client.key"]
        return [str(one) for one in files]


@pytest.fixture
def gateway(replay_server: StartServer, certificates: Path) -> Iterator[Gateway]:
    """A gateway with the configuration that ships."""
    yield from behind(replay_server(rw.TableConfig("replay"), rw.TableConfig.queue("queue", 2)), certificates)


def behind(
    server: HostedServer,
    certificates: Path,
    script: Path = FOLDER / "gateway" / "run",
    permitted: str = "* *",
    log: Path | None = None,
    host: str = "127.0.0.1",
) -> Iterator[Gateway]:
    port = free_port()
    permissions = certificates / "permissions.txt"
    permissions.write_text(f"{permitted}\n")
    with listening(
        [str(script)],
        port,
        log,
        REVERB_ADDRESS=f"{host}:{server.port}",
        GATEWAY_PORT=str(port),
        GATEWAY_SOURCE="127.0.0.2",
        CERTIFICATES=str(certificates / "gateway"),
        PERMISSIONS=str(permissions),
        RELOAD_EVERY_S="0.2",
    ):
        yield Gateway(server, f"localhost:{port}", certificates / "clients")


@by_gateway
def test_client_without_a_valid_certificate_is_refused(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from reverb_writer_server import certs

    ours = gateway.certificates / "ca.crt"
    make_certificates(tmp_path / "others")
    shutil.copytree(gateway.certificates.parent / "authority", tmp_path / "expired" / "authority")
    monkeypatch.setattr(certs, "_CLOCK_SKEW", dt.timedelta(days=3))  # so that it was valid once
    certs.make_certificates(tmp_path / "expired", ["localhost"], ["client"], days=-1)
    of_others, expired = (tmp_path / name / "clients" for name in ("others", "expired"))
    for tls, cause in (
        (rw.TLS(ours), "NONE"),
        (
            rw.TLS(ours, of_others / "client.crt", of_others / "client.key"),
            "FAILED:unable to verify the first certificate",
        ),
        (rw.TLS(ours, expired / "client.crt", expired / "client.key"), "FAILED:certificate has expired"),
    ):
        with (
            rw.Client(gateway.address, tls) as client,
            pytest.raises(rw.errors.PermissionDeniedError, match=f"needs a valid certificate.*nginx reports {cause}"),
        ):
            client.server_info(timeout_s=60.0)


@by_gateway
def test_plain_text_older_tls_and_a_gateway_of_another_name_are_refused(gateway: Gateway) -> None:
    elsewhere = gateway.address.replace("localhost", "127.0.0.1")
    for address, tls in ((gateway.address, None), (elsewhere, gateway.tls())):
        with (
            rw.Client(address, tls) as client,
            pytest.raises((rw.errors.ServerUnavailableError, rw.errors.ReplayTimeoutError)),
        ):
            client.server_info(timeout_s=2.0)
    context = ssl.create_default_context(cafile=str(gateway.certificates / "ca.crt"))
    context.load_cert_chain(gateway.certificates / "client.crt", gateway.certificates / "client.key")
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    host, _, port = gateway.address.partition(":")
    with socket.create_connection((host, int(port))) as plain, pytest.raises(ssl.SSLError):
        context.wrap_socket(plain, server_hostname="localhost")


def test_right_certificate_writes_samples_and_asks_for_status_and_checkpoints(gateway: Gateway) -> None:
    with rw.Client(gateway.address, gateway.tls()) as client:
        with rw.TrajectoryObserver(client, "replay", sequence_length=2) as observer:
            for number in range(100):
                observer({"obs": np.full(3, number)})
        assert client.server_info()["replay"].current_size == 99
        assert len(list(client.sample("replay", 50))) == 50
    line = [SERVER_PYTHON, "-m", "reverb_writer.cli", "status", gateway.address, *gateway.options()]
    assert subprocess.run(line, capture_output=True, timeout=60, check=False).returncode == 0
    if gateway.server.kind == "reverb":  # a local server is saved by its own process
        saved = run_command("checkpoints", "save", gateway.address, *gateway.options())
        assert saved.returncode == 0, saved.stderr
        assert Path(saved.stdout.strip()).is_dir()


@pytest.mark.slow
def test_stream_that_is_silent_for_longer_than_every_time_out_survives(
    replay_server: StartServer, certificates: Path, tmp_path: Path
) -> None:
    shutil.copytree(FOLDER / "gateway", tmp_path / "gateway")
    configuration = tmp_path / "gateway" / "nginx.conf"
    times = r"(client_header_timeout|keepalive_timeout|keepalive_time) (30s|1m|10m);"
    text, count = re.subn(times, r"\1 1s;", configuration.read_text())
    assert count == 3
    configuration.write_text(text)
    script = tmp_path / "gateway" / "run"
    for gateway in behind(replay_server(rw.TableConfig.queue("queue", 1)), certificates, script):
        with rw.Client(gateway.address, gateway.tls()) as client:
            observer = rw.TrajectoryObserver(client, "queue", sequence_length=1)
            for number in range(2):
                observer({"obs": np.array([number])})
            with soon(observer.flush):
                time.sleep(4)  # the silence: four times the time-outs
                samples = client.sample("queue", 2, timeout_s=30)
                assert [int(np.squeeze(sample.data["obs"])) for sample in samples] == [0, 1]
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


@pytest.mark.slow
def test_dm_reverb_gets_in_through_a_sidecar(gateway: Gateway) -> None:
    port = free_port()
    if HAPROXY is None:
        pytest.skip("haproxy is not installed")
    with listening(
        [HAPROXY, "-db", "-f", str(FOLDER / "sidecar.cfg")],
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


# What a certificate may be used for.

STEP = {"obs": np.zeros(3, np.float32)}


@pytest.fixture
def limited(replay_server: StartServer, certificates: Path, tmp_path: Path) -> Iterator[Gateway]:
    """A gateway at which `client` may do less than `admin`, who may do all."""
    make_certificates(certificates, "client", "admin")
    permitted = "# comments are none of it\n* info\nclient insert\nadmin *"
    yield from behind(
        replay_server(rw.TableConfig("replay")), certificates, permitted=permitted, log=tmp_path / "audit.log"
    )


@by_gateway
def test_who_may_not_call_gets_a_typed_error_and_a_line_in_the_audit_log(
    limited: Gateway, certificates: Path, tmp_path: Path
) -> None:
    make_certificates(certificates, "Admin", "guest")
    with rw.Client(limited.address, limited.tls()) as client:
        with rw.TrajectoryObserver(client, "replay", sequence_length=2) as observer:  # it may insert, and nothing else
            for _ in range(100):
                observer(STEP)
        assert client.server_info()["replay"].current_size == 99
        calls: dict[str, Callable[[], Any]] = {
            "sample": lambda: list(client.sample("replay", 1)),
            "mutate": lambda: client.mutate_priorities("replay", {1: 2.0}),
            "reset": lambda: client.reset("replay"),
            "checkpoint": client.checkpoint,
        }
        for operation, call in calls.items():
            refusal = f"does not permit {operation} to the certificate of client"
            with pytest.raises(rw.errors.PermissionDeniedError, match=refusal):
                call()
    with rw.Client(limited.address, limited.tls("Admin")) as client:  # in other letters it is another name
        with pytest.raises(rw.errors.PermissionDeniedError, match="does not permit reset to the certificate of Admin"):
            client.reset("replay")
        assert client.server_info()["replay"].current_size == 99  # `* info` is for everyone
    with rw.Client(limited.address, limited.tls("guest")) as client:
        observer = rw.TrajectoryObserver(client, "replay", sequence_length=1)
        with contextlib.suppress(rw.errors.PermissionDeniedError):  # it may be told before the flush
            observer(STEP)
        with pytest.raises(rw.errors.PermissionDeniedError, match="does not permit insert to the certificate of guest"):
            observer.flush()
        with contextlib.suppress(rw.errors.ReverbWriterError):
            observer.close(1.0)
    with rw.Client(limited.address, limited.tls("admin")) as client:
        assert set(next(iter(client.sample("replay", 1))).data) == {"obs"}
        client.reset("replay")

    def audited() -> list[tuple[str, str, str]]:  # a call is logged after its answer
        lines = (tmp_path / "audit.log").read_text().splitlines()
        told = [json.loads(line) for line in lines if '"audit"' in line]
        return [(line["audit"], line["name"], line["operation"]) for line in told]

    refused = [("refused", "client", operation) for operation in calls]
    refused += [("refused", "Admin", "reset"), ("refused", "guest", "insert")]
    eventually(
        lambda: ("permitted", "admin", "reset") in audited(), "the calls are logged, and who drains a table, too"
    )
    assert [*dict.fromkeys(audited())] == [*refused, ("permitted", "admin", "reset")]


@by_gateway
def test_gateway_finds_a_server_that_starts_later(lone_server: StartServer, certificates: Path) -> None:
    port = free_port()
    later: Any = types.SimpleNamespace(port=port)  # the gateway needs no more of it
    for gateway in behind(later, certificates):
        with rw.Client(gateway.address, gateway.tls()) as client:
            with pytest.raises(rw.errors.ReverbWriterError):
                client.server_info(timeout_s=1.0)
            lone_server(rw.TableConfig("replay"), port=port)
            assert "replay" in client.server_info(timeout_s=30.0)


@pytest.mark.slow
@pytest.mark.only_server("local", "it listens at one address of this machine")
def test_gateway_finds_a_server_whose_name_is_unknown_or_moves_at_first(
    replay_server: StartServer, certificates: Path, tmp_path: Path
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    script = tmp_path / "run"  # with a file of names that is its own
    gateway_script = FOLDER / "gateway" / "run"
    script.write_text(
        f"#!/bin/sh\nexec /usr/bin/unshare --mount sh -c 'mount --bind {hosts} /etc/hosts && exec {gateway_script}'\n"
    )
    script.chmod(0o755)
    if subprocess.run(["/usr/bin/unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to make a mount namespace")
    server = replay_server(rw.TableConfig("replay"))
    for gateway in behind(server, certificates, script, host="replay.test"):
        with rw.Client(gateway.address, gateway.tls()) as client:
            for line in ("", "127.0.0.9 replay.test\n"):  # no name; nothing listens there
                hosts.write_text(f"127.0.0.1 localhost\n{line}")
                time.sleep(1)  # it looks five times a second
                with pytest.raises(rw.errors.ReverbWriterError):
                    client.server_info(timeout_s=1.0)
            hosts.write_text("127.0.0.1 localhost\n127.0.0.1 replay.test\n")
            assert "replay" in client.server_info(timeout_s=30.0)


@by_gateway
def test_connection_has_limits_of_http_2_and_the_gateway_few_processes(gateway: Gateway) -> None:
    host, port = gateway.address.split(":")
    tls = ssl.create_default_context(cafile=str(gateway.certificates / "ca.crt"))
    tls.load_cert_chain(gateway.certificates / "client.pem")
    tls.set_alpn_protocols(["h2"])
    with socket.create_connection((host, int(port)), 60) as plain, tls.wrap_socket(plain, server_hostname=host) as one:
        one.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5))  # no settings of its own
        with one.makefile("rb") as reply:
            header = reply.read(9)
            settings = dict(struct.iter_unpack(">HI", reply.read(int.from_bytes(header[:3], "big"))))
    assert header[3] == 4  # a frame of settings
    assert settings[3] == 2048  # streams of a connection at once: without a limit, nginx says 128
    limits = (FOLDER / "gateway" / "nginx.conf").read_text()
    assert "keepalive_requests 100000;" in limits  # and so many in all, after which gRPC makes a new connection
    masters = {int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if _serves(path, gateway)}
    (master,) = masters
    children = Path(f"/proc/{master}/task/{master}/children").read_text().split()
    titles = [Path(f"/proc/{child}/cmdline").read_bytes() for child in children]
    workers = [title for title in titles if b"worker" in title and b"shutting down" not in title]  # of a reload before
    assert len(workers) == 2  # however many processors the host has


def _serves(path: Path, gateway: Gateway) -> bool:
    """Return whether a process is the nginx of a gateway, which listens for its workers."""
    with contextlib.suppress(OSError, IndexError):
        if path.read_bytes().startswith(b"nginx: master"):
            configuration = path.read_bytes().split(b"-c ")[1].rstrip(b"\0").split()[0].decode()
            return f"listen {gateway.address.split(':')[1]} " in Path(configuration).read_text()
    return False


def test_authority_and_its_key_lie_apart_from_what_gateway_server_and_clients_get(certificates: Path) -> None:
    found = {
        folder.name: {path.name for path in folder.iterdir()} for folder in certificates.iterdir() if folder.is_dir()
    }
    assert found["authority"] == {"ca.crt", "ca.key"}
    assert found["gateway"] == {"ca.crt", "server.pem"}
    assert found["replay"] == {"server.crt"}
    assert {"ca.crt", "client.crt", "client.key", "client.pem"} <= found["clients"]
    assert "PRIVATE KEY" not in (certificates / "replay" / "server.crt").read_text()


@pytest.mark.slow
@by_gateway
def test_renewed_certificate_and_new_permissions_need_no_restart(replay_server: StartServer, tmp_path: Path) -> None:
    folder = tmp_path / "certificates"
    make_certificates(folder)
    with contextlib.contextmanager(behind)(replay_server(rw.TableConfig("replay")), folder) as gateway:
        before = serial_number(gateway)
        with rw.Client(gateway.address, gateway.tls()) as old:
            assert "replay" in old.server_info()
            make_certificates(folder)
            eventually(lambda: serial_number(gateway) != before, "the new certificate is served")
            assert "replay" in old.server_info()  # its connection goes on
        (folder / "permissions.txt").write_text("client insert\n")
        eventually(lambda: denied(gateway), "the new permissions are used")


@by_gateway
def test_certificate_that_has_expired_replaces_none(
    replay_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from reverb_writer_server import certs

    folder, log = tmp_path / "certificates", tmp_path / "gateway.log"
    make_certificates(folder)
    with contextlib.contextmanager(behind)(replay_server(rw.TableConfig("replay")), folder, log=log) as gateway:
        before = serial_number(gateway)
        shutil.copytree(folder / "authority", tmp_path / "expired" / "authority")
        monkeypatch.setattr(certs, "_CLOCK_SKEW", dt.timedelta(days=3))  # so that it was valid once
        certs.make_certificates(tmp_path / "expired", ["localhost"], ["client"], days=-1)
        (tmp_path / "expired" / "gateway" / "server.pem").replace(folder / "gateway" / "server.pem")
        eventually(lambda: "reloaded: " in log.read_text(), "the gateway has looked at it")
        assert "server.pem has expired; the former certificate stays" in log.read_text()
        assert serial_number(gateway) == before
        (folder / "permissions.txt").write_text("client insert\n")
        eventually(lambda: denied(gateway), "permissions are changed all the same")
        assert serial_number(gateway) == before


def serial_number(gateway: Gateway) -> int:
    from cryptography import x509

    host, _, port = gateway.address.partition(":")
    return x509.load_pem_x509_certificate(ssl.get_server_certificate((host, int(port))).encode()).serial_number


def denied(gateway: Gateway) -> bool:
    with rw.Client(gateway.address, gateway.tls()) as client:
        try:
            client.server_info(timeout_s=60.0)
        except rw.errors.PermissionDeniedError:
            return True
    return False


@pytest.mark.parametrize("line", ["client insrt", "client", 'client" 1; include /etc/passwd; "x info', "cli ent info"])
def test_permission_that_is_none_is_refused_at_the_start(certificates: Path, tmp_path: Path, line: str) -> None:
    permissions = tmp_path / "permissions.txt"
    permissions.write_text(f"# comment\nactor insert\n{line}\n")
    environment = {
        **os.environ,
        "CERTIFICATES": str(certificates / "gateway"),
        "PERMISSIONS": str(permissions),
        "REVERB_ADDRESS": "127.0.0.1:9",
        "GATEWAY_PORT": str(free_port()),
        "GATEWAY_SOURCE": "127.0.0.2",
    }
    script = [str(FOLDER / "gateway" / "run")]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"got `{line}`, expected a name and one of insert, sample, mutate" in done.stderr
