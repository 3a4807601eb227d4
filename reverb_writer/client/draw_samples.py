"""Fetch a known number of samples in the caller's thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import numpy.typing as npt

from reverb_writer.background import Flag
from reverb_writer.deadline import Deadline
from reverb_writer.decoding.batch_assembler import MAX_SAMPLE_BYTES, BatchAssembler
from reverb_writer.decoding.samples import SampleInfo, split_samples
from reverb_writer.errors import ReplayTimeoutError, ServerUnavailableError
from reverb_writer.tables.table_info import ServerInfo
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.sample_stream import Limit, SampleStream

CACHE_BYTES = 64 << 20
"""Memory limit of a table's decoded chunks; one larger sample may exceed it."""

_LOG = logging.getLogger(__package__)


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
    counted. Twice `request_samples` may be in flight.
    """
    changed = Flag()
    stream = SampleStream(
        channel,
        table,
        info,
        changed=changed.set,
        removes_items=info.tables[table].max_times_sampled > 0,
        limits=[Limit(num_samples)],
        answer_within=deadline.left_s,
    )
    assembler = assembler or make_assembler()
    num_read = num_used = 0
    try:
        while num_used < num_samples:
            samples = _read(stream, num_read - num_used, 2 * request_samples, deadline, changed)
            num_read += len(samples)
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
        stream.close()
        num_lost = stream.num_lost + num_read - num_used
        if info.tables[table].max_times_sampled > 0 and num_lost:
            _LOG.warning("Up to %d samples were taken out of `%s` and are lost.", num_lost, table)


def _read(stream: SampleStream, num_held: int, max_samples: int, deadline: Deadline, changed: Flag) -> list[Any]:
    """Return the samples of the next message.

    Raises:
        ReplayTimeoutError: none came until the deadline.
        ReverbWriterError: the connection is lost, or a message cannot be read.
    """
    while True:
        changed.clear()
        next_at = stream.proceed(time.monotonic(), num_held, max_samples)
        samples = stream.read()
        if stream.loss is not None:
            raise stream.loss.error
        if samples:
            return samples
        if not stream.has_unread:
            changed.wait(min(next_at - time.monotonic(), deadline.left_s()))


def make_assembler() -> BatchAssembler:
    """Return an assembler of the samples of one table, for `draw`."""
    return BatchAssembler(CACHE_BYTES, MAX_SAMPLE_BYTES)
