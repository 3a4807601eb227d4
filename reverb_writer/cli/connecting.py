"""What commands that talk to a server have in common: their options, a client, and what an error ends them with."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from reverb_writer.client import Client
from reverb_writer.errors import ReverbWriterError
from reverb_writer.wire.channel import TLS

__all__ = [
    "DONE",
    "FAILED",
    "INCOMPLETE",
    "INTERRUPTED",
    "connection_options",
    "ends_well",
    "new_client",
    "progress",
    "stopped",
]

DONE, FAILED, INCOMPLETE, INTERRUPTED = 0, 1, 3, 130  # 2 is click's, for arguments that cannot work

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


@contextlib.contextmanager
def stopped() -> Iterator[Callable[[], bool]]:
    """Have Ctrl-C and SIGTERM ask for an end instead of making one; a second Ctrl-C makes one."""
    asked: list[int] = []

    def ask(number: int, frame: Any) -> None:
        if asked:
            signal.default_int_handler(number, frame)
        asked.append(number)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def progress(description: str, total: int) -> Iterator[Callable[[int, str], None]]:
    """Show on the terminal's standard error how far it is; yields a function of what was added, and of what to say."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[said]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not Console(stderr=True).is_terminal,
    )
    with bar:
        task = bar.add_task(description, total=total, said="")
        yield lambda added, said: bar.update(task, advance=added, said=said)
