"""Find a table on its servers, and choose the rule by which they are mixed."""

from __future__ import annotations

import logging

from reverb_writer.client.client import Client
from reverb_writer.client.server_set import answering, logged, on_all
from reverb_writer.client.weights import EXACT
from reverb_writer.errors import ReplayTimeoutError, ServerUnavailableError, SpecError
from reverb_writer.reading.by_mass import ByMass
from reverb_writer.reading.mixer import InTurns, Mixer
from reverb_writer.reading.read_options import ReadOptions
from reverb_writer.tables.table_info import ServerInfo, TableInfo, check_tables_exist

_LOG = logging.getLogger(__package__)

_ORDERED = ("fifo", "max_heap", "min_heap")


def open_table(
    client: Client, table: str, options: ReadOptions, timeout_s: float
) -> tuple[dict[str, ServerInfo], TableInfo, type[Mixer]]:
    """Return the tables of the servers, by name of the shard, the table as the first one tells it, and its mixer.

    Raises:
        SpecError: `single_pass` cannot work with the table.
        StructureError: a server has no such table; names those it has.
        ServerUnavailableError, ReplayTimeoutError: no server answers in time, or not all that are needed.
    """
    infos = _request_infos(client, table, timeout_s, needs_all=options.has_end)
    tables = [info.tables[table] for info in infos.values()]
    if options.single_pass:
        for one in tables:
            _check_single_pass(one)
    is_exact = client.connections.may_have_several and not options.has_end and {one.sampler for one in tables} <= EXACT
    return infos, tables[0], ByMass if is_exact else InTurns


def _request_infos(client: Client, table: str, timeout_s: float, *, needs_all: bool) -> dict[str, ServerInfo]:
    """Ask all servers at once for their tables, by name of the shard; log every ten seconds who is awaited.

    Servers that their target says are lost are not asked. One that does not answer is an error if `needs_all`. If not,
    it is left out if it does not answer within two seconds, while another does; it is read when it does.
    """
    present = client.connections.in_state("up", "draining")
    addresses = ", ".join(shard.address for shard in present)
    with logged(lambda: f"table `{table}`: waiting for the server at {addresses}"):
        try:
            if needs_all:
                infos = dict(zip(present, on_all(present, lambda shard: shard.request_info(timeout_s)), strict=True))
            else:
                infos = answering(present, timeout_s)
        except (ReplayTimeoutError, ServerUnavailableError) as error:
            raise error from None  # without gRPC's error: the message names the cause
    for shard in present:
        if shard in infos:
            check_tables_exist([table], infos[shard], shard.address)
        else:
            _LOG.warning("Table `%s` is read without the server at %s, which does not answer.", table, shard.address)
    return {shard.name: info for shard, info in infos.items()}


def _check_single_pass(table: TableInfo) -> None:
    """Check that `single_pass` can work with a table."""
    for role, selector in (("sampler", table.sampler), ("remover", table.remover)):
        if selector not in _ORDERED:
            raise SpecError(
                f"`single_pass` needs a table whose order is known: the {role} of `{table.name}` is {selector!r}, "
                f"expected one of {', '.join(map(repr, _ORDERED))}."
            )
    if table.max_times_sampled != 1:
        raise SpecError(
            f"`single_pass` needs items that are sampled once: `max_times_sampled` of `{table.name}` is "
            f"{table.max_times_sampled}, expected 1, else its first item would come again and again."
        )
