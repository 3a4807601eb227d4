"""`reverb-writer ray`: start, show and stop a cluster of shards on Ray."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click
from rich.console import Console
from rich.table import Table

from reverb_writer.cli.groups import Group
from reverb_writer.cli.server_options import report_errors, sampler_options, table_configs, timeout_option
from reverb_writer.ray.actors import connect_ray
from reverb_writer.ray.cluster import ReplayCluster
from reverb_writer.ray.shard_report import ClusterStatus


@click.group("ray", cls=Group)
def command() -> None:
    """Run replay servers as one replay on a Ray cluster."""


_ray = click.option("--address", default="auto", show_default=True, envvar="RAY_ADDRESS", help="Ray's head: host:port.")


@command.command()
@click.argument("name")
@click.option("--table", "-t", "names", multiple=True, default=["replay"], show_default=True, help="May be repeated.")
@click.option(
    "--max-size", type=click.IntRange(min=1), default=1_000_000, show_default=True, help="Items in all shards together."
)
@sampler_options
@click.option("--shards", type=click.IntRange(min=1), default=1, show_default=True, help="Number of servers.")
@click.option("--python", help="Interpreter of the servers, at the same path on every node; this one by default.")
@click.option("--checkpoints", metavar="DIR", help="Folder for checkpoints that every node reaches by this path.")
@click.option("--every", type=float, default=600.0, show_default=True, help="Seconds between checkpoints.")
@click.option("--cpus", type=float, default=1.0, show_default=True, help="Processors that Ray reserves for a shard.")
@click.option("--memory", type=click.IntRange(min=1), metavar="BYTES", help="Memory of a shard; else an estimate.")
@click.option("--port", type=click.IntRange(1, 65535), help="Port of the first shard; free ones by default.")
@timeout_option(300.0, "Seconds that the start may take.")
@_ray
def up(
    name: str,
    names: Sequence[str],
    max_size: int,
    sampler: str | None,
    sampler_exponent: float | None,
    shards: int,
    python: str | None,
    checkpoints: str | None,
    every: float,
    cpus: float,
    memory: int | None,
    port: int | None,
    timeout: float,
    address: str,
) -> None:
    """Start the cluster NAME, unless it already exists, and print its shards."""
    with report_errors():
        connect_ray(address)
        cluster = ReplayCluster.start(
            name,
            table_configs(names, max_size, sampler, sampler_exponent),
            shards,
            python=python or sys.executable,
            checkpoints=checkpoints,
            checkpoint_every_s=every,
            num_cpus=cpus,
            memory_bytes=memory,
            port=port,
            timeout_s=timeout,
        )
        if not cluster.started:
            click.echo(f"{name} already exists")
        _print(cluster.status())


@command.command()
@click.argument("name", required=False)
@_ray
def status(name: str | None, address: str) -> None:
    """Print the shards of the cluster NAME, or the names of all clusters. Exit code 1 if a shard does not serve."""
    with report_errors():
        connect_ray(address)
        if name is None:
            for one in ReplayCluster.names():
                click.echo(one)
            return
        found = ReplayCluster.attach(name).status()
        _print(found)
    if not found.is_serving:
        raise SystemExit(1)


@command.command()
@click.argument("name")
@timeout_option(600.0, "Seconds that the last checkpoints may take.")
@_ray
def down(name: str, timeout: float, address: str) -> None:
    """Write the last checkpoints of the cluster NAME, and stop it, even if its actors do not answer."""
    with report_errors():
        connect_ray(address)
        unsaved = ReplayCluster.remove(name, timeout)
        click.echo(f"{name} is stopped")
        for shard, why in unsaved.items():
            click.echo(f"no last checkpoint of {shard}: {why}")


def _print(found: ClusterStatus) -> None:
    table = Table("shard", "node", "address", "state")
    for number, shard in enumerate(found.shards):
        table.add_row(str(number), shard.node, shard.address, f"{shard.state} {shard.detail}".strip())
    Console().print(table)
