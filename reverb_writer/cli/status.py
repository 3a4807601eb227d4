"""`reverb-writer status`: the tables of one server or of several, and the blocked inserts and samples."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from reverb_writer.cli.server_options import (
    addresses_argument,
    new_client,
    report_errors,
    security_options,
    timeout_option,
)
from reverb_writer.replay.client import Client
from reverb_writer.shards.calls import on_each
from reverb_writer.tables.rate_limits import Standstill, StandstillDetector, explain_side, json_figures, rates
from reverb_writer.tables.table_info import ServerInfo, TableInfo

HEALTHY, BLOCKED, UNREACHABLE, CANNOT_ASK = 0, 1, 2, 3


@dataclass(frozen=True)
class ServerState:
    """The state of a server at two moments."""

    before: ServerInfo  # the earlier state
    now: ServerInfo  # the later state
    standstills: list[Standstill]  # the sides, inserts or samples, that were blocked in between

    def rates(self, name: str) -> tuple[float, float]:
        """Return inserts and samples per second."""
        if name not in self.before.tables:
            return 0.0, 0.0
        return rates(self.before.tables[name], self.now.tables[name], self.now.at - self.before.at)


@dataclass(frozen=True)
class NoAnswer:
    """A request that the server did not answer."""

    reason: str  # a sentence

    def __str__(self) -> str:
        return f"unreachable: {self.reason}"


_States: TypeAlias = dict[str, ServerState | NoAnswer]  # states of the servers by address


class _Status(click.Command):
    """A command whose exit code for wrong usage is not 2, because 2 means that the server does not answer."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Set the exit code of wrong usage."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.exit_code = CANNOT_ASK  # type: ignore[misc]  # typed as of the class, read from the error
            raise


@click.command("status", cls=_Status)
@addresses_argument
@click.option("--watch", is_flag=True, help="Repeat until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one line per state.")
@click.option("--why", is_flag=True, help="Show for each side how many inserts or samples are possible, or why none.")
@click.option(
    "--interval", type=click.FloatRange(min=0.1), default=1.0, show_default=True, help="Seconds between two states."
)
@timeout_option(5.0, "Time-out of the server's answer, in seconds.")
@security_options
def command(
    addresses: tuple[str, ...], watch: bool, as_json: bool, why: bool, interval: float, timeout: float, **security: Any
) -> None:
    """Show the tables of the server at ADDRESS (host:port), and the blocked inserts or samples.

    With several servers that are one replay, all are shown; the last lines name blocked and unreachable servers. An
    ADDRESS may also be a file of addresses, `file:PATH`. Without ADDRESS, REVERB_WRITER_ADDRESS is read.

    With --watch a missing answer is shown, and the server is asked again; the exit code is that of the last state.

    \b
    Exit codes:
      0    healthy
      1    a side of a table is blocked
      2    unreachable: a server does not answer
      3    not asked: wrong arguments, certificates or token
    """  # noqa: D301  # \b is click's mark for lines to keep
    code = HEALTHY
    with (
        report_errors(CANNOT_ASK),
        new_client(addresses[0] if len(addresses) == 1 else list(addresses), timeout, **security) as client,
        contextlib.nullcontext(_print_json) if as_json else _screen(why=why, watch=watch) as show,
        contextlib.suppress(KeyboardInterrupt),
    ):
        for states in _states(client, interval, endless=watch):
            code = max(_code(state) for state in states.values())
            show(states)
    raise SystemExit(code)


def _code(state: ServerState | NoAnswer) -> int:
    return UNREACHABLE if isinstance(state, NoAnswer) else BLOCKED if state.standstills else HEALTHY


def _states(client: Client, interval_s: float, *, endless: bool) -> Iterator[_States]:
    """Yield states after each interval: once, or until an interrupt if `endless`; at once if no server answers."""
    watches: dict[str, StandstillDetector] = {}
    before: dict[str, ServerInfo] = {}
    while True:
        states: _States = {}
        shards = client.shards  # read once, because the client's target may change
        answers, failed = on_each(shards, lambda shard: shard.channel.server_info(client.timeout_s))
        for shard in shards:
            if shard in failed:
                states[shard.address] = NoAnswer(str(failed[shard]))
                continue
            now = answers[shard]
            standstills = watches.setdefault(shard.address, StandstillDetector()).update(now)
            states[shard.address] = ServerState(before.get(shard.address, now), now, standstills)
        if before or not answers:
            yield states
            if not endless:
                return
        before = {shard.address: info for shard, info in answers.items()} or before
        time.sleep(interval_s)


