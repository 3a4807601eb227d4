"""Read trajectories on disk as if many environments stepped through them.

    trajectories --take--> cursor of an environment --rows--> batch [N, ...] or [T, N, ...]
          ^                        | end of the trajectory
          +------------------------+

A cursor holds its trajectory in memory. A loop ends when all trajectories were taken.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tree

from reverb_writer.arguments import check_wait, integer
from reverb_writer.errors import SpecError
from reverb_writer.files.shuffled_transitions import ShuffledTransitions
from reverb_writer.files.trajectory_file import list_trajectories, load_rows
from reverb_writer.files.trajectory_source import TrajectorySource
from reverb_writer.files.transition_fields import Cursor, TransitionBatch, names_of_fields
from reverb_writer.leaves import zeros
from reverb_writer.nests import map_present
from reverb_writer.rows import LastRow
from reverb_writer.rows.layouts import checked_last_row


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
        for batch in dataset.shuffled(batch_size=256):
            ...  # batch.observation [256, ...], transitions in random order

    Source: the description of instinct_rl's `RolloutDataset`; docs/how-to/from-instinct-rl.md lists the differences.
    """

    _repeats_last = False  # whether such an action is a transition whose next observation is its own

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
        last_row: LastRow | None = None,
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
            last_row: for files without kinds of rows, whose flags of an end do not show it by their names: "action" if
                they stand beside the last action, "boundary" if on a row of the final observation; None otherwise.

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
        self._source = TrajectorySource(
            self._list_trajectories,
            self.load_trajectory,
            names_of_fields(fields or {}),
            loops=integer("dataset_loops", dataset_loops, minimum=-(1 << 31)),
            shuffle=shuffle,
            keep_latest=integer("keep_latest", keep_latest, minimum=0),
            seed=seed,
            wait_timeout_s=check_wait(wait_timeout_s, "wait_timeout_s"),
            last_row=checked_last_row(last_row),
            repeats_last=self._repeats_last,
        )
        self._cursors: list[Cursor | None] = []

    @property
    def num_dataset_looped(self) -> int:
        """Number of completed loops."""
        return self._source.num_looped

    @property
    def skipped(self) -> dict[str, str]:
        """Unreadable trajectories: the reason by name."""
        return self._source.skipped

    @property
    def num_left_out(self) -> int:
        """Number of actions that are no transitions, because no row holds the observation after them, since `reset`."""
        return self._source.num_left_out

    def shuffled(self, batch_size: int, *, pool_size: int = 100_000) -> ShuffledTransitions:
        """Return an iterable over the same transitions in random order, in batches of one size, such as for cloning.

        Each iteration starts again. Each loop over the trajectories has each transition once; its last batch may be
        smaller. Transitions are drawn uniformly from a pool in memory, which is filled with whole trajectories until it
        has `pool_size` transitions. If the pool has room for all transitions, each order is equally likely; otherwise
        also pass `shuffle=True` to the data set.

        Args:
            batch_size: number of transitions in a batch, leaves [batch_size, ...], >= 1.
            pool_size: number of transitions in memory, >= 1; the longest trajectory may exceed it.

        Raises:
            SpecError: an argument is out of range.
        """
        size = integer("batch_size", batch_size, minimum=1)
        return ShuffledTransitions(self._source, size, integer("pool_size", pool_size, minimum=1), self.device)

    def load_trajectory(self, path: Path, last_row: LastRow | None) -> tuple[Any, Any]:
        """Return the rows of the trajectory at `path`, leaves [T, ...], and their kinds, uint8 [T].

        A subclass may read other formats; `last_row` is for files without kinds.

        Raises:
            FormatError: the file is torn or damaged; the error names it.
        """
        return load_rows(path, last_row)

    def shard(self, index: int, num_shards: int) -> None:
        """Read only each `num_shards`-th trajectory, from number `index` on; all environments start again."""
        self._source = copy.copy(self._source)  # a share has its own
        self._source.shard(index, num_shards)
        self._is_initialized = False

    def reset_all(self) -> None:
        """Look for trajectories, and give each environment its first one.

        With a seed, the order is the same each time.

        Raises:
            ReplayTimeoutError: too few trajectories exist after `wait_timeout_s`.
        """
        self._cursors = [None] * self.num_envs
        self._source = copy.copy(self._source)
        self._source.start()
        self.refresh_handlers(range(self.num_envs))

    def refresh_handlers(self, env_ids: Sequence[int]) -> None:
        """Give the environments `env_ids` their next trajectory; the rest of the current one is not delivered."""
        for env in env_ids:
            self._cursors[env] = self._take()

    def get_buffer(self, num_transitions_per_env: int | None = None) -> TransitionBatch:
        """Make a batch of zeros and empty strings: leaves [N, ...], or [T, N, ...]; T is `num_transitions_per_env`."""
        layout = self._source.layout
        if layout is None:
            raise StopIteration
        batch = (self.num_envs,) if num_transitions_per_env is None else (num_transitions_per_env, self.num_envs)
        buffer: TransitionBatch = map_present(lambda spec: zeros(spec.dtype, batch + spec.shape), layout)
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
        """Return the next trajectory, at the first step to deliver; None after the last loop."""
        found = self._source.take()
        return None if found is None else Cursor(found, int(self._source.rng.integers(*self._starts)))
