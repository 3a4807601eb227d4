"""instinct_rl's names, for a migration by one line: its spelling of methods, and its pickled trajectories.

    from reverb_writer.instinct_rl import RolloutDataset, RolloutStorage

Everything that this package adds is for code and files of instinct_rl; new code uses `reverb_writer.rollouts` and
`reverb_writer.files`. No other module of the library imports this package. docs/compatibility.md lists what is
different on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reverb_writer import files, rollouts
from reverb_writer.files.transition_fields import concatenate_components
from reverb_writer.instinct_rl.pickled_trajectory import (
    PickledTrajectory,
    frame_range,
    list_trajectories,
    open_trajectory,
)

__all__ = [
    "ActionLabelRollout",
    "PickledTrajectory",
    "QueueRolloutStorage",
    "RolloutDataset",
    "RolloutStorage",
    "SarsaRolloutStorage",
    "open_trajectory",
]


class _Spelling:
    """The original's spelling of a storage's methods."""

    def reccurent_mini_batch_generator(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Return what `recurrent_mini_batch_generator` returns."""
        batches: Iterator[Any] = self.recurrent_mini_batch_generator(*args, **kwargs)  # type: ignore[attr-defined]
        return batches


class RolloutStorage(_Spelling, rollouts.RolloutStorage):
    """`reverb_writer.rollouts.RolloutStorage` with the original's spelling of methods."""


class QueueRolloutStorage(_Spelling, rollouts.QueueRolloutStorage):
    """`reverb_writer.rollouts.QueueRolloutStorage` with the original's spelling of methods."""


class ActionLabelRollout(_Spelling, rollouts.ActionLabelRollout):
    """`reverb_writer.rollouts.ActionLabelRollout` with the original's spelling of methods."""


class SarsaRolloutStorage(_Spelling, rollouts.SarsaRolloutStorage):
    """`reverb_writer.rollouts.SarsaRolloutStorage` with the original's spelling of methods."""


class RolloutDataset(files.RolloutDataset):
    """`reverb_writer.files.RolloutDataset` that also reads the original's pickle files.

    The unpickler makes NumPy arrays and nothing else; a pickle that asks for more is skipped by name.
    """

    @staticmethod
    def get_frame_range(filename: str) -> tuple[int, int]:
        """Return the frames [start, stop) that `filename` states.

        >>> RolloutDataset.get_frame_range("traj_100_200.pkl")
        (100, 200)

        Raises:
            FormatError: the name states none.
        """
        return frame_range(filename)

    @staticmethod
    def assemble_obs_components(observation: Any) -> Any:
        """Return an `observation` of several components [T, ...] as one float32 vector [T, D], in dm-tree's order."""
        return concatenate_components(observation)

    def open_trajectory(self, path: Path) -> Any:
        """Return the trajectory at `path`, in either format.

        Raises:
            FormatError: it is torn or damaged; names it.
            UnsafeDataError: a pickle asks for more than arrays.
        """
        return open_trajectory(path)

    def read_dataset_directory(self) -> list[Path]:
        """Return the paths of the trajectories in either format, oldest first."""
        return [path for directory in self._directories for path in list_trajectories(directory)]
