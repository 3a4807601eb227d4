"""Options of reading, which are the same for every kind of dataset and for each of its servers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict

from reverb_writer.arguments import check_timeout, integer
from reverb_writer.decoding.batch_assembler import MAX_SAMPLE_BYTES
from reverb_writer.errors import SpecError


class ReadKeywords(TypedDict, total=False):
    """The fields of `ReadOptions` as keyword arguments of a dataset."""

    max_in_flight_batches: int
    timeout_s: float | None
    single_pass: bool
    skip_unsafe: bool
    max_cache_bytes: int
    max_sample_bytes: int
    transform: Callable[[Any], Any] | None


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Options of a dataset; its constructor takes each as a keyword.

    Attributes:
        max_in_flight_batches: limit of batches fetched ahead, >= 1. They are older than a new sample, and the rate
            limiter counts them as sampled. With several servers, samples of twice as many batches may wait for a draw,
            or samples of as many batches per server may wait for their turn.
        timeout_s: time-out of a batch, in seconds; progress starts it again in `next`. None for the client's time-out,
            which is also the constructor's.
        single_pass: each iteration returns the items that are in the table at its beginning, once and in order, then
            stops. The table's sampler and remover must be "fifo" or a heap, and its `max_times_sampled` 1.
        skip_unsafe: skip and count samples and messages that raise UnsafeDataError or FormatError, instead of raising.
        max_cache_bytes: memory limit of the cache of decoded chunks, in bytes, for each of at most four layouts of
            columns: four times as much if writers differ in the columns of their chunks. A quarter more is used for
            row ranges of items.
        max_sample_bytes: limit of the decoded size of one sample, in bytes.
        transform: function from a `Batch` to the `Batch` that the learner gets: decode images, stack frames, normalise.
            The thread that fetches calls it, so it runs while the learner trains. If it raises, `next` raises the error
            in place of that batch.

    Raises:
        SpecError: an option can never work; the error names it.
    """

    max_in_flight_batches: int = 2
    timeout_s: float | None = None
    single_pass: bool = False
    skip_unsafe: bool = False
    max_cache_bytes: int = 256 << 20
    max_sample_bytes: int = MAX_SAMPLE_BYTES
    transform: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        if self.timeout_s is not None:
            object.__setattr__(self, "timeout_s", check_timeout(self.timeout_s))
        if self.transform is not None and not callable(self.transform):
            raise SpecError(f"`transform` must be a function of a batch, got {type(self.transform).__name__}.")
        for name in ("max_in_flight_batches", "max_cache_bytes", "max_sample_bytes"):
            object.__setattr__(self, name, integer(name, getattr(self, name), minimum=1))
