"""`reverb-writer-server`: serve, validate, checkpoints, certs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from reverb_writer.cli.groups import Group
from reverb_writer.cli.server_options import new_client, sampler_options, security_options, timeout_option
from reverb_writer.errors import ReverbWriterError
from reverb_writer.progress import progress
from reverb_writer_server import __version__
from reverb_writer_server.config.schema import KEYS

_PATH = click.Path(path_type=Path)
_OF_TABLES = ("max_size", "min_size", "sampler", "sampler_exponent")  # options of each --table


class _Commands(Group):
    """The commands; `serve` is the default."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert `serve` if the first argument is not a command."""
        if not args or (args[0].startswith("-") and args[0] not in ("--help", "--version")):
            args = ["serve", *args]
        return super().parse_args(ctx, args)


def key_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of the configuration's keys; an argument has its key's name, with `__` for `.`."""
    for name, key in reversed([*KEYS.items()]):
        if key.option:
            kind: Any = click.Choice(key.options) if key.options else click.STRING
            if int in key.types:
                kind = click.IntRange(int(key.minimum), int(key.maximum))
            help_line = f"{key.meaning[0].upper()}{key.meaning[1:]}."
            command = click.option(key.option, name.replace(".", "__"), type=kind, help=help_line)(command)
    return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="reverb-writer-server")
def commands() -> None:
    """A Reverb replay server that is safe to run."""


@commands.command()
@click.option("--config", type=_PATH, envvar="REVERB_WRITER_CONFIG", help="TOML file, or Reverb's textproto.")
@click.option("--table", "names", multiple=True, metavar="NAME", help="A table; repeat it for more.")
@click.option("--max-size", type=int, metavar="N", help="Maximum number of items of each --table.")
@click.option(
    "--min-size", type=int, metavar="N", help="Number of items that each --table needs before sampling starts."
)
@sampler_options
@key_options
@click.option(
    "--end-with-input", is_flag=True, help="End when standard input ends, as with the program that writes it."
)
@click.option(
    "--claim", metavar="HOST", help="Claim the checkpoints, and write the address of this server, on HOST, beside them."
)
def serve(config: Path | None, names: Sequence[str], end_with_input: bool, claim: str | None, **given: Any) -> None:
    """Serve until SIGTERM or SIGINT. Command line options override environment variables, which override the file.

    Exit code: 0 stopped by request, 1 cannot start, 2 wrong usage, 3 cannot restore, 4 Reverb died, 5 the last
    checkpoint failed, 6 ended itself because it, or a table, was not alive, 7 ended because another server has
    claimed its checkpoints.
    """
    from reverb_writer_server import signals

    signals.install_handlers()
    if end_with_input:
        signals.end_with_input()
    from reverb_writer.tables import check_unique_names
    from reverb_writer_server import log_setup
    from reverb_writer_server.config import schema as configuration
    from reverb_writer_server.service import Service

    check_unique_names(names)
    given = {name: value for name, value in given.items() if value is not None}
    of_tables = {name: given.pop(name) for name in _OF_TABLES if name in given}
    tables = names or (("replay",) if of_tables else ())
    flags: dict[tuple[str, ...], Any] = {tuple(name.split("__")): value for name, value in given.items()}
    flags |= {("tables", name, key): value for name in tables for key, value in of_tables.items()}
    loaded = configuration.load(config, os.environ, flags, tables)
    log_setup.set_up(loaded.log_format, loaded.log_level)
    service = Service(loaded, lambda line: print(f"reverb_writer_server: {line}", flush=True), claim)
    code = service.run()
    signals.ignore()
    sys.exit(code)


@commands.command()
@click.argument("config", type=_PATH)
@click.option("--shard", type=click.IntRange(0, 999), help="Number of the server, if the configuration has several.")
def validate(config: Path, shard: int | None) -> None:
    """Check a configuration, TOML or Reverb's textproto, and describe its tables.

    Exit code 1 if `serve` would refuse it or its checkpoints. This command does not check whether the ports are free
    and whether another server uses the checkpoints.
    """
    from reverb_writer_server.config import schema as configuration
    from reverb_writer_server.observability import banner
    from reverb_writer_server.starting import what_to_restore

    loaded = configuration.load(config, os.environ, {} if shard is None else {("cluster", "shard"): shard})
    for line in (*banner.table_lines(loaded.tables), *banner.memory_lines(loaded)[0]):
        click.echo(line)
    restored = what_to_restore(loaded)
    if restored is not None:
        click.echo(f"restores checkpoint {restored.name}")


@commands.group(cls=Group)
def checkpoints() -> None:
    """Inspect checkpoints on disk; no server is needed."""


@checkpoints.command("list")
@click.argument("directory", type=_PATH)
def list_checkpoints(directory: Path) -> None:
    """List the checkpoints of a folder, newest first."""
    from reverb_writer_server.checkpoints.folder import checkpoints_in
    from reverb_writer_server.observability.banner import format_bytes

    for one in checkpoints_in(directory):
        size = format_bytes(one.size_bytes)
        click.echo(f"{one.name}  {size:>10}  {one.written_at:%Y-%m-%d %H:%M:%S} UTC  {one.fault() or 'complete'}")


@checkpoints.command()
@click.argument("paths", type=_PATH, nargs=-1, required=True)
def inspect(paths: Sequence[Path]) -> None:
    """Read checkpoints completely, and show their tables. Exit code 1 if one is incomplete or damaged."""
    from reverb_writer_server.checkpoints.contents import Checkpoint, rules_of
    from reverb_writer_server.checkpoints.contents import inspect as read

    faulty = False
    for path in paths:
        try:
            with progress(f"reading {path.name}"):
                found = read(Checkpoint(path))
        except (ReverbWriterError, OSError) as error:
            click.echo(f"{path.name}: {error}", err=True)
            faulty = True
            continue
        held = f"{sum(found.items.values()):,} items in {found.chunks:,} chunks, {found.steps:,} steps"
        click.echo(f"{path.name}: sound, {held}")
        for table in found.tables:
            counts = table.rate_limiter
            click.echo(
                f"  table `{table.table_name}`: {found.items[table.table_name]:,} of {table.max_size:,} items\n"
                f"    {counts.insert_count:,} inserts, {counts.sample_count:,} samples, {counts.delete_count:,} deletes"
            )
            if refused := found.refused.get(table.table_name):
                click.echo(f"    {refused:,} items with a priority that is NaN or negative: a server leaves them out")
            for name, rule in rules_of(table).items():
                click.echo(f"    {name}: {rule}")
    sys.exit(faulty)


@checkpoints.command()
@click.argument(
    "saved", type=click.Path(exists=True, file_okay=False, path_type=Path), nargs=-1, required=True, metavar="DIR..."
)
@click.option("--config", type=_PATH, required=True, help="Configuration of the servers that get the items.")
@click.option("--shards", type=click.IntRange(1, 1000), help="Number of these servers; the file's by default.")
def reshard(saved: Sequence[Path], config: Path, shards: int | None) -> None:
    """Write the checkpoints of M servers as checkpoints of the N servers of a configuration, which must not run.

    Each DIR is a checkpoint, or a folder of checkpoints, whose newest one is taken. The servers restore the new
    checkpoints when they start. The items of tables that are not configured, and the oldest items of tables with less
    room than before, are left out and counted.
    """
    from reverb_writer_server.checkpoints.convert import reshard as write

    for line in write(saved, config, os.environ, shards):
        click.echo(line)


@checkpoints.command()
@click.argument("address")
@timeout_option(600.0, "Seconds to wait for the checkpoint.")
@security_options
def save(address: str, timeout: float, **security: Any) -> None:
    """Make the server at ADDRESS write a checkpoint now."""
    with new_client(address, timeout, **security) as client:
        with progress(f"saving at {address}"):
            path = client.checkpoint()
        click.echo(path)


@commands.command()
@click.argument("folder", type=_PATH)
@click.option("--host", "hosts", multiple=True, default=["localhost"], show_default=True, help="Name of the server.")
@click.option("--client", "clients", multiple=True, default=["client"], show_default=True, help="Name of a client.")
@click.option(
    "--days", type=click.IntRange(1, 3650), default=30, show_default=True, help="Days until the certificates expire."
)
def certs(folder: Path, hosts: Sequence[str], clients: Sequence[str], days: int) -> None:
    """Create a certificate authority and certificates for a server and clients, for trials of TLS.

    A second call for the same FOLDER keeps the authority and the files of other clients, and replaces the server's
    certificate: pass the same --host.
    """
    from reverb_writer_server.certs import make_certificates

    for path in make_certificates(folder, hosts, clients, days):
        click.echo(path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. An expected error prints one line on standard error and gives exit code 1."""
    try:
        commands(arguments, prog_name="reverb-writer-server")
    except (ReverbWriterError, OSError) as error:
        sys.exit(f"reverb_writer_server: {error}")
