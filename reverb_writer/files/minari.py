"""Convert Minari data sets to trajectories on disk and back, with Minari, which is imported on first use.

A Minari episode of n steps has n + 1 observations. Here it has n + 1 steps in the form of RLDS. The last one is a
boundary step: the final observation, `is_last`, `is_terminal`, and zeros in the other leaves.

Source: Minari 0.5.4, `minari/dataset/minari_storage.py`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tree

from reverb_writer.errors import SpecError, StructureError
from reverb_writer.files.rollout_writer import RolloutWriter
from reverb_writer.files.trajectory_file import StoredTrajectory
from reverb_writer.files.transition_fields import TransitionFields
from reverb_writer.lazy import needs
from reverb_writer.leaves import padded_rows
from reverb_writer.progress import progress


def from_minari(dataset: Any, writer: RolloutWriter) -> int:
    """Write the episodes of a Minari data set as trajectories, and return how many.

    Args:
        dataset: a `minari.MinariDataset`, or the path of one (its `data` folder, or the folder above).
        writer: the writer of the trajectories. One episode is in memory at a time.

    Raises:
        StructureError: observations or actions are texts or graphs, which have no fixed shape.
    """
    if isinstance(dataset, str | os.PathLike):
        with needs("`from_minari`", "reverb-writer[minari]"):
            from minari import MinariDataset  # noqa: PLC0415  # an extra

        path = Path(dataset).resolve()
        dataset = MinariDataset(str(path / "data" if (path / "data").is_dir() else path))
    with progress("from Minari", len(dataset)) as advance:
        for episode in dataset.iterate_episodes():
            num_steps = len(episode)
            flags = np.arange(num_steps + 1)
            is_last = flags == num_steps
            terminated, truncated = bool(episode.terminations[-1]), bool(episode.truncations[-1])
            writer.save(
                {
                    "observation": episode.observations,
                    "action": tree.map_structure(_one_more, episode.actions),
                    "reward": _one_more(np.asarray(episode.rewards, np.float32)),
                    "is_first": flags == 0,
                    "is_last": is_last,
                    "is_terminal": is_last & terminated,
                },
                terminated=terminated,
                truncated=truncated or not terminated,
                metadata={"minari": {"dataset_id": dataset.spec.dataset_id, "episode": int(episode.id)}},
            )
            advance()
    return len(dataset)


def to_minari(
    paths: Iterable[Path],
    minari_dir: str | os.PathLike[str],
    dataset_id: str,
    *,
    fields: Mapping[str, str] | None = None,
    observation_space: Any = None,
    action_space: Any = None,
) -> Any:
    """Write trajectories as a Minari data set, without loss, and return the `minari.MinariDataset`.

    Args:
        paths: files of trajectories. One is in memory at a time.
        minari_dir: the folder of the new data set; its `data` folder is made there. `MINARI_DATASETS_PATH/DATASET_ID`
            is where `minari.load_dataset` finds it.
        dataset_id: such as "ant/expert-v0".
        fields: names of leaves, as for `RolloutDataset`.
        observation_space: a Gymnasium space; None for an unbounded one of the stored dtypes and shapes.
        action_space: the same for actions.

    Raises:
        SpecError: there are no trajectories, or the folder has a data set already.
        StructureError: steps lack an observation, an action or a reward; or are not numbers and no space is given.
        FormatError: a trajectory is damaged; names it.
    """
    with needs("`to_minari`", "reverb-writer[minari]"):
        import minari  # noqa: PLC0415  # an extra
        from minari.data_collector.episode_buffer import EpisodeBuffer  # noqa: PLC0415  # an extra
        from minari.dataset.minari_storage import MinariStorage  # noqa: PLC0415  # an extra

    files = list(paths)
    names = TransitionFields(fields)
    episodes = (EpisodeBuffer(**_episode(StoredTrajectory(path), names)) for path in files)
    first = next(episodes, None)
    if first is None:
        raise SpecError("`paths` has no trajectories; `list_trajectories` finds those of a directory.")
    folder = Path(minari_dir).resolve() / "data"  # Minari joins a relative one to itself
    if (folder / "metadata.json").exists():
        raise SpecError(f"{folder} has a data set already. Name another folder.")
    observation_space = observation_space or _space_of_columns(first.observations)
    action_space = action_space or _space_of_columns(first.actions)
    folder.mkdir(parents=True, exist_ok=True)
    storage = MinariStorage.new(folder, observation_space, action_space, data_format="hdf5", jpeg_encoding=False)
    storage.update_metadata({"dataset_id": dataset_id, "minari_version": minari.__version__})

    with progress("to Minari", len(files)) as advance:

        def every() -> Iterator[Any]:
            for episode in itertools.chain([first], episodes):
                yield episode
                advance()

        storage.update_episodes(every())
    return minari.MinariDataset(storage)


def _episode(trajectory: StoredTrajectory, fields: TransitionFields) -> dict[str, Any]:
    """Return the columns of a trajectory by Minari's names."""
    manifest, steps = trajectory.manifest, trajectory.load()
    num_transitions = manifest.num_transitions
    values = fields.read(steps, manifest)
    observation = values["observation"]
    if not manifest.boundary_step:  # the observation after the last step was not stored
        observation = tree.map_structure(lambda leaf: np.concatenate([leaf, leaf[-1:]]), observation)
    done, truncated = values["done"][:num_transitions], values["truncated"][:num_transitions]
    return {
        "observations": observation,
        "actions": tree.map_structure(lambda leaf: leaf[:num_transitions], values["action"]),
        "rewards": values["reward"][:num_transitions],
        "terminations": done & ~truncated,
        "truncations": done & truncated,
    }


def _space_of_columns(nest: Any) -> Any:
    """Return an unbounded space for the rows of a nest of columns [T, ...]."""
    with needs("`to_minari`", "reverb-writer[minari]"):
        from gymnasium import spaces  # noqa: PLC0415  # an extra

    if isinstance(nest, Mapping):
        return spaces.Dict({key: _space_of_columns(value) for key, value in nest.items()})
    if isinstance(nest, tuple):
        return spaces.Tuple([_space_of_columns(value) for value in nest])
    dtype, shape = nest.dtype, nest.shape[1:]
    if dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, shape, dtype)
    if dtype.kind not in "iu":
        raise StructureError(
            f"no default space exists for {dtype} {shape}. Pass `observation_space` and `action_space`."
        )
    limits = np.iinfo(dtype)
    return spaces.Box(limits.min, limits.max, shape, dtype)


def _one_more(column: Any) -> Any:
    """Return a column with a row of zeros after it, for the boundary step."""
    return padded_rows(np.asarray(column), len(column) + 1)
