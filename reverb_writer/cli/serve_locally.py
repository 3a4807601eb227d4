"""`reverb-writer local`: a replay server in this terminal, until Ctrl-C."""

from __future__ import annotations

import signal
import socket
import threading
from typing import Any

import click

from reverb_writer.cli.server_options import report_errors, sampler_options, table_configs
from reverb_writer.local import LocalServer
from reverb_writer.tables import TableConfig

_TICK_S = 0.5  # on Windows, the main thread notices Ctrl-C only between two waits


@click.command("local")
@click.option(
    "--table", "-t", "tables", multiple=True, help="May be repeated; `replay` if neither a table nor a queue is given."
)
@click.option(
    "--queue", "-q", "queues", multiple=True, help="A table that gives each item once, oldest first. May be repeated."
)
@click.option(
    "--max-size",
    type=click.IntRange(min=1),
    default=1_000_000,
    show_default=True,
    help="Items in each table; a full queue blocks inserts.",
)
@click.option("--port", "-p", type=click.IntRange(1, 65535), default=8000, show_default=True, help="On 127.0.0.1 only.")
@click.option("--max-bytes", type=click.IntRange(min=1), help="Memory for data; by default a quarter of the machine's.")
@sampler_options
def command(
    tables: tuple[str, ...],
    queues: tuple[str, ...],
    max_size: int,
    port: int,
    max_bytes: int | None,
    sampler: Any,
    sampler_exponent: float | None,
) -> None:
    """Run a small in-memory server for trials and tests; a full table drops its oldest item."""
    tables = tables or (() if queues else ("replay",))
    with socket.socket() as trial:  # checked first, because gRPC would print its own line
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("127.0.0.1", port))
        except OSError as error:
            raise click.ClickException(
                f"cannot listen on 127.0.0.1:{port}: {error.strerror}. Pass another --port."
            ) from error
    stopping = threading.Event()
    with (
        report_errors(),
        LocalServer(
            [
                *table_configs(tables, max_size, sampler, sampler_exponent),
                *(TableConfig.queue(name, max_size) for name in queues),
            ],
            port,
            max_bytes=max_bytes,
        ) as server,
    ):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stopping.set())
        click.echo(f"serving {', '.join((*tables, *queues))} at {server.address}; Ctrl-C ends it and deletes the data")
        while not stopping.wait(_TICK_S):
            pass
