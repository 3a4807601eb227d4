"""A word on a table that gives its first item for ever."""

from __future__ import annotations

import logging

from reverb_writer.protocol.responses import Samples
from reverb_writer.tables.table_info import TableInfo

_LOG = logging.getLogger(__package__)

_NUM_SAMPLES = 1000


class FirstItem:
    """Logs once if the first thousand samples of a FIFO table that keeps its items are one item among others."""

    def __init__(self, table: TableInfo, address: str) -> None:
        """Begin before the first sample of a server."""
        self._name, self._address = table.name, address
        self._can_tell = table.sampler == "fifo" and table.max_times_sampled <= 0
        self._key: int | None = None
        self._num_samples = 0

    def see(self, samples: Samples) -> None:
        """Note the next samples."""
        if not self._can_tell or not samples:
            return
        if self._key is None:
            self._key = int(samples.keys[0])
        self._num_samples += len(samples)
        is_one = bool((samples.keys == self._key).all())
        self._can_tell = is_one and self._num_samples < _NUM_SAMPLES
        if is_one and not self._can_tell and samples.table_sizes[-1] > 1:
            _LOG.warning(
                "table `%s` at %s: the first %d samples are all one item of %d, because a table with the sampler "
                "'fifo' gives its oldest item until the item is removed. A queue needs `max_times_sampled=1`, as in "
                "`rw.TableConfig.queue`; a replay needs another sampler.",
                self._name,
                self._address,
                self._num_samples,
                samples.table_sizes[-1],
            )
