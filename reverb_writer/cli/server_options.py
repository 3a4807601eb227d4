"""Options, client and error handling of the commands that connect to a server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, get_args

import click

from reverb_writer.errors import ReverbWriterError
from reverb_writer.tables import Prioritized, SelectorName, TableConfig

if TYPE_CHECKING:
    from reverb_writer.replay.client import Client

_ADDRESS_VARIABLE = "REVERB_WRITER_ADDRESS"
_PEM = click.Path(exists=True, dir_okay=False)


def timeout_option(default_s: float, meaning: str = "Time-out of a call, in seconds.") -> Callable[..., Any]:
    """Return the option `--timeout`."""
    return click.option("--timeout", type=click.FloatRange(min=0.1), default=default_s, show_default=True, help=meaning)


def _joined(*options: Callable[..., Any]) -> Callable[..., Any]:
    """Return a decorator that gives a command all these options."""

    def give(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return give


security_options = _joined(
    click.option("--token", envvar="REVERB_WRITER_TOKEN", show_envvar=True, help="Bearer token; needs TLS."),
    click.option("--tls", is_flag=True, help="Use TLS with the system's certificates."),
    click.option("--ca", type=_PEM, help="PEM file of the authority that signed the server: use TLS."),
    click.option("--cert", type=_PEM, help="PEM file of the client's certificate."),
    click.option("--key", type=_PEM, help="PEM file of its key."),
)
"""The options for token and TLS."""

addresses_argument = click.argument(
    "addresses", nargs=-1, required=True, envvar=_ADDRESS_VARIABLE, metavar="ADDRESS..."
)
"""One server, or several servers that are one replay."""

connection_options = _joined(
    click.option(
        "--address",
        "-a",
        default="localhost:8000",
        show_default=True,
        envvar=_ADDRESS_VARIABLE,
        show_envvar=True,
        help="The server: host:port.",
    ),
    timeout_option(30.0),
    security_options,
)
"""The options that `new_client` takes."""

sampler_options = _joined(
    click.option(
        "--sampler",
        type=click.Choice(get_args(SelectorName)),
        help="Rule that chooses the next item to sample from each --table; uniform by default.",
    ),
    click.option(
        "--sampler-exponent", type=float, metavar="X", help="Exponent of --sampler prioritized; 1 by default."
    ),
)
"""The options for the sampler of the tables that a command line names."""


def table_configs(names: Sequence[str], max_size: int, sampler: Any, exponent: float | None) -> list[TableConfig]:
    """Return tables with these names and this size; `sampler_options` has the sampler and its exponent."""
    if sampler == "prioritized":
        sampler = Prioritized(1.0 if exponent is None else exponent)
    elif exponent is not None:
        raise click.UsageError("--sampler-exponent belongs to --sampler prioritized.")
    return [TableConfig(name, max_size, sampler or "uniform") for name in names]


def new_client(
    address: str | list[str],
    timeout: float,
    token: str | None,
    tls: bool,
    ca: str | None,
    cert: str | None,
    key: str | None,
) -> Client:
    """Return the client that the options describe."""
    from reverb_writer.replay.client import Client  # noqa: PLC0415  # loads gRPC, which other commands do not need
    from reverb_writer.transport.wire import TLS  # noqa: PLC0415  # as above

    certificates = TLS(ca, cert, key) if ca or cert or key else tls or None
    return Client(address, certificates, token, timeout)


@contextlib.contextmanager
def report_errors(exit_code: int = 1) -> Iterator[None]:
    """Report expected errors as one line and an exit code."""
    try:
        yield
    except (ReverbWriterError, OSError) as error:
        ending = click.ClickException(str(error))
        ending.exit_code = exit_code  # type: ignore[misc]  # typed as of the class, read from the error
        raise ending from error