def _print_json(states: _States) -> None:
    for address, state in states.items():
        if isinstance(state, NoAnswer):
            click.echo(json.dumps({"address": address, "health": "unreachable", "reason": state.reason}))
            continue
        tables = {}
        for name, table in state.now.tables.items():
            inserts, samples = state.rates(name)
            tables[name] = {**json_figures(table), "inserts_per_s": inserts, "samples_per_s": samples}
        health = {
            "address": address,
            "health": "blocked" if state.standstills else "healthy",
            "state_id": f"{state.now.state_id:032x}",
            "blocked": [asdict(standstill) for standstill in state.standstills],
            "tables": tables,
        }
        click.echo(json.dumps(health))


@contextlib.contextmanager
def _screen(*, why: bool, watch: bool) -> Iterator[Callable[[_States], None]]:
    console = Console()
    if watch and console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            yield lambda states: live.update(_report(states, why=why), refresh=True)
    else:
        yield lambda states: console.print(_report(states, why=why))


def _report(states: _States, *, why: bool) -> RenderableType:
    pages = [_page(address, state, why=why) for address, state in states.items()]
    return Group(*pages, *_summary(states))


def _summary(states: _States) -> Iterator[Text]:
    """Yield lines that name the blocked and the unreachable servers, if there are several."""
    if len(states) == 1:
        return
    yield Text()
    for address, state in states.items():
        if isinstance(state, NoAnswer):
            yield Text(f"shard {address} is unreachable", style="bold red")
        else:
            for one in state.standstills:
                yield Text(f"shard {address} blocks: table `{one.table}`, {one.side}", style="bold red")
    answers = [state for state in states.values() if isinstance(state, ServerState)]
    if not any(map(_code, states.values())):
        is_free = not any(_would_wait(state) for state in answers)
        yield Text(f"{'healthy: ' if is_free else ''}none of {len(states)} shards is blocked", style="green")


def _page(address: str, state: ServerState | NoAnswer, *, why: bool) -> RenderableType:
    if isinstance(state, NoAnswer):
        return Group(Text(address, style="bold"), Text(), Text(str(state), style="bold red"))
    lines: list[RenderableType] = [Text(address, style="bold")]
    for table in state.now.tables.values():
        lines += [Text(table.name), _figures(table, *state.rates(table.name))]
    lines.append(Text())
    lines += [Text(str(standstill), style="bold red") for standstill in state.standstills]
    if not state.standstills and (sides := _would_wait(state)):
        lines.append(Text(f"no inserts or samples are blocked now, but new ones would wait: {', '.join(sides)}"))
    elif not state.standstills:
        lines.append(Text("healthy: no inserts or samples are blocked", style="green"))
    if why:
        lines += [Text(f"table `{table.name}`: {_rooms(table)}") for table in state.now.tables.values()]
    return Group(*lines)


def _figures(table: TableInfo, inserts: float, samples: float) -> Table:
    """Return the figures of a table, one per line, so that they fit into any terminal."""
    shown = json_figures(table)
    grid = Table(box=None, pad_edge=False, show_header=False)
    grid.add_column(style="dim")
    grid.add_column(justify="right", no_wrap=True)
    grid.add_row("  size", f"{shown['size']:,} / {shown['max_size']:,}")
    grid.add_row("  fill", f"{shown['fill']:.0%}")
    grid.add_row("  inserts/s", f"{inserts:,.0f}")
    grid.add_row("  samples/s", f"{samples:,.0f}")
    grid.add_row("  ratio", _or_dash(shown["ratio_reached"], "{:.2f}"))
    grid.add_row("  wanted", _or_dash(shown["ratio_wanted"], "{:g}"))
    grid.add_row("  may insert", _or_dash(shown["insert_room"], "{:,.0f}", "any"))
    grid.add_row("  may sample", _or_dash(shown["sample_room"], "{:,.0f}", "any"))
    return grid


def _would_wait(state: ServerState) -> list[str]:
    """Return the sides of tables that a rate limiter blocks, also if no client waits."""
    found = []
    for table in state.now.tables.values():
        blocks = {"inserts": table.blocks_inserts(), "samples": table.blocks_samples()}
        found += [f"{side} of `{table.name}`" for side, is_blocked in blocks.items() if is_blocked]
    return found


def _rooms(table: TableInfo) -> str:
    """Describe how many inserts and samples the table allows."""
    inserts, samples = json_figures(table)["insert_room"], json_figures(table)["sample_room"]
    sentences = []
    for side, room, other in (("inserts", inserts, "sampled"), ("samples", samples, "inserted")):
        if room == 0:
            sentences.append(f"{side.capitalize()} would wait now. {' '.join(explain_side(table, side))}")  # type: ignore[arg-type]  # a Side
        elif room is None:
            sentences.append(f"{side.capitalize()} never wait.")
        else:
            sentences.append(f"{side.capitalize()} may continue for {room:,.0f} more before something must be {other}.")
    return " ".join(sentences)


def _or_dash(value: float | None, form: str, without: str = "-") -> str:
    return without if value is None else form.format(value)
