"""A known number of samples, in the caller's thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import numpy.typing as npt

from reverb_writer.errors import ReplayTimeoutError, ServerUnavailableError
from reverb_writer.wire.assembly import MAX_SAMPLE_BYTES, Assembly
from reverb_writer.wire.channel import Channel
from reverb_writer.wire.sample_stream import SampleStream
from reverb_writer.wire.samples import SampleInfo, split_samples
from reverb_writer.wire.server_info import ServerInfo, look_at_server

__all__ = ["CACHE_BYTES", "draw", "make_assembly"]

CACHE_BYTES = 64 << 20
"""Bound on what is kept decoded of a table; more only where one sample is larger."""

_LOG = logging.getLogger("reverb_writer")

_REQUEST_SAMPLES = 1024
_LOOK_S = (0.002, 0.05)  # how long to wait before looking again whether there is something, at first and at most


def draw(
    channel: Channel,
    info: ServerInfo,
    table: str,
    num_samples: int,
    timeout_s: float,
    assembly: Assembly | None = None,
    *,
    started: float | None = None,
) -> Iterator[tuple[list[npt.NDArray[Any]], SampleInfo]]:
    """Yield the columns and the info of `num_samples` samples, which together take `timeout_s` seconds at most.

    Args:
        channel: the connection.
        info: the server's tables now.
        table: one of them.
        num_samples: how many.
        timeout_s: for all of them.
        assembly: one that has nothing to hand out; what it knows of the table is not decoded again.
        started: the moment from which `timeout_s` counts, of `time.monotonic()`; None for now.

    Raises:
        ReplayTimeoutError: not all came in time.
        ServerUnavailableError: the server is gone.
        StructureError: there is no such table.
        UnsafeDataError, FormatError: what came must not or cannot be decoded.
    """
    now = time.monotonic()
    deadline = (now if started is None else started) + timeout_s
    takes_out = info.tables[table].max_times_sampled > 0
    stream = SampleStream(channel, table, deadline_s=max(deadline - now, 0.001))
    assembly = assembly or make_assembly()
    missing = unasked = num_samples
    try:
        while missing:
            # Two requests are under way, so that the server need not wait for us.
            while unasked and stream.num_in_flight <= _REQUEST_SAMPLES:
                size = min(unasked, _REQUEST_SAMPLES)
                if takes_out:
                    size = min(size, _ready(channel, table, stream.num_in_flight, deadline))
                if not size:
                    break
                stream.request(size)
                unasked -= size
            if errors := assembly.add(stream.read()):
                raise errors[0]
            if assembly.num_samples:
                for one in split_samples(*assembly.take()):
                    missing -= 1
                    yield one
    except (ReplayTimeoutError, ServerUnavailableError) as error:
        raise type(error)(
            f"table `{table}`: {missing} of {num_samples} samples did not come within {timeout_s:.1f} s."
            if isinstance(error, ReplayTimeoutError)
            else f"table `{table}`: {missing} of {num_samples} samples did not come: {error}"
        ) from error
    finally:
        stream.cancel()
        if takes_out and missing > unasked:
            _LOG.warning("Up to %d samples were taken out of `%s` and are lost.", missing - unasked, table)


def make_assembly() -> Assembly:
    """Return what puts the samples of one table together, for `draw`."""
    return Assembly(CACHE_BYTES, MAX_SAMPLE_BYTES)


def _ready(channel: Channel, table: str, num_in_flight: int, deadline: float) -> int:
    """Return how many samples more there are; wait for one, if none is under way either."""
    pause_s, longest_s = _LOOK_S
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise ReplayTimeoutError("The time is up.")
        info = look_at_server(channel, left_s)
        num_ready = info.tables[table].num_ready() - num_in_flight if info and table in info.tables else 0
        if num_ready > 0 or num_in_flight:
            return max(num_ready, 0)
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, longest_s)
