"""A known number of samples, in the caller's thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import numpy.typing as npt

from reverb_writer.deadline import Deadline
from reverb_writer.decoding.batch_assembler import MAX_SAMPLE_BYTES, BatchAssembler
from reverb_writer.decoding.samples import SampleInfo, split_samples
from reverb_writer.errors import ReplayTimeoutError, ServerUnavailableError
from reverb_writer.table_info import ServerInfo
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.sample_stream import SampleStream
from reverb_writer.transport.server_info import try_server_info

__all__ = ["CACHE_BYTES", "draw", "make_assembler"]

CACHE_BYTES = 64 << 20
"""Bound on what is kept decoded of a table; more only where one sample is larger."""

_LOG = logging.getLogger("reverb_writer")

_LOOK_S = (0.002, 0.05)  # how long to wait before looking again whether there is something, at first and at most


def draw(
    channel: Channel,
    info: ServerInfo,
    table: str,
    num_samples: int,
    deadline: Deadline,
    assembler: BatchAssembler | None = None,
    *,
    request_samples: int = 1024,
) -> Iterator[tuple[list[npt.NDArray[Any]], SampleInfo]]:
    """Yield the columns and the info of `num_samples` samples.

    Args:
        channel: the connection.
        info: the server's tables now.
        table: one of them.
        num_samples: how many.
        deadline: of all of them.
        assembler: one that has nothing to hand out; what it knows of the table is not decoded again.
        request_samples: how many to ask for at a time, two such requests being under way.

    Raises:
        ReplayTimeoutError: not all came in time.
        ServerUnavailableError: the server is gone.
        StructureError: there is no such table.
        UnsafeDataError, FormatError: what came must not or cannot be decoded.
    """
    takes_out = info.tables[table].max_times_sampled > 0
    stream = SampleStream(
        channel, table, deadline_s=deadline.left_s(f"table `{table}`: {num_samples} samples did not come")
    )
    assembler = assembler or make_assembler()
    missing = unasked = num_samples
    try:
        while missing:
            # Two requests are under way, so that the server need not wait for us.
            while unasked and stream.num_in_flight <= request_samples:
                ready = _ready(channel, table, stream.num_in_flight, deadline) if takes_out else unasked
                if not ready:
                    break
                size = min(unasked, request_samples, ready)
                stream.request(size)
                unasked -= size
            if errors := assembler.add(stream.read()):
                raise errors[0]
            if assembler.num_samples:
                for one in split_samples(*assembler.take()):
                    missing -= 1
                    yield one
    except (ReplayTimeoutError, ServerUnavailableError) as error:
        text = f"table `{table}`: {missing} of {num_samples} samples did not come"
        if isinstance(error, ReplayTimeoutError):
            raise ReplayTimeoutError(f"{text} within {deadline.timeout_s:.1f} s.") from None
        raise ServerUnavailableError(f"{text}: {error}") from None
    finally:
        stream.cancel()
        if takes_out and missing > unasked:
            _LOG.warning("Up to %d samples were taken out of `%s` and are lost.", missing - unasked, table)


def make_assembler() -> BatchAssembler:
    """Return what puts the samples of one table together, for `draw`."""
    return BatchAssembler(CACHE_BYTES, MAX_SAMPLE_BYTES)


def _ready(channel: Channel, table: str, num_in_flight: int, deadline: Deadline) -> int:
    """Return how many samples more there are; wait for one, if none is under way either."""
    pause_s, longest_s = _LOOK_S
    while True:
        left_s = deadline.left_s()
        info = try_server_info(channel, left_s)
        num_ready = info.tables[table].num_ready() - num_in_flight if info and table in info.tables else 0
        if num_ready > 0 or num_in_flight:
            return max(num_ready, 0)
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, longest_s)
