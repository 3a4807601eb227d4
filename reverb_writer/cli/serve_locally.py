"""`reverb-writer local`: a replay server in this terminal, until Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from reverb_writer.cli.server_options import report_errors, sampler_options, table_configs
from reverb_writer.files.saved_replay import KEPT
from reverb_writer.local import LocalServer
from reverb_writer.replay.client import Client
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
@click.option("--checkpoints", type=click.Path(file_okay=False), help="Folder to restore from and to save to.")
@click.option("--every", type=click.FloatRange(min=0.1), default=60.0, show_default=True, help="Seconds between saves.")
@click.option("--max-bytes", type=click.IntRange(min=1), help="Memory for data; by default a quarter of the machine's.")
@sampler_options
def command(
    tables: tuple[str, ...],
    queues: tuple[str, ...],
    max_size: int,
    port: int,
    checkpoints: str | None,
    every: float,
    max_bytes: int | None,
    sampler: Any,
    sampler_exponent: float | None,
) -> None:
    """Run a small in-memory server for trials and tests; a full table drops its oldest item.

    With --checkpoints, it restores the newest save of the folder with its tables, saves every --every seconds and at
    its end. Observers keep the items that no save has, and send them to the restarted server.
    """
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
    with report_errors(), contextlib.ExitStack() as stack:
        configs = [
            *table_configs(tables, max_size, sampler, sampler_exponent),
            *(TableConfig.queue(name, max_size) for name in queues),
        ]
        server = stack.enter_context(_start(checkpoints, configs, port, max_bytes))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stopping.set())
        end = "ends it and deletes the data" if checkpoints is None else f"saves the data to {checkpoints} and ends it"
        with Client(server.address) as client:
            served = ", ".join(client.server_info())
        click.echo(f"serving {served} at {server.address}; Ctrl-C {end}")
        saved_at = time.monotonic()
        while not stopping.wait(_TICK_S):
            if checkpoints is not None and time.monotonic() - saved_at >= every:
                saved_at = time.monotonic()
                _save(server, checkpoints)
        if checkpoints is not None:
            server.save(checkpoints)


def _start(checkpoints: str | None, configs: Sequence[TableConfig], port: int, max_bytes: int | None) -> LocalServer:
    """Restore the newest save of the folder, or start empty if it has none."""
    if checkpoints is not None and any(Path(checkpoints).glob(f"{KEPT}/[!.]*")):
        return LocalServer.restore(checkpoints, port, max_bytes=max_bytes)
    return LocalServer(configs, port, max_bytes=max_bytes)


def _save(server: LocalServer, checkpoints: str) -> None:
    """Save; after an error the server continues, because its writers keep the items."""
    try:
        server.save(checkpoints)
    except OSError as error:
        click.echo(f"cannot save to {checkpoints}: {error}", err=True)
