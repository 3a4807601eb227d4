"""The storages of `reverb_writer.rollouts` with instinct_rl's names."""

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
        """A copy of the observations and the last row's next observation, leaves [T + 1, B, ...]."""
        return self._with_last(self.observations, self.next_observations)

    @property
    def all_critic_observations(self) -> Any:
        """The critic's `all_observations`; None if the critic reads the policy's observations."""
        return self._with_last(self.critic_observations, self.next_critic_observations)

    def _with_last(self, nest: Any, following: Any) -> Any:
        return self._arrays.concatenate(nest, map_present(lambda leaf: leaf[-1:], following))
