"""What goes into a storage, and what comes out.

    Transition           storage                [T, B, ...]    MiniBatch
    -------------------  -------------------------------------  --------------------
    observations         observations           nest           obs
    critic_observations  critic_observations    nest or None   critic_obs
    actions              actions                A              actions
    rewards              rewards                R
    dones                dones                  1, uint8
    truncated            truncated              1, uint8
    final_values         final_values           R
                         cuts                   1, uint8
    values               values                 R              values
    actions_log_prob     actions_log_prob       1              old_actions_log_prob
    action_mean          mu                     A              old_mu
    action_sigma         sigma                  A              old_sigma
    hidden_states        saved_hidden_states    nest or None   hidden_states
                         advantages, returns    R              advantages, returns

A transition has leaves [B, ...] for B environments; axes of size 1 at the end may lack. Hidden states are
[layers, B, H], as PyTorch's recurrent networks have them: of an LSTM a pair, of actor and critic a pair of those.
`cuts` is not 0 in the last row of a window that `fill_from` brought: the row after it is of other actors.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final, NamedTuple

import numpy as np
import tree

from reverb_writer.rollouts.arrays import stated

__all__ = [
    "COLUMN_OF",
    "ContiguousMiniBatch",
    "LabelMiniBatch",
    "LabelTransition",
    "MiniBatch",
    "SarsaMiniBatch",
    "SarsaTransition",
    "Transition",
    "column_shapes",
]

COLUMN_OF: Final = {
    "action_mean": "mu",
    "action_sigma": "sigma",
    "hidden_states": "saved_hidden_states",
    "obs": "observations",
    "critic_obs": "critic_observations",
    "old_actions_log_prob": "actions_log_prob",
    "old_mu": "mu",
    "old_sigma": "sigma",
    "next_obs": "next_observations",
    "next_critic_obs": "next_critic_observations",
}
"""The storage's name of a field of `Transition` or `MiniBatch`, where it is another."""


@dataclass
class Transition:
    """One step of B environments: fill it field by field, add it, clear it.

    Attributes:
        observations: on which the actions were chosen.
        critic_observations: what the critic sees besides, if the storage has them.
        actions: those that were taken.
        rewards: [B, R], or [B] of a single one.
        dones: [B], not 0 where the episode ended with this step, for whatever reason.
        values: [B, R], of the observations.
        actions_log_prob: [B], logarithm of the probability of each action.
        action_mean: of the distribution of actions.
        action_sigma: standard deviation, likewise.
        hidden_states: of recurrent networks before this step. None, or nothing but None, for zeros. A network without
            memory has None in its place, in all steps alike, and so in the minibatches: `(states, None)`.
        truncated: [B], not 0 where a time limit or the like ended the episode, which could have gone on. None for
            nowhere. Such a row is done, whatever `dones` says.
        final_values: [B, R], at truncated rows the values of the final observations, which environments that reset
            themselves do not show in the next step; elsewhere anything. None for not known.
    """

    observations: Any = None
    critic_observations: Any = None
    actions: Any = None
    rewards: Any = None
    dones: Any = None
    values: Any = None
    actions_log_prob: Any = None
    action_mean: Any = None
    action_sigma: Any = None
    hidden_states: Any = None
    truncated: Any = None
    final_values: Any = None

    def clear(self) -> None:
        """Set all fields to None."""
        for field in fields(self):
            setattr(self, field.name, None)


@dataclass
class LabelTransition(Transition):
    """A transition with what an expert would have done.

    Attributes:
        action_labels: like the actions.
    """

    action_labels: Any = None


@dataclass
class SarsaTransition(Transition):
    """A transition with what followed; needed in the last row of a rollout, and where an episode ended.

    Attributes:
        next_observations: like the observations: those that the environments show next.
        next_critic_observations: likewise.
        final_observations: like the observations: at rows that are done, the last ones of the episode; elsewhere
            anything. None for not known.
        final_critic_observations: likewise.
    """

    next_observations: Any = None
    next_critic_observations: Any = None
    final_observations: Any = None
    final_critic_observations: Any = None


class MiniBatch(NamedTuple):
    """Part of a rollout; leaves [N, ...], or as `RolloutStorage.recurrent_mini_batch_generator` says.

    Fields that the transitions did not bring are None, and so are advantages and returns that were not computed;
    `critic_obs` is `obs` if the critic sees nothing else.
    """

    obs: Any
    critic_obs: Any
    actions: Any
    values: Any
    advantages: Any
    returns: Any
    old_actions_log_prob: Any
    old_mu: Any
    old_sigma: Any
    hidden_states: Any
    masks: Any


def _extended(name: str, doc: str, *fields: str) -> Any:
    """Return a named tuple with the fields of `MiniBatch` and more: classes of them cannot be extended."""
    made: Any = NamedTuple(name, [(field, Any) for field in (*MiniBatch._fields, *fields)])  # type: ignore[misc]
    made.__doc__ = doc
    return made


LabelMiniBatch = _extended("LabelMiniBatch", "`MiniBatch`, and the labels.", "action_labels")
SarsaMiniBatch = _extended(
    "SarsaMiniBatch", "`MiniBatch`, and the next observations, of the same episode.", "next_obs", "next_critic_obs"
)


class ContiguousMiniBatch(NamedTuple):
    """Whole trajectories end to end, without padding.

    Attributes:
        batch: a `MiniBatch` with leaves [N, ...], hidden states [layers, n, H], and no mask.
        is_init: [N] True on the first row of each trajectory.
        lengths: [n] rows of each of them.
    """

    batch: Any
    is_init: Any
    lengths: Any


def column_shapes(obs_shape: Any, critic_obs_shape: Any, actions_shape: Any, num_rewards: int) -> dict[str, Any]:
    """Return what rows of the columns look like, as `arrays.stated`; None for the critic's if it sees nothing else."""
    is_none = isinstance(critic_obs_shape, tuple | list) and [*critic_obs_shape] == [None]
    critic = None if critic_obs_shape is None or is_none else stated("critic_obs_shape", critic_obs_shape)
    actions, flag, rewards = stated("actions_shape", actions_shape), stated("", 1, np.uint8), stated("", num_rewards)
    distribution = tree.map_structure(lambda shape: stated("", shape.sizes), actions)
    return {
        "observations": stated("obs_shape", obs_shape),
        "critic_observations": critic,
        "actions": actions,
        "rewards": rewards,
        "dones": flag,
        "truncated": flag,
        "final_values": rewards,
        "cuts": flag,
        "values": rewards,
        "actions_log_prob": stated("", 1),
        "mu": distribution,
        "sigma": distribution,
        "advantages": rewards,
        "returns": rewards,
    }
