"""The storages of `reverb_writer.rollouts`, with the names that only instinct_rl has."""

from __future__ import annotations

from typing import Any

from reverb_writer import rollouts
from reverb_writer.nests import map_present


class RolloutStorage(rollouts.RolloutStorage):
    """`reverb_writer.rollouts.RolloutStorage` with the original's spelling of methods."""

    reccurent_mini_batch_generator = rollouts.RolloutStorage.recurrent_mini_batch_generator


class QueueRolloutStorage(rollouts.QueueRolloutStorage, RolloutStorage):
    """`reverb_writer.rollouts.QueueRolloutStorage` with the original's spelling of methods."""


class ActionLabelRollout(rollouts.ActionLabelRollout, QueueRolloutStorage):
    """`reverb_writer.rollouts.ActionLabelRollout` with the original's spelling of methods."""


class SarsaRolloutStorage(rollouts.SarsaRolloutStorage, RolloutStorage):
    """`reverb_writer.rollouts.SarsaRolloutStorage` with the original's names."""

    @property
    def all_observations(self) -> Any:
        """The observations, and the next observation of the last row: leaves [T + 1, B, ...], a copy."""
        return self._with_last(self.observations, self.next_observations)

    @property
    def all_critic_observations(self) -> Any:
        """The same for the critic; None if it has the policy's observations."""
        return self._with_last(self.critic_observations, self.next_critic_observations)

    def _with_last(self, nest: Any, following: Any) -> Any:
        return self._arrays.concatenate(nest, map_present(lambda leaf: leaf[-1:], following))
