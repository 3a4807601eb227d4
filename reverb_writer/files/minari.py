"""Convert Minari data sets to trajectories on disk.

A Minari episode of n steps has n + 1 observations. Its trajectory has n + 1 steps in the form of RLDS. The last one is
a boundary step: the final observation, `is_last`, `is_terminal`, and zeros in the other leaves.

Source: Minari 0.5.4, `minari/dataset/minari_storage.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tree

from reverb_writer.files.rollout_writer import RolloutWriter
from reverb_writer.leaves import padded_rows
from reverb_writer.progress import progress


def from_minari(dataset: Any, writer: RolloutWriter) -> int:
    """Write the episodes of a Minari data set as trajectories, and return their number.

    Args:
        dataset: a `minari.MinariDataset`.
        writer: the writer of the trajectories. Memory holds one episode at a time.

    Raises:
        StructureError: observations or actions are texts or graphs, which have no fixed shape.
    """
    with progress("from Minari", len(dataset)) as advance:
        for episode in dataset.iterate_episodes():
            num_steps = len(episode)
            numbers = np.arange(num_steps + 1)
            is_last = numbers == num_steps
            results = {"action": episode.actions, "reward": np.asarray(episode.rewards, np.float32)}
            terminated, truncated = bool(episode.terminations[-1]), bool(episode.truncations[-1])
            writer.save(
                {
                    "observation": episode.observations,
                    **tree.map_structure(lambda leaf, num=num_steps: padded_rows(np.asarray(leaf), num + 1), results),
                    "is_first": numbers == 0,
                    "is_last": is_last,
                    "is_terminal": is_last & terminated,
                },
                terminated=terminated,
                truncated=truncated or not terminated,
                metadata={"minari": {"dataset_id": dataset.spec.dataset_id, "episode": int(episode.id)}},
            )
            advance()
    return len(dataset)
