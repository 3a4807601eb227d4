"""What a dataset fetches, and how far ahead: checked once, and the same for each of its servers."""

from __future__ import annotations

from dataclasses import dataclass

from reverb_writer.arguments import integer
from reverb_writer.errors import SpecError

__all__ = ["FetchOptions"]


@dataclass(frozen=True)
class FetchOptions:
    """What to fetch, and how far ahead.

    Attributes:
        table: its name.
        batch_size: samples that become ready together.
        max_in_flight_batches: bound on what is on its way, being put together, or ready.
        skip_unsafe: whether to leave out and count samples that raise UnsafeDataError.
        reuses_buffers: whether the arrays of a batch are used again once the next one is asked for.
        max_cache_bytes: see `Assembly`.
        max_sample_bytes: likewise.
        single_pass: whether to end after as many samples as the table has items at the beginning.
        max_samples: end after so many; None for no end.
    """

    table: str
    batch_size: int
    max_in_flight_batches: int
    skip_unsafe: bool
    reuses_buffers: bool
    max_cache_bytes: int
    max_sample_bytes: int
    single_pass: bool
    max_samples: int | None

    def __post_init__(self) -> None:
        """Check what can never work.

        Raises:
            SpecError: names the argument.
        """
        if not isinstance(self.table, str):
            raise SpecError(
                f"`table` must be the name of one table, got {self.table!r}. For several make a dataset of each, or a "
                "ContiguousDataset."
            )
        for name in ("batch_size", "max_in_flight_batches", "max_cache_bytes", "max_sample_bytes", "max_samples"):
            value = getattr(self, name)
            if value is not None or name != "max_samples":
                object.__setattr__(self, name, integer(name, value, minimum=1))

    @property
    def has_end(self) -> bool:
        """Whether samples come to an end by themselves."""
        return self.single_pass or self.max_samples is not None
