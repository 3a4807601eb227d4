"""A certificate authority and certificates to try TLS with; in production use your own authority."""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from reverb_writer.errors import SpecError

_CLOCK_SKEW = dt.timedelta(minutes=5)  # between the clocks of machines


def make_certificates(folder: Path, hosts: Sequence[str], clients: Sequence[str], days: int) -> list[Path]:
    """Write the files of an authority, a server and clients, in a folder for each who needs them.

        authority/  ca.crt, and ca.key: keep it where no server is
        gateway/    ca.crt, and server.pem: certificate and key in one file, as HAProxy wants it
        replay/     server.crt, by which the replay server knows when the gateway's certificate expires
        clients/    ca.crt, and for each client a .crt, a .key, and both in a .pem

    An authority that is already in the folder is used again, so that clients can be added later.

    Args:
        folder: created if it does not exist; readable by its owner only.
        hosts: names and addresses under which clients reach the server.
        clients: names of clients, such as "actor".
        days: how long the certificates are valid.

    Returns:
        The files written.

    Raises:
        SpecError: there are no hosts, a host or the name of a client is not valid, or this user cannot write the files.
    """
    if not hosts:
        raise SpecError("`hosts` must name at least one host, got none: clients check the name that they connect to.")
    for name in clients:
        if not name or "/" in name or name == "ca":
            raise SpecError(f"`clients`: a name must be a file name other than ca, got {name!r}.")
    alternatives = x509.SubjectAlternativeName([_host(host) for host in hosts])
    try:
        return _write_all(folder, alternatives, clients, days)
    except PermissionError as error:
        raise SpecError(
            f"{folder}: user {os.getuid()} cannot write it ({error.strerror}). Run this command as the owner of that "
            'folder, in Docker with --user "$(id -u):$(id -g)".'
        ) from error


def _write_all(
    folder: Path, alternatives: x509.SubjectAlternativeName, clients: Sequence[str], days: int
) -> list[Path]:
    for name in ("", "authority", "gateway", "replay", "clients"):
        (folder / name).mkdir(parents=True, exist_ok=True, mode=0o700)
    written: list[Path] = []
    authority, authority_key = _load_or_create_authority(folder / "authority", days, written)
    for name in ("gateway", "clients"):
        _write_private(folder / name / "ca.crt", _pem(authority), written)
    certificate, key = _issue_certificate(
        "server", ExtendedKeyUsageOID.SERVER_AUTH, authority, authority_key, days, alternatives
    )
    _write_private(folder / "gateway" / "server.pem", _pem(certificate) + _key_pem(key), written)
    _write_private(folder / "replay" / "server.crt", _pem(certificate), written)
    for name in clients:
        certificate, key = _issue_certificate(
            name, ExtendedKeyUsageOID.CLIENT_AUTH, authority, authority_key, days, None
        )
        for suffix, content in (
            ("crt", _pem(certificate)),
            ("key", _key_pem(key)),
            ("pem", _pem(certificate) + _key_pem(key)),
        ):
            _write_private(folder / "clients" / f"{name}.{suffix}", content, written)
    return written


def _load_or_create_authority(
    folder: Path, days: int, written: list[Path]
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    certificate_path, key_path = folder / "ca.crt", folder / "ca.key"
    if certificate_path.exists() and key_path.exists():
        key = serialization.load_pem_private_key(key_path.read_bytes(), password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise SpecError(f"{key_path}: must be an elliptic curve key, as this command writes it.")
        return x509.load_pem_x509_certificate(certificate_path.read_bytes()), key
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("reverb-writer trial authority")
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        _certificate_builder(name, name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA256())
    )
    _write_private(certificate_path, _pem(certificate), written)
    _write_private(key_path, _key_pem(key), written)
    return certificate, key


def _issue_certificate(
    name: str,
    use: x509.ObjectIdentifier,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    days: int,
    alternatives: x509.SubjectAlternativeName | None,
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    builder = (
        _certificate_builder(_name(name), authority.subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([use]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
    )
    if alternatives is not None:
        builder = builder.add_extension(alternatives, critical=False)
    return builder.sign(authority_key, hashes.SHA256()), key


def _certificate_builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + dt.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not host or not host.isascii():
            hint = "Write it as DNS does (xn--...)."
            raise SpecError(f"`hosts` must be addresses, or names in ASCII, got {host!r}. {hint}") from None
        return x509.DNSName(host)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write_private(path: Path, content: bytes, written: list[Path]) -> None:
    """Write a file that only its owner can read; readers get the old content or the new one."""
    partial = path.with_name(f".{path.name}.new")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
    partial.replace(path)
    written.append(path)
