"""The trajectories of a directory one by one: their order, loops, shards, and those that are skipped."""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reverb_writer.errors import FormatError, ReplayTimeoutError, UnsafeDataError

_LOG = logging.getLogger(__package__)


class TrajectoryPool:
    """Return trajectories one by one, each once per loop."""

    def __init__(
        self,
        find: Callable[[], Sequence[Path]],
        open_trajectory: Callable[[Path], Any],
        *,
        loops: int,
        shuffle: bool,
        keep_latest: int,
        rng: np.random.Generator,
        wait_timeout_s: float,
        poll_interval_s: float,
    ) -> None:
        """Make a pool; `reset` looks for trajectories.

        `find` returns their paths, oldest first; `open_trajectory` opens one, or raises FormatError. The other
        arguments are those of `RolloutDataset`.
        """
        self._find, self._open = find, open_trajectory
        self._loops, self._shuffle, self._keep_latest = loops, shuffle, keep_latest
        self._rng, self._wait_timeout_s, self._poll_interval_s = rng, wait_timeout_s, poll_interval_s
        self._shard = (0, 1)
        self._unused: collections.deque[Path] = collections.deque()
        self._num_opened = 0
        self.num_loops = 0  # loops that have ended
        self.skipped: dict[str, str] = {}  # the reason, by name, for each trajectory that could not be read

    def shard(self, index: int, num_shards: int) -> None:
        """Return only each `num_shards`-th trajectory, from number `index` on."""
        self._shard = (index, num_shards)

    def reset(self) -> None:
        """Start the first loop."""
        self.num_loops = 0
        self._start_loop()

    def take(self) -> Any:
        """Return the next trajectory, or None if all loops have ended.

        A damaged one is skipped and named in the log.
        """
        while True:
            while self._unused:
                path = self._unused.popleft()
                try:
                    found = self._open(path)
                except (FormatError, UnsafeDataError) as error:
                    if path.name not in self.skipped:
                        _LOG.warning("Skipped: %s", error)
                    self.skipped[path.name] = str(error)
                else:
                    self._num_opened += 1
                    return found
            if not self._num_opened:
                if self._shard != (0, 1):
                    return None  # a shard without trajectories
                raise FormatError(f"none of {len(self.skipped)} trajectories can be read: {self.skipped}")
            if 0 < self._loops <= self.num_loops + 1:
                self.num_loops = self._loops
                return None
            self.num_loops += 1
            self._start_loop()

    def _start_loop(self) -> None:
        paths = self._wait()
        index, num_shards = self._shard
        paths = paths[index::num_shards]  # before the shuffle, so that no two shards share a trajectory
        order = self._rng.permutation(len(paths)) if self._shuffle else np.arange(len(paths))
        self._unused = collections.deque(paths[number] for number in order)
        self._num_opened = 0

    def _wait(self) -> Sequence[Path]:
        wanted = max(self._keep_latest, 1)
        end = time.monotonic() + self._wait_timeout_s
        while True:
            paths = self._find()
            if len(paths) >= wanted:
                return paths[-self._keep_latest :]
            if time.monotonic() >= end:
                raise ReplayTimeoutError(
                    f"{len(paths)} complete trajectories after {self._wait_timeout_s:.1f} s, expected {wanted}. Start "
                    "the writer, raise `wait_timeout_s`, or check `data_dir`."
                )
            time.sleep(min(self._poll_interval_s, max(end - time.monotonic(), 0.0)))
