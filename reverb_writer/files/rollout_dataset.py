"""Read trajectories on disk as if many environments stepped through them.

    trajectories --take--> cursor of an environment --rows--> batch [N, ...] or [T, N, ...]
          ^                        | end of the trajectory
          +------------------------+

A cursor holds its trajectory in memory. A loop ends when all trajectories were taken.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tree

from reverb_writer.arguments import check_wait, integer
from reverb_writer.errors import FormatError, ReplayTimeoutError, SpecError, StructureError, UnsafeDataError
from reverb_writer.files.trajectory_file import StoredTrajectory, list_trajectories
from reverb_writer.files.transition_fields import Cursor, TransitionBatch, names_of_fields, read_transitions
from reverb_writer.leaves import zeros
from reverb_writer.nests import map_present
from reverb_writer.protocol.signatures import ArraySpec

_LOG = logging.getLogger(__package__)
_POLL_S = 0.25  # interval of searches for trajectories


class RolloutFileBase:
    """Transitions from files as if `num_envs` environments stepped through the trajectories.

    A subclass implements `reset_all`, `refresh_handlers`, `get_buffer` and `fill_transition`. Not thread-safe.

    Attributes:
        data_dir: folder of the files; the subclass documents its form.
        num_envs: N, number of environments that step together, >= 1.
        device: device of PyTorch tensors, such as "cpu"; None for NumPy arrays.
        all_env_ids: [N], 0..N-1.
    """

    def __init__(self, data_dir: Any, num_envs: int, device: Any = None) -> None:
        """Set the arguments; files are read at the first use."""
        self.data_dir = data_dir
        self.num_envs = integer("num_envs", num_envs, minimum=1)
        self.device = device
        self.all_env_ids = np.arange(self.num_envs)
        self._is_initialized = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.data_dir}: {self.num_envs} environments>"

    def reset(self, env_ids: Any = None) -> None:
        """Start again from the first trajectories, or give some environments their next trajectory.

        Args:
            env_ids: numbers of the environments that get their next trajectory; None to start again.

        Raises:
            SpecError: an environment's number is out of range.
        """
        if env_ids is None or not self._is_initialized:
            self._is_initialized = True
            self.reset_all()
        else:
            last = self.num_envs - 1
            chosen = [integer("env_ids", env, minimum=0, maximum=last) for env in env_ids]
            self.refresh_handlers([*dict.fromkeys(chosen)])

    def get_batch(self, num_transitions_per_env: int | None = None) -> Any:
        """Return the next transitions of each environment, in a new buffer of `get_buffer`.

        Args:
            num_transitions_per_env: T, >= 1, for leaves [T, N, ...]; None for one transition, leaves [N, ...].

        Raises:
            StopIteration: all trajectories were delivered.
        """
        if num_transitions_per_env is not None:
            integer("num_transitions_per_env", num_transitions_per_env, minimum=1)
        if not self._is_initialized:
            self.reset()
        buffer = self.get_buffer(num_transitions_per_env)
        self.fill_transition(buffer)
        if self.device is None:
            return buffer
        from reverb_writer.reading.views.torch import TensorConverter  # noqa: PLC0415  # brings PyTorch

        return TensorConverter(self.device)(buffer)

    def as_torch(self, device: Any = None) -> Any:
        """Return a `torch.utils.data.IterableDataset` of the batches, for a `DataLoader` with any number of workers.

        Pass `batch_size=None` to the loader: the data set makes the batches. Each worker reads its own share of the
        trajectories; together the workers deliver each trajectory as often as a single reader does.

        Args:
            device: device of the tensors; None for the CPU. Workers of a data loader should use the CPU.
        """
        from reverb_writer.reading.views.torch import TensorConverter, TorchDataset  # noqa: PLC0415  # brings PyTorch

        return TorchDataset(self._open_share, TensorConverter(self.device if device is None else device))

    def _open_share(self, index: int, num_shards: int) -> contextlib.AbstractContextManager[Any]:
        """Return a copy that reads one share of the trajectories, as arrays."""
        share = copy.copy(self)
        share.device = None
        if num_shards > 1:
            share.shard(index, num_shards)
        return contextlib.nullcontext(share)

    def shard(self, index: int, num_shards: int) -> None:
        """Read only each `num_shards`-th trajectory, from number `index` on; all environments start again."""
        raise NotImplementedError

    def reset_all(self) -> None:
        """Look for files, and give each environment its first trajectory."""
        raise NotImplementedError

    def refresh_handlers(self, env_ids: Sequence[int]) -> None:
        """Give the environments `env_ids` their next trajectory, even if the current one has not ended."""
        raise NotImplementedError

    def get_buffer(self, num_transitions_per_env: int | None = None) -> Any:
        """Make a batch of zeros: leaves [N, ...], or [T, N, ...], where T is `num_transitions_per_env`."""
        raise NotImplementedError

    def fill_transition(self, buffer: Any, env_ids: Sequence[int] | None = None) -> Any:
        """Copy the next transitions of the environments `env_ids`, or of all, into `buffer`, and return it.

        Raises:
            StopIteration: all trajectories were delivered.
        """
        raise NotImplementedError

    def __iter__(self) -> Any:
        """Start again from the beginning."""
        self.reset()
        return self

    def __next__(self) -> Any:
        """Return the next batch: one transition per environment."""
        return self.get_batch()


class RolloutDataset(RolloutFileBase):
    """Deliver the transitions of a directory's trajectories, for `num_envs` environments at a time.

    Each environment steps through a trajectory, and then takes the next one that no other environment has taken.
    New trajectories are found when a loop begins. Memory holds one trajectory per environment, and the batch.

    Example:
        dataset = RolloutDataset("demos", num_envs=64, dataset_loops=10, shuffle=True, seed=0)
        for batch in dataset:
            ...  # batch.observation [64, ...], batch.done, batch.truncated, batch.next_observation, ...

    Source: the description of instinct_rl's `RolloutDataset`; docs/how-to/from-instinct-rl.md lists the differences.

    Attributes:
        num_dataset_looped: number of completed loops.
        skipped: unreadable trajectories: the reason by name.
    """

    def __init__(
        self,
        data_dir: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        num_envs: int,
        dataset_loops: int = 1,
        shuffle: bool = False,
        keep_latest: int = 0,
        start_range: Sequence[int] = (0, 1),
        device: Any = None,
        *,
        seed: int | None = None,
        fields: Mapping[str, str] | None = None,
        wait_timeout_s: float = 30.0,
    ) -> None:
        """Set the arguments; the first batch looks for the trajectories.

        Args:
            data_dir: directory of trajectories, or several directories, whose trajectories are read in one order.
            num_envs: N, number of environments that step together, >= 1.
            dataset_loops: number of deliveries of each trajectory; < 1 for ever.
            shuffle: whether to shuffle the trajectories, in a new order for each loop.
            keep_latest: number of newest trajectories to wait for and read; 0 for all.
            start_range: [low, high): the first step of each trajectory is drawn from it; a shorter
                trajectory begins at 0.
            device: device of PyTorch tensors; None for NumPy arrays.
            seed: seed of the order and of the first steps; None for a random one.
            fields: name of the leaf by field, for unusual names.
            wait_timeout_s: time-out for the first trajectories, seconds, >= 0.

        Raises:
            SpecError: an argument is out of range; nothing was read.
        """
        super().__init__(data_dir, num_envs, device)
        bounds = tuple(start_range)
        if len(bounds) != 2:  # noqa: PLR2004  # low and high
            raise SpecError(f"`start_range` must be (low, high), got {start_range!r}.")
        low = integer("start_range[0]", bounds[0], minimum=0)
        high = integer("start_range[1]", bounds[1], minimum=low + 1, hint="The range leaves `high` out.")
        directories = [data_dir] if isinstance(data_dir, str | os.PathLike) else list(data_dir)
        self._directories = [Path(each) for each in directories]
        self._starts = (low, high)
        self._names = names_of_fields(fields or {})
        self._seed = seed
        self._loops = integer("dataset_loops", dataset_loops, minimum=-(1 << 31))
        self._shuffle, self._keep_latest = shuffle, integer("keep_latest", keep_latest, minimum=0)
        self._wait_timeout_s = check_wait(wait_timeout_s, "wait_timeout_s")
        self._shard = (0, 1)
        self._rng = np.random.default_rng()
        self.num_dataset_looped = 0
        self._unused: collections.deque[Path] = collections.deque()  # trajectories of this loop, not taken yet
        self._num_opened = 0  # trajectories taken in this loop
        self.skipped: dict[str, str] = {}
        self._cursors: list[Cursor | None] = []
        self._layout: TransitionBatch | None = None

    def open_trajectory(self, path: Path) -> Any:
        """Return the trajectory at `path`, with `manifest` and `load` of a `StoredTrajectory`.

        A subclass may read other formats.

        Raises:
            FormatError: the file is torn or damaged; the error names it.
        """
        return StoredTrajectory(path)

    def shard(self, index: int, num_shards: int) -> None:
        """Read only each `num_shards`-th trajectory, from number `index` on; all environments start again."""
        self._shard = (index, num_shards)
        self._is_initialized = False

    def reset_all(self) -> None:
        """Look for trajectories, and give each environment its first one.

        With a seed, the order is the same each time.

        Raises:
            ReplayTimeoutError: too few trajectories exist after `wait_timeout_s`.
        """
        index, _ = self._shard
        self._rng = np.random.default_rng(self._seed if self._seed is None else [self._seed, index])
        self.skipped = dict(self.skipped)  # a share has its own dict
        self._cursors = [None] * self.num_envs
        self.num_dataset_looped = 0
        self._start_loop()
        self.refresh_handlers(range(self.num_envs))

    def refresh_handlers(self, env_ids: Sequence[int]) -> None:
        """Give the environments `env_ids` their next trajectory; the rest of the current one is not delivered."""
        for env in env_ids:
            self._cursors[env] = self._take()

    def get_buffer(self, num_transitions_per_env: int | None = None) -> TransitionBatch:
        """Make a batch of zeros and empty strings: leaves [N, ...], or [T, N, ...]; T is `num_transitions_per_env`."""
        if self._layout is None:
            raise StopIteration
        batch = (self.num_envs,) if num_transitions_per_env is None else (num_transitions_per_env, self.num_envs)
        buffer: TransitionBatch = map_present(lambda spec: zeros(spec.dtype, batch + spec.shape), self._layout)
        return buffer

    def fill_transition(self, buffer: TransitionBatch, env_ids: Sequence[int] | None = None) -> TransitionBatch:
        """Copy the next transitions of the environments `env_ids`, or of all, into `buffer`, and return it."""
        chosen = range(self.num_envs) if env_ids is None else env_ids
        is_single = buffer.mask.ndim == 1
        leaves = [leaf[None] if is_single and leaf is not None else leaf for leaf in tree.flatten(buffer)]
        num_rows = 1 if is_single else len(buffer.mask)
        num_filled = 0
        for env in chosen:
            at = 0
            while at < num_rows and (cursor := self._cursors[env]) is not None:
                at += cursor.fill(leaves, at, env, num_rows - at)
                if not cursor.num_left:
                    self._cursors[env] = self._take()
            num_filled += at
        if not num_filled:
            raise StopIteration
        return buffer

    def _list_trajectories(self) -> list[Path]:
        return list_trajectories(*self._directories)

    def _take(self) -> Cursor | None:
        """Return the next undamaged trajectory; None after the last loop."""
        while True:
            while self._unused:
                path = self._unused.popleft()
                try:
                    cursor = self._open(path)
                except (FormatError, UnsafeDataError) as error:
                    if path.name not in self.skipped:
                        _LOG.warning("Skipped: %s", error)
                    self.skipped[path.name] = str(error)
                else:
                    self._num_opened += 1
                    return cursor
            if not self._num_opened:
                if self._shard != (0, 1):
                    return None  # a shard without trajectories
                raise FormatError(f"none of {len(self.skipped)} trajectories can be read: {self.skipped}")
            if 0 < self._loops <= self.num_dataset_looped + 1:
                self.num_dataset_looped = self._loops
                return None
            self.num_dataset_looped += 1
            self._start_loop()

    def _start_loop(self) -> None:
        index, num_shards = self._shard
        paths = self._wait()[index::num_shards]  # before the shuffle: shards must not overlap
        order = self._rng.permutation(len(paths)) if self._shuffle else np.arange(len(paths))
        self._unused = collections.deque(paths[number] for number in order)
        self._num_opened = 0

    def _wait(self) -> Sequence[Path]:
        """Wait for enough trajectories, and return the paths to read."""
        wanted = max(self._keep_latest, 1)
        end = time.monotonic() + self._wait_timeout_s
        while True:
            paths = self._list_trajectories()
            if len(paths) >= wanted:
                return paths[-self._keep_latest :]
            if time.monotonic() >= end:
                raise ReplayTimeoutError(
                    f"{len(paths)} complete trajectories after {self._wait_timeout_s:.1f} s, expected {wanted}. Start "
                    "the writer, raise `wait_timeout_s`, or check `data_dir`."
                )
            time.sleep(min(_POLL_S, max(end - time.monotonic(), 0.0)))

    def _open(self, path: Path) -> Cursor:
        """Open a trajectory at the first step to deliver; raises if it is damaged."""
        stored = self.open_trajectory(path)
        start = int(self._rng.integers(*self._starts))
        if not stored.manifest.num_transitions:
            raise FormatError(f"trajectory `{path.name}`: it has nothing but a boundary step.")
        cursor = Cursor(read_transitions(stored.load(), stored.manifest, self._names), start)
        layout = map_present(lambda leaf: ArraySpec(leaf.shape[1:], leaf.dtype), cursor.transitions)
        self._layout = self._layout or layout
        if layout != self._layout:
            raise StructureError(
                f"trajectory `{path.name}` has {layout}, but those before it have {self._layout}. "
                "Move it to another directory."
            )
        return cursor
