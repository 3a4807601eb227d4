"""Convert Minari data sets to trajectories on disk.

A Minari episode of n steps has n + 1 observations. Its trajectory has n + 1 rows of observation, action and reward, in
the dtypes that `environments.record` writes. The last one is a boundary row with the final observation and zeros.

Source: Minari 0.5.4, `minari/dataset/minari_storage.py`.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import numpy.typing as npt
import tree

from reverb_writer import rows
from reverb_writer.episodes.spaces import encoder
from reverb_writer.errors import StructureError
from reverb_writer.files.importing import Transferred
from reverb_writer.files.rollout_writer import RolloutWriter
from reverb_writer.files.trajectory_file import stored_metadata
from reverb_writer.leaves import padded_rows
from reverb_writer.progress import progress

_LOG = logging.getLogger(__package__)


def from_minari(dataset: Any, writer: RolloutWriter) -> list[Transferred]:
    """Write the episodes of a Minari data set as trajectories, unless the writer's directory has them.

    An episode that is empty or cannot be read is skipped, and the log names it. An episode that neither terminated nor
    was truncated counts as truncated, because its final observation is known.

    Args:
        dataset: a `minari.MinariDataset`.
        writer: the writer of the trajectories. Memory holds one episode at a time.

    Returns:
        The outcome of each episode that was not on disk yet: its number, its rows, and the reason if it was skipped.

    Raises:
        SpecError: observations or actions, such as graphs, have no fixed shape. Nothing was written.
        OSError: the disk failed, for example because it is full. Another call continues.
    """
    for name in ("observation_space", "action_space"):
        encoder(dataset, name)
    dataset_id = dataset.spec.dataset_id
    stored = [metadata.get("minari", {}) for metadata in stored_metadata(writer.data_dir)]
    done = {item.get("episode") for item in stored if item.get("dataset_id") == dataset_id}
    todo = [int(number) for number in dataset.episode_indices if int(number) not in done]
    outcomes = []
    with progress("from Minari", len(todo)) as advance:
        for number in todo:
            outcome = _convert(dataset, number, writer, {"dataset_id": dataset_id, "episode": number})
            if outcome.error:
                _LOG.warning("Skipped: %s", outcome.error)
            outcomes.append(outcome)
            advance()
    return outcomes


def _convert(dataset: Any, number: int, writer: RolloutWriter, source: dict[str, Any]) -> Transferred:
    try:
        steps, kinds = _rows_of(dataset, number)
    except Exception as error:  # noqa: BLE001  # h5py, JSON and Arrow raise errors of many types for damaged data
        return Transferred(str(number), 0, f"episode {number}: {type(error).__name__}: {error}")
    try:
        writer.save(steps, kinds=kinds, metadata={"minari": source})
    except StructureError as error:
        return Transferred(str(number), 0, f"episode {number}: {error}")
    return Transferred(str(number), len(kinds))


def _rows_of(dataset: Any, number: int) -> tuple[Any, npt.NDArray[np.uint8]]:
    """Return the rows of an episode, leaves [n + 1, ...], and their kinds."""
    (episode,) = dataset.iterate_episodes([number])
    num_steps = len(episode)
    if not num_steps:
        raise StructureError("it has no step.")
    results = {
        "action": encoder(dataset, "action_space", num_steps)(episode.actions),
        "reward": np.asarray(episode.rewards).astype(np.float32).reshape(num_steps),
    }
    steps = {
        "observation": encoder(dataset, "observation_space", num_steps + 1)(episode.observations),
        **tree.map_structure(lambda leaf: padded_rows(leaf, num_steps + 1), results),
    }
    kinds = np.full(num_steps + 1, rows.ACTION, np.uint8)
    kinds[0] |= rows.FIRST
    kinds[-1] = rows.LAST | (rows.TERMINAL if np.asarray(episode.terminations)[-1] else 0)
    return steps, kinds
