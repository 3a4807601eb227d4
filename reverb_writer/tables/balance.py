"""The rule of every rate limiter, which keeps one balance, `diff = inserts * samples_per_insert - samples`.

    a sample waits   while the table holds fewer than min_size items, or while diff would fall below min_diff
    an insert waits  while diff would rise above max_diff, unless the table holds fewer than min_size items

Source: Reverb 0.14, `rate_limiter.cc` (CanInsert, CanSample).
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Balance(NamedTuple):
    """The four numbers that define a rate limiter; the module states the rule.

    Attributes:
        samples_per_insert: Number that one insert adds to `diff`; a sample subtracts 1.
        min_size: Number of items that the table needs before sampling starts.
        min_diff: The lowest `diff` after a sample.
        max_diff: The highest `diff` after an insert.
    """

    samples_per_insert: float
    min_size: int
    min_diff: float
    max_diff: float

    def blocks_inserts(self, size: int, num_inserts: int, num_samples: int) -> bool:
        """Return whether a table of `size` items admits no further one after `num_inserts` and `num_samples`."""
        return size + 1 > self.min_size and not self._admits(num_inserts + 1, num_samples)

    def blocks_samples(self, size: int, num_inserts: int, num_samples: int) -> bool:
        """Return whether a table of `size` items gives no sample after `num_inserts` and `num_samples`."""
        return size < self.min_size or not self._gives(num_inserts, num_samples + 1)

    def num_inserts_allowed(self, size: int, num_inserts: int, num_samples: int) -> float:
        """Return how many inserts `size` items allow after `num_inserts` and `num_samples`: whole, or infinity."""
        room = (self.max_diff + num_samples) / self.samples_per_insert - num_inserts
        if math.isinf(room):
            return room
        count = round(room)  # at most one too many
        return max(self.min_size - size, count if self._admits(num_inserts + count, num_samples) else count - 1, 0)

    def num_samples_allowed(self, size: int, num_inserts: int, num_samples: int) -> float:
        """Return how many samples `size` items allow after `num_inserts` and `num_samples`: whole, or infinity."""
        if size < self.min_size:
            return 0
        room = num_inserts * self.samples_per_insert - num_samples - self.min_diff
        if math.isinf(room):
            return room
        count = round(room)  # at most one too many
        return max(count if self._gives(num_inserts, num_samples + count) else count - 1, 0)

    def num_samples_needed(self, num_inserts: int, num_samples: int) -> int:
        """Return how many samples the next insert needs after `num_inserts` and `num_samples`: >= 1, for any size."""
        count = round((num_inserts + 1) * self.samples_per_insert - num_samples - self.max_diff)  # at most one too few
        return max(count if self._admits(num_inserts + 1, num_samples + count) else count + 1, 1)

    def num_inserts_needed(self, num_inserts: int, num_samples: int) -> int:
        """Return how many inserts the next sample needs after `num_inserts` and `num_samples`: >= 1, for any size."""
        count = round((self.min_diff + num_samples + 1) / self.samples_per_insert - num_inserts)  # at most one too few
        return max(count if self._gives(num_inserts + count, num_samples + 1) else count + 1, 1)

    # Both compute the terms of Reverb: other terms may be rounded to the other side of a bound.

    def _admits(self, num_inserts: int, num_samples: int) -> bool:
        """Return whether the last one of `num_inserts` inserts is possible."""
        return num_inserts * self.samples_per_insert - num_samples <= self.max_diff

    def _gives(self, num_inserts: int, num_samples: int) -> bool:
        """Return whether the last one of `num_samples` samples is possible."""
        return num_inserts * self.samples_per_insert - (num_samples - 1) - 1 >= self.min_diff
