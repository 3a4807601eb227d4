"""A known number of samples, in the caller's thread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy.typing as npt

from reverb_writer.errors import ReplayTimeoutError, ServerUnavailableError
from reverb_writer.wire.assembly import MAX_SAMPLE_BYTES, Assembly, SampleInfo, split_samples
from reverb_writer.wire.channel import Channel
from reverb_writer.wire.sample_stream import SampleStream

__all__ = ["draw"]

_REQUEST_SAMPLES = 64
_CACHE_BYTES = 16 << 20


def draw(
    channel: Channel, table: str, num_samples: int, timeout_s: float
) -> Iterator[tuple[list[npt.NDArray[Any]], SampleInfo]]:
    """Yield the columns and the info of `num_samples` samples, which together take `timeout_s` seconds at most.

    Raises:
        ReplayTimeoutError: not all came in time.
        ServerUnavailableError: the server is gone.
        StructureError: there is no such table.
        UnsafeDataError, FormatError: what came must not or cannot be decoded.
    """
    stream = SampleStream(channel, table, deadline_s=timeout_s)
    assembly = Assembly(_CACHE_BYTES, MAX_SAMPLE_BYTES)
    missing = unasked = num_samples
    try:
        while missing:
            # Two requests are under way, so that the server need not wait for us.
            while unasked and stream.num_in_flight <= _REQUEST_SAMPLES:
                size = min(unasked, _REQUEST_SAMPLES)
                stream.request(size)
                unasked -= size
            for sample in stream.read():
                assembly.add(sample)
            if assembly.num_samples:
                missing -= assembly.num_samples
                yield from split_samples(*assembly.take())
    except (ReplayTimeoutError, ServerUnavailableError) as error:
        raise type(error)(
            f"table `{table}`: {missing} of {num_samples} samples did not come within {timeout_s:.1f} s."
            if isinstance(error, ReplayTimeoutError)
            else f"table `{table}`: {missing} of {num_samples} samples did not come: {error}"
        ) from error
    finally:
        stream.cancel()
