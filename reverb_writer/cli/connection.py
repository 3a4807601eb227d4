"""What commands that talk to a server have in common: their options, a client, and how an error ends them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import click

from reverb_writer.client import Client
from reverb_writer.errors import ReverbWriterError
from reverb_writer.wire.channel import TLS

__all__ = ["connection_options", "ends_well", "new_client"]

_OPTIONS = (
    click.option(
        "--address",
        "-a",
        default="localhost:8000",
        show_default=True,
        envvar="REVERB_WRITER_ADDRESS",
        show_envvar=True,
        help="The server: host:port.",
    ),
    click.option(
        "--timeout",
        type=click.FloatRange(min=0.1),
        default=30.0,
        show_default=True,
        help="Seconds that a call may wait.",
    ),
    click.option("--token", envvar="REVERB_WRITER_TOKEN", show_envvar=True, help="Bearer token; needs TLS."),
    click.option("--tls", is_flag=True, help="Use TLS with the system's certificates."),
    click.option(
        "--ca", type=click.Path(exists=True), help="PEM file of the authority that signed the server: use TLS."
    ),
    click.option("--cert", type=click.Path(exists=True), help="PEM file of the client's certificate."),
    click.option("--key", type=click.Path(exists=True), help="PEM file of its key."),
)


def connection_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that `new_client` takes."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def new_client(
    address: str, timeout: float, token: str | None, tls: bool, ca: str | None, cert: str | None, key: str | None
) -> Client:
    """Return a client as the options say."""
    certificates = TLS(ca, cert, key) if ca or cert or key else tls or None
    return Client(address, certificates, token, timeout)


@contextlib.contextmanager
def ends_well() -> Iterator[None]:
    """Turn errors that a person can mend into one line and exit code 1."""
    try:
        yield
    except (ReverbWriterError, OSError) as error:
        raise click.ClickException(str(error)) from error
