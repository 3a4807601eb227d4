"""instinct_rl's data sets of rollout files: PyTorch's `IterableDataset`s if PyTorch is installed."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from reverb_writer.files import rollout_dataset
from reverb_writer.files.transition_fields import TransitionBatch
from reverb_writer.instinct_rl import pickles
from reverb_writer.rollouts.array_nests import Arrays
from reverb_writer.rows import LastRow

_FIELDS = ["timeout" if field == "truncated" else field for field in TransitionBatch._fields]

Transition: Any = NamedTuple("Transition", [(field, Any) for field in _FIELDS])  # type: ignore[misc]
Transition.__doc__ = "`TransitionBatch` of `reverb_writer.files`, whose `truncated` is called `timeout` here."


def _iterable_dataset() -> Any:
    with contextlib.suppress(ModuleNotFoundError):  # NumPy arrays do not need PyTorch
        return importlib.import_module("torch.utils.data").IterableDataset
    return object


class RolloutFileBase(rollout_dataset.RolloutFileBase, _iterable_dataset()):  # type: ignore[misc]
    """The base class of `reverb_writer.files`, as PyTorch's `IterableDataset`.

    A subclass implements `reset_all`, `refresh_handlers`, `get_buffer` and `fill_transition`; the buffer is a named
    tuple with at least `observation`, `action`, `reward` and `done`. `all_env_ids` is on the device.
    """

    def __init__(self, data_dir: Any, num_envs: int, device: Any = None) -> None:
        """Set the arguments; files are read at the first use."""
        super().__init__(data_dir, num_envs, device)
        self.all_env_ids = Arrays(device).asarray(self.all_env_ids)

    def get_transition_batch(self) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Return the next transitions as results of a step: observations, actions, rewards, dones and infos.

        Infos are `{"time_outs": ...}` if the buffer has `timeout`. `get_batch` returns all fields.

        Raises:
            StopIteration: all trajectories were delivered.
        """
        batch = self.get_batch()
        infos = {"time_outs": batch.timeout} if hasattr(batch, "timeout") else {}
        return batch.observation, batch.action, batch.reward, batch.done, infos


class RolloutDataset(rollout_dataset.RolloutDataset, RolloutFileBase):
    """The trajectories of a directory, including instinct_rl's pickles, in the order of modification.

    The unpickler only makes NumPy arrays; pickles with other objects are skipped. Each loop reads the pickles again;
    `convert_trajectories` makes files that load faster. In a `DataLoader` with `batch_size=None`, each worker reads its
    own share of the trajectories.

    Attributes:
        Transition: class of the batches, a named tuple.
    """

    Transition: Any = Transition

    _repeats_last = True

    def __init__(
        self,
        data_dir: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        num_envs: int,
        dataset_loops: int = 1,
        random_shuffle_traj_order: bool = False,
        keep_latest_n_trajs: int = 0,
        starting_frame_range: Sequence[int] = (0, 1),
        device: Any = None,
        *,
        seed: int | None = None,
        fields: Mapping[str, str] | None = None,
        first_frame_done: bool = False,
        wait_timeout_s: float = 30.0,
    ) -> None:
        """Set the arguments; the first batch looks for the trajectories.

        Arguments and errors are the same as in `reverb_writer.files.RolloutDataset`, in the same order: `data_dir`,
        possibly with pickled trajectories, `num_envs`, `dataset_loops`, `random_shuffle_traj_order` (there `shuffle`),
        `keep_latest_n_trajs` (`keep_latest`), `starting_frame_range` (`start_range`), `device`, `seed`, `fields` and
        `wait_timeout_s` in seconds. Each frame is delivered: where no frame holds the next observation, it is the
        frame's own. With `first_frame_done`, `done` is also set on the
        first transition of each trajectory, as in the original.
        """
        super().__init__(
            data_dir,
            num_envs,
            dataset_loops,
            random_shuffle_traj_order,
            keep_latest_n_trajs,
            starting_frame_range,
            device,
            seed=seed,
            fields=fields,
            wait_timeout_s=wait_timeout_s,
        )
        self._first_frame_done = first_frame_done

    def get_buffer(self, num_transitions_per_env: int | None = None) -> Any:
        """Make a batch of zeros: a `Transition`, leaves [N, ...], or [T, N, ...]; T is `num_transitions_per_env`."""
        return Transition._make(super().get_buffer(num_transitions_per_env))

    def fill_transition(self, buffer: Any, env_ids: Sequence[int] | None = None) -> Any:
        """Copy the next transitions of the environments `env_ids`, or of all, into `buffer`, and return it."""
        super().fill_transition(buffer, env_ids)
        if self._first_frame_done:
            buffer.done[...] |= buffer.is_first
        return buffer

    get_frame_range = staticmethod(pickles.frame_range)

    def read_dataset_directory(self) -> bool:
        """Return whether enough trajectories exist: `keep_latest_n_trajs`, or one. `reset` waits for them."""
        return len(self._list_trajectories()) >= max(self._source.keep_latest, 1)

    def load_trajectory(self, path: Path, last_row: LastRow | None) -> tuple[Any, Any]:
        """Return the rows and kinds of the trajectory at `path`, this project's or a pickled one."""
        return (
            pickles.load_rows(path, last_row) if pickles.is_pickled(path) else super().load_trajectory(path, last_row)
        )

    def assemble_obs_components(self, traj_data: dict[str, Any]) -> dict[str, Any]:
        """Return `traj_data`, arrays by key, with `observations` [T, D] in place of the components `obs_NAME`.

        `metadata.json` of the data set lists the components in their order as `obs_segments`, and compressed
        components as `obs_disassemble_mapping`.

        Raises:
            FormatError: no components are listed, or a component is missing.
        """
        metadata = map(pickles.read_metadata, self._directories)
        return pickles.assemble_components(traj_data, next(filter(None, metadata), {}))

    def __iter__(self) -> Any:
        """Start again from the beginning; a worker of a `DataLoader` reads its share."""
        loaded = sys.modules.get("torch.utils.data")
        worker = loaded.get_worker_info() if loaded else None
        if worker is not None:
            self.shard(worker.id, worker.num_workers)
        return super().__iter__()

    def _list_trajectories(self) -> list[Path]:
        return pickles.list_trajectories(*self._directories)
