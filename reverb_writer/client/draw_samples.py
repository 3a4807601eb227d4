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
"""Memory limit of decoded chunks kept for a table; one sample may exceed it."""

_LOG = logging.getLogger("reverb_writer")

_POLL_S = (0.002, 0.05)  # pause before the server is asked again for ready samples: the first one and the longest


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
        assembler: an empty one to use; chunks that it has cached are not decoded again.
        request_samples: how many to request at a time; two such requests are in flight.

    Raises:
        ReplayTimeoutError: not all came in time.
        ServerUnavailableError: there is no connection to the server.
        StructureError: there is no such table.
        UnsafeDataError, FormatError: a sample must not or cannot be decoded.
    """
    takes_out = info.tables[table].max_times_sampled > 0
    stream = SampleStream(
        channel, table, deadline_s=deadline.left_s(f"table `{table}`: {num_samples} samples did not come")
    )
    assembler = assembler or make_assembler()
    missing = unasked = num_samples
    try:
        while missing:
            # Two requests are in flight, so that the server need not wait for us.
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
    """Return an assembler for the samples of one table, for `draw`."""
    return BatchAssembler(CACHE_BYTES, MAX_SAMPLE_BYTES)


def _ready(channel: Channel, table: str, num_in_flight: int, deadline: Deadline) -> int:
    """Return how many more samples are ready; wait for one if none is in flight either."""
    pause_s, longest_s = _POLL_S
    while True:
        left_s = deadline.left_s()
        info = try_server_info(channel, left_s)
        num_ready = info.tables[table].num_ready() - num_in_flight if info and table in info.tables else 0
        if num_ready > 0 or num_in_flight:
            return max(num_ready, 0)
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, longest_s)
