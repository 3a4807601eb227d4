"""`reverb-writer status`: what a server's tables hold and who waits for whom, from any machine."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from reverb_writer.client import Client
from reverb_writer.errors import ReplayTimeoutError, ReverbWriterError, ServerUnavailableError
from reverb_writer.flow import Standstill, Watch, figures, reason
from reverb_writer.structure import SPECS_TABLE
from reverb_writer.wire.channel import TLS
from reverb_writer.wire.server_info import ServerInfo, TableInfo

HEALTHY, BLOCKED, UNREACHABLE = 0, 1, 2


@dataclass(frozen=True)
class Look:
    """A server between two moments.

    Attributes:
        before: the earlier moment.
        now: the later one.
        standstills: the sides that stood still in between.
    """

    before: ServerInfo
    now: ServerInfo
    standstills: list[Standstill]

    def rates(self, name: str) -> tuple[float, float]:
        """Return inserts and samples a second."""
        if name not in self.before.tables:
            return 0.0, 0.0
        before, now = self.before.tables[name].rate_limiter, self.now.tables[name].rate_limiter
        seconds = self.now.at - self.before.at
        return (now.num_inserts - before.num_inserts) / seconds, (now.num_samples - before.num_samples) / seconds


@click.command("status")
@click.argument("address")
@click.option("--watch", is_flag=True, help="Look again and again, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one line a look.")
@click.option("--why", is_flag=True, help="Say of each side how much room it has, or why it has none.")
@click.option("--interval", type=click.FloatRange(min=0.1), default=1.0, show_default=True, help="Seconds of a look.")
@click.option(
    "--timeout", type=click.FloatRange(min=0.1), default=5.0, show_default=True, help="Seconds for an answer."
)
@click.option("--ca", type=click.Path(exists=True), help="PEM file of the authority that signed the server: use TLS.")
@click.option("--cert", type=click.Path(exists=True), help="PEM file of the client's certificate.")
@click.option("--key", type=click.Path(exists=True), help="PEM file of its key.")
def command(
    address: str,
    watch: bool,
    as_json: bool,
    why: bool,
    interval: float,
    timeout: float,
    ca: str | None,
    cert: str | None,
    key: str | None,
) -> None:
    """Show the tables of the server at ADDRESS (host:port), and who waits for whom.

    Exit code: 0 healthy, 1 a side of a table is blocked, 2 no server answers.
    """
    code = HEALTHY
    show = _json_lines if as_json else _screen
    try:
        tls = TLS(ca, cert, key) if ca or cert or key else None
        with Client(address, tls, timeout_s=timeout) as client, show(address, why=why, watch=watch) as tell:
            for look in _looks(client, interval, endless=watch):
                tell(look)
                code = BLOCKED if look.standstills else HEALTHY
    except (ServerUnavailableError, ReplayTimeoutError) as error:
        code = _unreachable(address, str(error), as_json=as_json)
    except ReverbWriterError as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        pass
    raise SystemExit(code)


def _looks(client: Client, interval_s: float, *, endless: bool) -> Iterator[Look]:
    watch = Watch()
    before = _tables_of_users(client)
    watch.look(before)
    while True:
        time.sleep(interval_s)
        now = _tables_of_users(client)
        yield Look(before, now, watch.look(now))
        before = now
        if not endless:
            return


def _tables_of_users(client: Client) -> ServerInfo:
    """Return the server's tables but for the one that it keeps for itself."""
    info = client.request_info()
    return replace(info, tables={name: table for name, table in info.tables.items() if name != SPECS_TABLE})


def _unreachable(address: str, reason: str, *, as_json: bool) -> int:
    if as_json:
        click.echo(json.dumps({"address": address, "health": "unreachable", "reason": reason}))
    else:
        click.echo(f"unreachable: {reason}", err=True)
    return UNREACHABLE


@contextlib.contextmanager
def _json_lines(address: str, *, why: bool, watch: bool) -> Iterator[Any]:  # noqa: ARG001  # as _screen
    def tell(look: Look) -> None:
        tables = {}
        for name, table in look.now.tables.items():
            inserts, samples = look.rates(name)
            tables[name] = {**figures(table), "inserts_per_s": inserts, "samples_per_s": samples}
        click.echo(
            json.dumps(
                {
                    "address": address,
                    "health": "blocked" if look.standstills else "healthy",
                    "state_id": f"{look.now.state_id:032x}",
                    "blocked": [asdict(standstill) for standstill in look.standstills],
                    "tables": tables,
                }
            )
        )

    yield tell


@contextlib.contextmanager
def _screen(address: str, *, why: bool, watch: bool) -> Iterator[Any]:
    console = Console()
    if not watch or not console.is_terminal:
        yield lambda look: console.print(_page(address, look, why=why))
        return
    with Live(console=console, auto_refresh=False) as live:
        yield lambda look: live.update(_page(address, look, why=why), refresh=True)


def _page(address: str, look: Look, *, why: bool) -> RenderableType:
    grid = Table(title=address, title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False)
    for heading in ("table", "size", "fill", "inserts/s", "samples/s", "ratio", "wanted", "may insert", "may sample"):
        grid.add_column(heading, justify="left" if heading == "table" else "right")
    for name, table in look.now.tables.items():
        shown = figures(table)
        inserts, samples = look.rates(name)
        grid.add_row(
            name,
            f"{shown['size']:,} / {shown['max_size']:,}",
            f"{shown['fill']:.0%}",
            f"{inserts:,.0f}",
            f"{samples:,.0f}",
            _or_dash(shown["ratio_reached"], "{:.2f}"),
            _or_dash(shown["ratio_wanted"], "{:g}"),
            _or_dash(shown["insert_room"], "{:,.0f}", "any"),
            _or_dash(shown["sample_room"], "{:,.0f}", "any"),
        )
    lines: list[RenderableType] = [grid, Text()]
    lines += [Text(str(standstill), style="bold red") for standstill in look.standstills]
    if not look.standstills:
        lines.append(Text("healthy: no side of any table stands still", style="green"))
    if why:
        lines += [Text(f"table `{table.name}`: {_rooms(table)}") for table in look.now.tables.values()]
    return Group(*lines)


def _rooms(table: TableInfo) -> str:
    """Say of either side how far it may go."""
    inserts, samples = figures(table)["insert_room"], figures(table)["sample_room"]
    sentences = []
    for side, room, other in (("inserts", inserts, "sampled"), ("samples", samples, "inserted")):
        if room == 0:
            sentences.append(f"{side} have to wait. {' '.join(reason(table, side))}")  # type: ignore[arg-type]  # a Side
        elif room is None:
            sentences.append(f"{side} never wait.")
        else:
            sentences.append(f"{side} may go on for {room:,.0f} more before something must be {other}.")
    return " ".join(sentences)


def _or_dash(value: float | None, form: str, without: str = "-") -> str:
    return without if value is None else form.format(value)
