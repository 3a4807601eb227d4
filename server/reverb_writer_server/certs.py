"""A certificate authority and certificates for trials of TLS; in production use your own authority."""

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

_CLOCK_SKEW = dt.timedelta(minutes=5)  # allowed difference between the clocks of machines
_SIGNS_CERTIFICATES = x509.KeyUsage(
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


def make_certificates(folder: Path, hosts: Sequence[str], clients: Sequence[str], days: int) -> list[Path]:
    """Write the files of an authority, a server and clients, in one folder per program.

        authority/  ca.crt, and ca.key: keep it on a machine without servers
        gateway/    ca.crt, and server.pem: certificate and key in one file
        replay/     server.crt, from which the replay server learns when the gateway's certificate expires
        clients/    ca.crt, and for each client a .crt, a .key, and both in a .pem

    An existing authority in the folder is used again, so clients can be added later. The server's certificate is made
    again in each call.

    Args:
        folder: created if it does not exist; readable by its owner only.
        hosts: names and addresses under which clients reach the server.
        clients: names of clients, such as "actor".
        days: validity of the certificates, in days; none is valid longer than its authority.

    Returns:
        The written files.

    Raises:
        SpecError: `hosts` is empty, a host or the name of a client is invalid, the authority has expired, or this user
            cannot write the files.
    """
    if not hosts:
        raise SpecError("`hosts` must name at least one host, got none: clients check the name that they connect to.")
    for name in clients:
        if not name or "/" in name or name == "ca":
            raise SpecError(f"`clients`: a name must be a file name other than ca, got {name!r}.")
    of_server = (
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.SubjectAlternativeName([_host(host) for host in hosts]), False),
    )
    of_client = ((x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), False),)
    try:
        for name in ("", "authority", "gateway", "replay", "clients"):
            (folder / name).mkdir(parents=True, exist_ok=True, mode=0o700)
        written: list[Path] = []
        authority = _load_or_create_authority(folder / "authority", days, written)
        for name in ("gateway", "clients"):
            _write_private(folder / name / "ca.crt", _pem(authority[0]), written)
        certificate, key = _issue("server", authority, days, *of_server)
        _write_private(folder / "gateway" / "server.pem", _pem(certificate) + _key_pem(key), written)
        _write_private(folder / "replay" / "server.crt", _pem(certificate), written)
        for name in clients:
            certificate, key = _issue(name, authority, days, *of_client)
            _write_private(folder / "clients" / f"{name}.crt", _pem(certificate), written)
            _write_private(folder / "clients" / f"{name}.key", _key_pem(key), written)
            _write_private(folder / "clients" / f"{name}.pem", _pem(certificate) + _key_pem(key), written)
    except PermissionError as error:
        raise SpecError(
            f"{folder}: user {os.getuid()} cannot write it ({error.strerror}). Run this command as the owner of that "
            'folder, in Docker with --user "$(id -u):$(id -g)".'
        ) from error
    return written


_Issued = tuple[x509.Certificate, ec.EllipticCurvePrivateKey]


def _load_or_create_authority(folder: Path, days: int, written: list[Path]) -> _Issued:
    certificate_path, key_path = folder / "ca.crt", folder / "ca.key"
    if certificate_path.exists() and key_path.exists():
        key = serialization.load_pem_private_key(key_path.read_bytes(), password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise SpecError(f"{key_path}: must be an elliptic curve key, such as this command writes.")
        certificate = x509.load_pem_x509_certificate(certificate_path.read_bytes())
        if certificate.not_valid_after_utc <= dt.datetime.now(dt.timezone.utc):
            raise SpecError(
                f"{certificate_path}: has expired on {certificate.not_valid_after_utc:%Y-%m-%d}, so clients would "
                f"refuse its certificates. Delete {folder}, and run this command again with all hosts and clients."
            )
        return certificate, key
    certificate, key = _issue("reverb-writer trial authority", None, days, (_SIGNS_CERTIFICATES, True))
    _write_private(certificate_path, _pem(certificate), written)
    _write_private(key_path, _key_pem(key), written)
    return certificate, key


def _issue(name: str, authority: _Issued | None, days: int, *extensions: tuple[x509.ExtensionType, bool]) -> _Issued:
    """Return a certificate and its new key, signed by an authority or by itself; extensions may be critical."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    issuer, signer = (subject, key) if authority is None else (authority[0].subject, authority[1])
    now = dt.datetime.now(dt.timezone.utc)
    end = now + dt.timedelta(days=days)
    if authority is not None:  # a later end would be untrue, because nothing is valid after its authority
        end = min(end, authority[0].not_valid_after_utc)
    path_length = 0 if authority is None else None
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .add_extension(x509.BasicConstraints(ca=authority is None, path_length=path_length), critical=True)
    )
    for extension, is_critical in extensions:
        builder = builder.add_extension(extension, critical=is_critical)
    return builder.sign(signer, hashes.SHA256()), key


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not host or not host.isascii():
            hint = "Write it in the form of DNS (xn--...)."
            raise SpecError(f"`hosts` must be addresses, or names in ASCII, got {host!r}. {hint}") from None
        return x509.DNSName(host)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write_private(path: Path, content: bytes, written: list[Path]) -> None:
    """Write a file that only its owner can read; readers get the old or the new content."""
    partial = path.with_name(f".{path.name}.new")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
    partial.replace(path)
    written.append(path)
