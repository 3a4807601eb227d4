"""Certificates for tests, made by the openssl command."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

OPENSSL = shutil.which("openssl")


@dataclass(frozen=True)
class Identity:
    """A certificate signed by its own key, so that it is its own authority."""

    certificate: Path
    private_key: Path


def make_identity(folder: Path, name: str, host: str = "localhost") -> Identity:
    """Make a certificate of `host`, valid for a day."""
    assert OPENSSL is not None
    identity = Identity(folder / f"{name}.crt", folder / f"{name}.key")
    command = [OPENSSL, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-batch"]
    command += ["-days", "1", "-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{host}"]
    command += ["-keyout", str(identity.private_key), "-out", str(identity.certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return identity


def server_context(server: Identity, client: Identity | None = None) -> ssl.SSLContext:
    """Return what a TLS server needs to speak gRPC; with `client`, only that one may connect."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server.certificate, server.private_key)
    context.set_alpn_protocols(["h2"])
    if client is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(client.certificate)
    return context
