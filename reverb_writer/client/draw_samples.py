"""Fetch a known number of samples in the caller's thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import numpy.typing as npt

from reverb_writer.background import in_background
from reverb_writer.deadline import Deadline
from reverb_writer.decoding.batch_assembler import MAX_SAMPLE_BYTES, BatchAssembler
from reverb_writer.decoding.samples import SampleInfo, split_samples
from reverb_writer.errors import ReplayTimeoutError, ReverbWriterError, ServerUnavailableError
from reverb_writer.tables.table_info import ServerInfo
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.sample_fetcher import SampleFetcher

CACHE_BYTES = 64 << 20
"""Memory limit of a table's decoded chunks; one larger sample may exceed it."""

_LOG = logging.getLogger(__package__)
_STOP_S = 30.0  # for a read that was stopped to end: milliseconds, unless the machine has no time for this process


def draw(
    channel: Channel,
    info: ServerInfo,
    table: str,
    num_samples: int,
    deadline: Deadline,
    assembler: BatchAssembler | None = None,
    *,
    request_samples: int = 1024,
) -> Iterator[tuple[list[npt.NDArray[Any]], SampleInfo, bytes]]:
    """Yield the columns, the info and the encoded spec of `num_samples` samples; the spec is empty if there is none.

    They are decoded by `assembler`, which has none yet; chunks in its cache are not decoded again. `deadline` is that
    of all together, and bounds each wait: a caller that extends it by the time between two samples has only the waits
    counted. So the stream has no deadline of its own. Twice `request_samples` may be in flight.
    """
    fetcher = SampleFetcher(
        channel,
        table,
        removes_items=info.tables[table].max_times_sampled > 0,
        max_samples=2 * request_samples,  # the server is never without a request while half of the samples are used
        num_held=lambda: 0,
        limit=num_samples,
        pause=lambda pause_s: time.sleep(min(pause_s or 0.0, deadline.left_s())),
    )
    assembler = assembler or make_assembler()
    num_read = num_used = num_accepted = 0
    try:
        while num_used < num_samples:
            samples = _read(fetcher, deadline)
            num_read += len(samples)
            if num_read - num_accepted >= request_samples:
                fetcher.accept(num_read - num_accepted)
                num_accepted = num_read
            while samples:
                if errors := assembler.add(samples):
                    raise errors[0]
                samples = assembler.held_back
                if assembler.num_samples:
                    spec = assembler.spec
                    for columns, sample_info in split_samples(*assembler.take()):
                        num_used += 1
                        yield columns, sample_info, spec
    except (ReplayTimeoutError, ServerUnavailableError) as error:
        text = f"table `{table}`: {num_samples - num_used} of {num_samples} samples did not come"
        if isinstance(error, ReplayTimeoutError):
            raise ReplayTimeoutError(f"{text} within {deadline.timeout_s:.1f} s.") from None
        raise ServerUnavailableError(f"{text}: {error}") from None
    finally:
        fetcher.stop()  # after an interrupt another thread may still wait for samples
        num_lost = fetcher.end() + num_read - num_used
        if fetcher.removes_items and num_lost:
            _LOG.warning("Up to %d samples were taken out of `%s` and are lost.", num_lost, table)


def _read(fetcher: SampleFetcher, deadline: Deadline) -> list[Any]:
    """Return the samples of the next message.

    Raises:
        ReplayTimeoutError: none came until the deadline.
    """
    reading = in_background(lambda: fetcher.read() if fetcher.ask() else [])
    if not reading.wait(deadline.left_s()):
        fetcher.stop()
        if not reading.wait(_STOP_S):
            deadline.left_s()  # raises
    try:
        return reading.result()
    except ReverbWriterError:
        deadline.left_s()  # raises if the time is up, because the reader was stopped then
        raise


def make_assembler() -> BatchAssembler:
    """Return an assembler of the samples of one table, for `draw`."""
    return BatchAssembler(CACHE_BYTES, MAX_SAMPLE_BYTES)
