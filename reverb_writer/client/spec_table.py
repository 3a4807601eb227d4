"""The specs that a server keeps of its tables, in a table of their own: read, store, forget.

    observer, first step -> step spec -> an item of table `__specs__`,      -> learners: the nest back
                                         its key a hash of the table's name -> other observers: must be the same

Calls before the first step: `ServerInfo` when the observer is opened and again at the step, for the table may have been
reset since, and one stream that reads what is stored. The first actor stores before it reads, by one stream more, for
only a sample tells whose spec the server has kept.

The priority of an item is the largest that a learner has set in the table; see `largest_priorities`.

The server keeps an item whose key it knows already and takes the new priority alone, so of several actors that start
together the first one's spec stays, and all read the same. It stays until `Client.reset` empties the table that it is
of. A server without the table, such as a plain dm-reverb server, keeps none. One that was restarted without its newest
checkpoint gets the spec again from each observer that finds it, before any item.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from reverb_writer.client import largest_priorities
from reverb_writer.client.draw_samples import draw
from reverb_writer.client.single_item import one_item
from reverb_writer.deadline import Deadline
from reverb_writer.errors import PermissionDeniedError, ReverbWriterError, StructureError
from reverb_writer.protocol.table_specs import (
    SPECS_TABLE,
    check_same,
    decode_spec,
    encode_spec,
    spec_key,
    with_trajectories,
)
from reverb_writer.table_info import ServerInfo
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.insert_call import insert_items
from reverb_writer.transport.server_info import request_server_info

_LOG = logging.getLogger(__package__)

_MAX_ROUNDS = 200
_ASK_TIMEOUT_S = 2.0
_DRAWS_A_SPEC = 4


def spec_of(info: ServerInfo, table: str) -> Any:
    """Return the nest of `ArraySpec` of a table's items by its signature; None if it has none."""
    return with_trajectories(info.tables[table].signature) if table in info.tables else None


def keeps_spec(info: ServerInfo, table: str) -> bool:
    """Return whether a spec can be kept for the table: it has no signature, and the server has a table for specs."""
    return SPECS_TABLE in info.tables and table in info.tables and info.tables[table].signature is None


def store_specs(channel: Channel, info: ServerInfo, tables: Sequence[str], spec: Any, deadline: Deadline) -> None:
    """Store the step spec of tables that have none; if another actor was first, its spec must be the same."""
    try:
        encoded = encode_spec(spec)
    except StructureError as error:
        for table in tables:
            _warn_once(channel.address, table, str(error))
        return
    data = [np.array([encoded], object)]
    insert_items(channel, [one_item(data, [False], {SPECS_TABLE: 1.0}, spec_key(table)) for table in tables], deadline)
    for table, stored in stored_specs(channel, info, tables, deadline, are_there=True).items():
        check_same(table, stored, spec)


@functools.lru_cache(maxsize=256)
def _warn_once(_address: str, table: str, reason: str) -> None:
    # Nothing was stored, so every `Client.insert` tries again.
    _LOG.warning("Learners will get `%s` as flat tuples of columns: %s", table, reason)


def stored_specs(
    channel: Channel, info: ServerInfo, tables: Iterable[str], deadline: Deadline, *, are_there: bool = False
) -> dict[str, Any]:
    """Sample specs until those of the tables are found or all were seen: the server chooses which one it sends.

    `are_there`: specs of these tables were stored after `info`; others may have been stored then, too.

    Returns:
        The stored specs that can be read, by table.
    """
    wanted = {spec_key(table): table for table in tables}
    num_specs = info.tables[SPECS_TABLE].current_size if SPECS_TABLE in info.tables else 0
    if are_there:
        num_specs += len(wanted)
    found: dict[str, Any] = {}
    seen: set[int] = set()
    if not wanted or not num_specs:
        return found
    size = _DRAWS_A_SPEC * num_specs
    samples = draw(channel, info, SPECS_TABLE, _MAX_ROUNDS * size, deadline, request_samples=size)
    try:
        for columns, sample in samples:
            seen.add(sample.key)
            if sample.key in wanted:
                largest_priorities.note_stored(channel.address, wanted[sample.key], sample.priority)
                encoded = columns[0].flat[0] if columns[0].size else None
                spec = decode_spec(encoded) if isinstance(encoded, bytes) else None
                table = wanted.pop(sample.key)
                if spec is not None:
                    found[table] = spec
            if not wanted or (len(seen) >= num_specs and not are_there):
                break
    except PermissionDeniedError:  # an actor that may insert and not sample; its gateway has an audit log
        _LOG.debug("%s: specs cannot be read, so steps are not compared with those of other actors", channel.address)
    return found


def largest_priority(channel: Channel, tables: Sequence[str]) -> float:
    """Return the largest priority seen so far of any of some tables; see `largest_priorities`. Never waits."""

    def ask(due: Sequence[str]) -> None:
        deadline = Deadline(_ASK_TIMEOUT_S)
        with contextlib.suppress(ReverbWriterError):  # the next one asks again
            info = request_server_info(channel, deadline.left_s())
            stored_specs(channel, info, [table for table in due if keeps_spec(info, table)], deadline)

    return largest_priorities.current(channel.address, tables, ask)
