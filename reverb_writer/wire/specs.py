"""The specs that a server keeps of its tables, in a table of their own: read, store, forget.

    observer, first step -> step spec -> an item of table `__specs__`,      -> learners: the nest back
                                         its key a hash of the table's name -> other observers: refused if they differ

The server keeps an item whose key it knows already and takes the new priority alone, so of several actors that start
together the first one's spec stays, and all read the same. It stays until `Client.reset` empties the table that it is
of. A server without the table, such as a plain dm-reverb server, keeps none.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from reverb_writer.errors import StructureError
from reverb_writer.structure import SPECS_TABLE, check_same, decode_spec, encode_spec, spec_key, with_trajectories
from reverb_writer.wire.channel import Channel
from reverb_writer.wire.draw import draw
from reverb_writer.wire.insert_stream import InsertStream
from reverb_writer.wire.server_info import ServerInfo, request_server_info
from reverb_writer.wire.single_item import one_item

__all__ = ["keeps_spec", "spec_of", "store_spec"]

_LOG = logging.getLogger("reverb_writer")

_MAX_ROUNDS = 20
_DRAWS_A_SPEC = 4


def spec_of(channel: Channel, info: ServerInfo, table: str, timeout_s: float) -> Any:
    """Return the nest of `ArraySpec` of a table's items: its signature, or what is stored; None if there is neither."""
    if table in info.tables and info.tables[table].signature is not None:
        return with_trajectories(info.tables[table].signature)
    return _stored_spec(channel, info, table, timeout_s)


def keeps_spec(info: ServerInfo, table: str) -> bool:
    """Return whether a spec can be kept for the table: it has no signature, and the server has a table for specs."""
    return SPECS_TABLE in info.tables and table in info.tables and info.tables[table].signature is None


def store_spec(
    channel: Channel, open_stream: Callable[[], InsertStream], table: str, spec: Any, timeout_s: float
) -> None:
    """Keep the step spec of a table that has none; if another actor was first, its spec must be the same.

    Raises:
        StructureError: the table was first written with another structure; names the leaf.
    """
    try:
        encoded = encode_spec(spec)
    except StructureError as error:
        _warn_once(channel.address, table, str(error))
        return
    request = one_item([np.array([encoded], object)], [False], {SPECS_TABLE: 1.0}, spec_key(table))
    stream = open_stream()
    try:
        stream.write(request)
        stream.flush(timeout_s)
    finally:
        stream.abandon()
    stored = _stored_spec(channel, request_server_info(channel, timeout_s), table, timeout_s)
    if stored is not None:
        check_same(table, stored, spec)


@functools.lru_cache(maxsize=256)
def _warn_once(_address: str, table: str, reason: str) -> None:
    # Nothing was kept, so with each item that is inserted by itself it is tried again.
    _LOG.warning("Learners will get `%s` as flat tuples of columns: %s", table, reason)


def _stored_spec(channel: Channel, info: ServerInfo, table: str, timeout_s: float) -> Any:
    """Draw specs until the table's is found, or all were seen: a server chooses what it hands out."""
    num_specs = info.tables[SPECS_TABLE].current_size if SPECS_TABLE in info.tables else 0
    wanted = spec_key(table)
    seen: set[int] = set()
    for _ in range(_MAX_ROUNDS):
        if len(seen) >= num_specs:
            break
        for columns, sample in draw(channel, info, SPECS_TABLE, _DRAWS_A_SPEC * num_specs, timeout_s):
            if sample.key == wanted:
                spec = columns[0].flat[0] if columns[0].size else None
                return decode_spec(spec) if isinstance(spec, bytes) else None
            seen.add(sample.key)
    return None
