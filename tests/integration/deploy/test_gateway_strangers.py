"""Who stays at the gateway: a certificate that has ended, and strangers who have none."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gateway import FOLDER, NGINX, listening
from kinds import by_socket
from ports import free_port
from server_process import StartServer
from waiting import eventually

import reverb_writer as rw

pytest.importorskip("reverb_writer_server", reason="the server is not installed on this interpreter")
from reverb_writer_server.certs import make_certificates

pytestmark = [
    by_socket,
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed"),
    pytest.mark.only_server("local", "the gateway decides it, whatever server is behind it"),
]
SECONDS = 1 / 86_400  # of a day


@contextlib.contextmanager
def gateway(
    tmp_path: Path,
    certificates: Path,
    server_port: int,
    *changes: tuple[str, str],
    descriptors: int = 4096,
    **environment: str,
) -> Iterator[str]:
    """Run the gateway that ships, with changed times; return its address. It logs to `tmp_path / "log"`."""
    folder = tmp_path / "gateway"
    shutil.copytree(FOLDER / "gateway", folder)
    text = (folder / "nginx.conf").read_text()
    for before, after in changes:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    (folder / "nginx.conf").write_text(text)
    port = free_port()
    with listening(
        ["/bin/sh", "-c", f"ulimit -n {descriptors} && exec {folder / 'run'}"],
        port,
        tmp_path / "log",
        REVERB_ADDRESS=f"127.0.0.1:{server_port}",
        GATEWAY_PORT=str(port),
        GATEWAY_SOURCE="127.0.0.2",
        CERTIFICATES=str(certificates / "gateway"),
        RELOAD_EVERY_S="0.2",
        **environment,
    ):
        yield f"localhost:{port}"


def tls_of(certificates: Path, name: str) -> rw.TLS:
    clients = certificates / "clients"
    return rw.TLS(clients / "ca.crt", clients / f"{name}.crt", clients / f"{name}.key")


def test_connection_does_not_outlive_its_certificate(replay_server: StartServer, tmp_path: Path) -> None:
    """In the shipped gateway, by twenty minutes; here, by seconds."""
    certificates = tmp_path / "certificates"
    make_certificates(certificates, ["localhost"], ["lasting"], days=2)
    shutil.copytree(certificates / "authority", tmp_path / "other" / "authority")
    changes = [("worker_shutdown_timeout 10m", "worker_shutdown_timeout 1s")]
    server = replay_server(rw.TableConfig("replay"))
    with gateway(tmp_path, certificates, server.port, *changes, CUT_EVERY_S="1") as address:
        ends_at = time.monotonic() + 8
        make_certificates(tmp_path / "other", ["localhost"], ["brief"], days=8 * SECONDS)  # type: ignore[arg-type]
        with (
            rw.Client(address, tls_of(tmp_path / "other", "brief")) as brief,
            rw.Client(address, tls_of(certificates, "lasting")) as lasting,
            rw.TrajectoryObserver(lasting, "replay", 1) as theirs,
        ):
            observer = rw.TrajectoryObserver(brief, "replay", 1)  # it has a stream, which lasts
            for one in (observer, theirs):
                one({"n": np.array(0)})
                one.flush()
            assert server_size(server.port) == 2
            assert time.monotonic() < ends_at, "this machine is too slow for this test"

            def is_refused() -> bool:
                try:
                    observer({"n": np.array(1)})
                    observer.flush()
                except rw.errors.PermissionDeniedError as error:
                    return "certificate has expired" in str(error)
                return False

            eventually(is_refused, "the connection ends with its certificate")
            with contextlib.suppress(rw.errors.ReverbWriterError):
                observer.close(0.1)
            before = server_size(server.port)
            theirs({"n": np.array(2)})
            theirs.flush()
            assert server_size(server.port) == before + 1  # the others go on
    told = [line for line in (tmp_path / "log").read_text().splitlines() if "certificate of a client has ended" in line]
    assert len(told) == 1


def server_size(port: int) -> int:
    with rw.Client(f"localhost:{port}") as client:
        return client.server_info()["replay"].current_size


def test_certificate_is_asked_for_in_each_connection(replay_server: StartServer, tmp_path: Path) -> None:
    """A session of TLS that is resumed would have the certificate of the first connection, however old it is."""
    certificates = tmp_path / "certificates"
    make_certificates(certificates, ["localhost"], ["client"], days=2)
    context = ssl.create_default_context(cafile=str(certificates / "clients" / "ca.crt"))
    context.load_cert_chain(certificates / "clients" / "client.pem")
    with gateway(tmp_path, certificates, replay_server(rw.TableConfig("replay")).port) as address:
        session: ssl.SSLSession | None = None
        for _ in range(2):
            plain = socket.create_connection(("localhost", int(address.partition(":")[2])), 60)
            with plain, context.wrap_socket(plain, server_hostname="localhost", session=session) as connection:
                connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert connection.recv(100).startswith(b"HTTP/1.1 ")
                assert not connection.session_reused
                session = connection.session


class Stranger:
    """A connection of HTTP/2 without a certificate."""

    def __init__(self, address: str, certificates: Path) -> None:
        host, _, port = address.partition(":")
        context = ssl.create_default_context(cafile=str(certificates / "clients" / "ca.crt"))
        context.set_alpn_protocols(["h2"])
        with socket.create_connection((host, int(port)), 60) as plain:
            self.connection = context.wrap_socket(plain, server_hostname=host)
        self._replies = self.connection.makefile("rb")
        self._stream = -1
        self.connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0))

    def call(self) -> None:
        """Make a call, which is refused."""
        self._stream += 2
        path = b"/deepmind.reverb.ReverbService/Reset"
        # RFC 7541: POST and https of the static table, then literals of the names 4 and 1.
        headers = b"\x83\x87\x04" + bytes([len(path)]) + path + b"\x01\x09localhost"
        self.connection.sendall(_frame(1, 5, self._stream, headers))
        while self._read() != (1, self._stream):  # other frames come before the headers of the reply
            pass

    def is_open(self) -> bool:
        """Return whether the other end has closed the connection."""
        self.connection.settimeout(0.05)
        try:
            return self.connection.recv(1000) != b""
        except TimeoutError:
            return True
        except OSError:
            return False

    def _read(self) -> tuple[int, int]:
        header = self._replies.read(9)
        assert len(header) == 9, "the gateway has closed the connection"
        self._replies.read(int.from_bytes(header[:3], "big"))
        return header[3], int.from_bytes(header[5:], "big")

    def close(self) -> None:
        self._replies.close()
        self.connection.close()


def _frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    return len(content).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + content


@pytest.mark.parametrize(
    ("before", "after"),
    [("keepalive_timeout 1m", "keepalive_timeout 1s"), ("keepalive_time 10m", "keepalive_time 1s")],
    ids=["silent", "calling"],
)
def test_stranger_keeps_no_connection_after_refused_calls(
    replay_server: StartServer, tmp_path: Path, before: str, after: str
) -> None:
    certificates = tmp_path / "certificates"
    make_certificates(certificates, ["localhost"], ["client"], days=2)
    server = replay_server(rw.TableConfig("replay"))
    with (
        gateway(tmp_path, certificates, server.port, (before, after)) as address,
        contextlib.closing(Stranger(address, certificates)) as one,
    ):
        one.call()

        def is_closed() -> bool:
            if before.startswith("keepalive_time "):
                with contextlib.suppress(OSError, AssertionError):
                    one.call()
                    return False
                return True
            return not one.is_open()

        eventually(is_closed, "the gateway closes it")


def test_strangers_leave_connections_for_others(replay_server: StartServer, tmp_path: Path) -> None:
    """The gateway may have 100 descriptors, and strangers open 150 connections: it closes the oldest silent ones."""
    certificates = tmp_path / "certificates"
    make_certificates(certificates, ["localhost"], ["client"], days=2)
    server = replay_server(rw.TableConfig("replay"))
    with contextlib.ExitStack() as strangers:
        address = strangers.enter_context(gateway(tmp_path, certificates, server.port, descriptors=100, WORKERS="1"))
        for _ in range(150):
            with contextlib.suppress(OSError, AssertionError):  # the gateway may refuse them
                strangers.enter_context(contextlib.closing(Stranger(address, certificates))).call()
        with rw.Client(address, tls_of(certificates, "client")) as client:
            assert "replay" in client.server_info(timeout_s=20.0)


def test_log_of_refused_calls_is_bounded_and_counts_the_others(replay_server: StartServer, tmp_path: Path) -> None:
    certificates = tmp_path / "certificates"
    make_certificates(certificates, ["localhost"], ["client"], days=2)
    log = tmp_path / "log"
    with gateway(tmp_path, certificates, replay_server(rw.TableConfig("replay")).port) as address:
        with contextlib.closing(Stranger(address, certificates)) as one:
            for _ in range(500):
                one.call()
        with rw.Client(address, tls_of(certificates, "client")) as client:
            client.reset("replay")
        eventually(lambda: '"permitted"' in log.read_text(), "a call of others is logged nevertheless")
    eventually(lambda: "calls_not_logged" in log.read_text(), "the rest is counted")
    lines = [json.loads(line) for line in log.read_text().splitlines() if '"audit"' in line]
    refused = [line for line in lines if line["audit"] == "refused" and "path" in line]
    assert 20 <= len(refused) <= 60  # 20 a minute, for at most three minutes
    assert len(refused) + sum(line.get("calls_not_logged", 0) for line in lines) == 500
