"""The sidecar, HAProxy with the configuration that ships, while the gateway is not there yet."""

from __future__ import annotations

from pathlib import Path

import pytest
from certificates import OPENSSL, make_identity
from gateway import FOLDER, HAPROXY, listening
from service_process import free_port

pytestmark = [
    pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed"),
    pytest.mark.skipif(OPENSSL is None, reason="openssl is not installed"),
]


def test_sidecar_starts_before_the_name_of_its_gateway_is_known(tmp_path: Path) -> None:
    identity = make_identity(tmp_path, "client")
    (tmp_path / "client.pem").write_text(identity.private_key.read_text() + identity.certificate.read_text())
    (tmp_path / "ca.crt").write_text(identity.certificate.read_text())
    port = free_port()
    assert HAPROXY is not None  # else this is skipped
    with listening(
        [HAPROXY, "-db", "-f", str(FOLDER / "sidecar.cfg")],
        port,
        SIDECAR_PORT=str(port),
        GATEWAY_ADDRESS="gateway.invalid:8443",
        GATEWAY_NAME="gateway.invalid",
        CERTIFICATES=str(tmp_path),
    ):
        pass  # it listens
