"""`reverb-writer reset`: empty tables of one server or of several."""

from __future__ import annotations

from typing import Any

import click

from reverb_writer.cli.server_options import (
    addresses_argument,
    new_client,
    report_errors,
    security_options,
    timeout_option,
)


@click.command("reset")
@addresses_argument
@click.option("--table", "-t", "tables", multiple=True, required=True, metavar="NAME", help="A table; may be repeated.")
@timeout_option(30.0, "Time-out of the server's answer, in seconds.")
@security_options
def command(addresses: tuple[str, ...], tables: tuple[str, ...], timeout: float, **security: Any) -> None:
    """Remove all items of tables of the server at ADDRESS (host:port), and set their rate limiters to zero.

    With several servers that are one replay, all are emptied. An ADDRESS may also be a file of addresses, `file:PATH`.
    Without ADDRESS, REVERB_WRITER_ADDRESS is read.
    """
    address = addresses[0] if len(addresses) == 1 else list(addresses)
    with report_errors(), new_client(address, timeout, **security) as client:
        held = client.server_info()
        for name in tables:
            if name not in held:
                raise click.ClickException(f"table `{name}` is not on the server; it has {', '.join(sorted(held))}.")
        for name in tables:
            client.reset(name)
            click.echo(f"{name}: {held[name].current_size:,} items removed")
