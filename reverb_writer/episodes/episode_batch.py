"""Episodes of environments that step together, made from their recorded steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import tree

from reverb_writer.arguments import integer
from reverb_writer.episodes.episode import Episode
from reverb_writer.rows import LAST


class EpisodeBatch:
    """An observer that makes an `Episode` for each episode of N environments.

    `reverb_writer.environments.record` passes it the rows of a `gymnasium.vector` environment, in every autoreset mode.
    Episodes are finalized and end with their final observation; `extras` become extra model outputs. Infos and
    discounts are not kept. Not thread-safe.

    Example:
        batch = rw.EpisodeBatch(8)
        envs = rw.environments.record(gymnasium.make_vec("CartPole-v1", 8), batch)
        observations, _ = envs.reset()
        while training:
            observations, *_ = envs.step(policy(observations))
            for episode in batch.take_finished():
                observer.write_episode(episode)

    Attributes:
        num_envs: N.
    """

    def __init__(self, num_envs: int) -> None:
        """Begin without episodes; raises SpecError if `num_envs` is not an integer >= 1."""
        self.num_envs = integer("num_envs", num_envs, minimum=1)
        self._new: list[tuple[Any, Any, Any]] = []  # unread rows, their kinds and `env_mask`
        self._num_read = 0
        self._rows: list[list[Any]] = [[] for _ in range(num_envs)]  # rows of the ongoing episodes
        self._kinds: list[list[int]] = [[] for _ in range(num_envs)]

    def __repr__(self) -> str:
        return f"<EpisodeBatch of {self.num_envs} environments: {self.num_steps} steps>"

    @property
    def num_steps(self) -> int:
        """Number of recorded rows of N environments."""
        return self._num_read + len(self._new)

    def write_row(self, row: Any, kinds: Any, env_mask: Any = None) -> None:
        """Store a row of each environment.

        Args:
            row: leaves [N, ...]; not copied.
            kinds: uint8 [N], the kind of each row (`reverb_writer.rows`); not copied.
            env_mask: [N] booleans, whether each environment has a row; None for all.
        """
        self._new.append((row, kinds, env_mask))

    def take_finished(self) -> list[Episode]:
        """Return the episodes that ended since the last call.

        In Gymnasium's mode NEXT_STEP, an episode is complete after the step that resets its environment.
        """
        finished = []
        for row, kinds, env_mask in self._new:
            for env_id in range(self.num_envs) if env_mask is None else np.flatnonzero(env_mask).tolist():
                self._rows[env_id].append(tree.map_structure(lambda leaf, at=env_id: leaf[at], row))
                self._kinds[env_id].append(int(kinds[env_id]))
                if kinds[env_id] & LAST:
                    rows, self._rows[env_id] = self._rows[env_id], []
                    of_rows, self._kinds[env_id] = self._kinds[env_id], []
                    finished.append(Episode.from_steps(tree.map_structure(_stacked, *rows), kinds=of_rows))
        self._num_read += len(self._new)
        self._new.clear()
        return finished


def _stacked(*leaves: Any) -> Any:
    return np.array(leaves, object if isinstance(leaves[0], str | bytes) else None)
