"""Certificates for encrypted connections."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator
from dataclasses import dataclass

import grpc

from reverb_writer.errors import SpecError


@dataclass(frozen=True)
class TLS:
    """Certificates for an encrypted connection, as paths to PEM files.

    Attributes:
        root_certificates: certificates that may have signed the server's; None for those of the system.
        certificate: this client's own certificate chain, for mutual TLS.
        private_key: its key; given together with `certificate`.
        server_name: the name that the server's certificate must carry, if it is not the address's.

    Raises:
        SpecError: one of `certificate` and `private_key` is given without the other.
    """

    root_certificates: str | os.PathLike[str] | None = None
    certificate: str | os.PathLike[str] | None = None
    private_key: str | os.PathLike[str] | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.private_key is None):
            raise SpecError("`certificate` and `private_key` must be given together: each is useless alone.")


def credentials_of(tls: TLS) -> grpc.ChannelCredentials:
    """Read the PEM files; gRPC itself would say only at the first call, and in its log, that it cannot use them."""
    import ssl  # noqa: PLC0415  # not needed for plain text, and it takes time

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if tls.root_certificates is not None:
        with _readable("root_certificates", tls.root_certificates):
            context.load_verify_locations(tls.root_certificates)
    if tls.certificate is not None:
        with _readable("certificate` and `private_key", tls.certificate, tls.private_key):
            context.load_cert_chain(tls.certificate, tls.private_key, password=lambda: "")
    return grpc.ssl_channel_credentials(*map(_read, (tls.root_certificates, tls.private_key, tls.certificate)))


@contextlib.contextmanager
def _readable(name: str, *paths: str | os.PathLike[str] | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # ssl.SSLError is one, too
        files = ", ".join(os.fspath(path) for path in paths if path is not None)
        raise SpecError(f"`{name}`: cannot use the PEM files {files} ({error.strerror or error}).") from error


def _read(path: str | os.PathLike[str] | None) -> bytes | None:
    return None if path is None else pathlib.Path(path).read_bytes()
