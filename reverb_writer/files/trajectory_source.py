"""The order of the trajectories that a data set reads: loops, shares of workers, shuffles, skipped files."""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reverb_writer import rows
from reverb_writer.errors import FormatError, ReplayTimeoutError, StructureError, UnsafeDataError
from reverb_writer.files.transition_fields import TransitionBatch, read_transitions
from reverb_writer.nests import map_present
from reverb_writer.protocol.signatures import ArraySpec
from reverb_writer.rows import LastRow

_LOG = logging.getLogger(__package__)
_POLL_S = 0.25  # interval of searches for trajectories


class TrajectorySource:
    """Gives the transitions of one trajectory after the other. Not thread-safe.

    Attributes:
        num_looped: number of completed loops.
        skipped: unreadable trajectories: the reason by name.
        num_left_out: number of actions so far whose next observation no row holds.
        layout: the fields of a transition, `ArraySpec` leaves; None before the first trajectory.
        rng: source of all random numbers.
    """

    def __init__(
        self,
        list_paths: Callable[[], Sequence[Path]],
        load_trajectory: Callable[[Path, LastRow | None], tuple[Any, Any]],
        names: Mapping[str, tuple[str, ...]],
        *,
        loops: int,
        shuffle: bool,
        keep_latest: int,
        seed: int | None,
        wait_timeout_s: float,
        last_row: LastRow | None,
        repeats_last: bool,
    ) -> None:
        """Set the arguments; `start` looks for the trajectories."""
        self._list_paths, self._load_trajectory, self._names = list_paths, load_trajectory, names
        self._loops, self._shuffle, self.keep_latest, self._seed = loops, shuffle, keep_latest, seed
        self._wait_timeout_s, self._last_row, self._repeats_last = wait_timeout_s, last_row, repeats_last
        self._shard = (0, 1)
        self.rng = np.random.default_rng()
        self._unused: collections.deque[Path] = collections.deque()  # trajectories of this loop, not taken yet
        self._num_opened = 0  # trajectories taken in this loop
        self.num_looped = self.num_left_out = 0
        self._has_warned = False
        self.skipped: dict[str, str] = {}
        self.layout: TransitionBatch | None = None

    def shard(self, index: int, num_shards: int) -> None:
        """Read only each `num_shards`-th trajectory, from number `index` on."""
        self._shard = (index, num_shards)

    def start(self) -> None:
        """Begin the first loop; with a seed, the order is the same each time.

        Raises:
            ReplayTimeoutError: too few trajectories exist after the time-out.
        """
        self.rng = np.random.default_rng(self._seed if self._seed is None else [self._seed, self._shard[0]])
        self.skipped = dict(self.skipped)  # a share has its own dict
        self.num_looped = self.num_left_out = 0
        self._start_loop()

    def take(self) -> TransitionBatch | None:
        """Return the transitions [T, ...] of the next undamaged trajectory; None at the end of the last loop."""
        while (found := self.take_of_loop()) is None:
            if not self.next_loop():
                return None
        return found

    def take_of_loop(self) -> TransitionBatch | None:
        """Return the transitions of the next undamaged trajectory of this loop; None at its end."""
        while self._unused:
            path = self._unused.popleft()
            try:
                found = self._read(path)
            except (FormatError, UnsafeDataError) as error:
                if path.name not in self.skipped:
                    _LOG.warning("Skipped: %s", error)
                self.skipped[path.name] = str(error)
            else:
                self._num_opened += 1
                return found
        return None

    def next_loop(self) -> bool:
        """Begin another loop, and return whether there is one."""
        if not self._num_opened:
            if self._shard != (0, 1):
                return False  # a shard without trajectories
            raise FormatError(f"none of {len(self.skipped)} trajectories can be read: {self.skipped}")
        if 0 < self._loops <= self.num_looped + 1:
            self.num_looped = self._loops
            return False
        self.num_looped += 1
        self._start_loop()
        return True

    def _start_loop(self) -> None:
        index, num_shards = self._shard
        paths = self._wait()[index::num_shards]  # before the shuffle: shards must not overlap
        order = self.rng.permutation(len(paths)) if self._shuffle else np.arange(len(paths))
        self._unused = collections.deque(paths[number] for number in order)
        self._num_opened = 0

    def _wait(self) -> Sequence[Path]:
        """Wait for enough trajectories, and return the paths to read."""
        wanted = max(self.keep_latest, 1)
        end = time.monotonic() + self._wait_timeout_s
        while True:
            paths = self._list_paths()
            if len(paths) >= wanted:
                return paths[-self.keep_latest :]
            if time.monotonic() >= end:
                raise ReplayTimeoutError(
                    f"{len(paths)} complete trajectories after {self._wait_timeout_s:.1f} s, expected {wanted}. Start "
                    "the writer, raise `wait_timeout_s`, or check `data_dir`."
                )
            time.sleep(min(_POLL_S, max(end - time.monotonic(), 0.0)))

    def _read(self, path: Path) -> TransitionBatch:
        """Return the transitions of a trajectory; raises if it is damaged."""
        steps, kinds = self._load_trajectory(path, self._last_row)
        found, left_out = read_transitions(steps, kinds, self._names, repeats_last=self._repeats_last)
        self.num_left_out += len(left_out)
        if len(left_out) and not self._has_warned and rows.has(left_out, rows.LAST).any():
            self._has_warned = True
            _LOG.warning(
                "Trajectory `%s`: the last action of an episode is no transition, because no row holds the observation "
                "after it. Further ones are counted in `num_left_out`. Write episodes with `final_observation`.",
                path.name,
            )
        layout = map_present(lambda leaf: ArraySpec(leaf.shape[1:], leaf.dtype), found)
        self.layout = self.layout or layout
        if layout != self.layout:
            raise StructureError(
                f"trajectory `{path.name}` has {layout}, but those before it have {self.layout}. "
                "Move it to another directory."
            )
        if not len(found.done):
            raise FormatError(f"trajectory `{path.name}`: it has no transition.")
        return found
