"""The records of a storage: transitions in, minibatches out.

    Transition           storage                [T, B, ...]    MiniBatch
    -------------------  -------------------------------------  --------------------
    observations         observations           nest           obs
    critic_observations  critic_observations    nest or None   critic_obs
    actions              actions                A              actions
    rewards              rewards                R
    dones                dones                  1, uint8
    truncated            truncated              1, uint8
    final_values         final_values           R
    mask                 mask                   1, uint8       is_real
                         cuts                   1, uint8
    values               values                 R              values
    actions_log_prob     actions_log_prob       1              old_actions_log_prob
    action_mean          mu                     A              old_mu
    action_sigma         sigma                  A              old_sigma
    hidden_states        saved_hidden_states    nest or None   hidden_states
                         advantages, returns    R              advantages, returns

A transition has leaves [B, ...] for B environments; trailing axes of size 1 may be left out. Its hidden states are
[layers, B, H], as in PyTorch's recurrent networks: a pair for an LSTM, a pair of pairs for actor and critic. Their
column is [T, B, layers, H]; a minibatch has the states of first rows, [layers, n, H]. `cuts` is not 0 in the last row
of a window from `fill_from`: the next row comes from other actors. `mask` is 0 in rows that are not training data.
Minibatches that keep such rows have `is_real`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Final, NamedTuple

import numpy as np
import tree

from reverb_writer.rollouts.array_nests import row_shapes

NEEDED: Final = ("observations", "critic_observations", "actions", "rewards", "dones")
"""Fields that transitions must have."""

DEFAULTS: Final = {"truncated": 0, "final_values": math.nan, "cuts": 0, "mask": 1}
"""Values of fields that transitions may leave out."""

FLAGS: Final = ("dones", "truncated", "mask")
"""Flags; any non-zero value is stored as 1."""

POLICY: Final = {"values", "actions_log_prob", "mu", "sigma"}
"""Fields that must be set in all transitions of a rollout, or in none."""

COLUMN_OF: Final = {
    "is_real": "mask",
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
"""The storage's column by field of `Transition` or `MiniBatch`, where the names differ."""


@dataclass
class Transition:
    """One step of B environments: fill it field by field, add it, clear it.

    Attributes:
        observations: the observations before the actions.
        critic_observations: the critic's observations, if the storage has them.
        actions: the actions taken.
        rewards: [B, R], or [B] if R is 1.
        dones: [B], not 0 where the episode ended with this step, for any reason.
        values: [B, R], values of the observations.
        actions_log_prob: [B], log-probability of each action.
        action_mean: mean of the distribution of actions.
        action_sigma: standard deviation of the distribution of actions.
        hidden_states: states of recurrent networks before this step; None means zeros. For a network without memory
            they are None in all steps and in the minibatches, as in `(states, None)`.
        truncated: [B], not 0 where the episode was cut off, for example by a time limit; None for nowhere. A truncated
            row counts as done even if `dones` is 0.
        final_values: [B, R], values of the final observations at truncated rows, because an environment that resets
            itself does not show them in the next step; ignored elsewhere. None if unknown.
        mask: [B], 0 where the row is not training data: a step that only reset its environment, a boundary step,
            padding; None if all rows are real. Advantages, means and shuffled minibatches leave masked rows out. A
            trajectory that is not done ends before a masked row, whose values are the values after it.
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
    mask: Any = None

    def clear(self) -> None:
        """Set all fields to None."""
        for field in fields(self):
            setattr(self, field.name, None)


@dataclass
class LabelTransition(Transition):
    """A transition with the actions of an expert.

    Attributes:
        action_labels: the expert's actions, in the shape of the actions.
    """

    action_labels: Any = None


@dataclass
class SarsaTransition(Transition):
    """A transition with the observations after it, needed in the last row of a rollout and where an episode ended.

    Attributes:
        next_observations: the next observations of the environments.
        next_critic_observations: the critic's next observations.
        final_observations: the last observations of the episode, at rows that are done; ignored elsewhere. None if
            unknown.
        final_critic_observations: the critic's final observations.
    """

    next_observations: Any = None
    next_critic_observations: Any = None
    final_observations: Any = None
    final_critic_observations: Any = None


class MiniBatch(NamedTuple):
    """Part of a rollout; leaves [N, ...], or as in `RolloutStorage.recurrent_mini_batch_generator`.

    Fields that the transitions did not have are None, as are advantages and returns that were not computed.
    `critic_obs` is `obs` if the storage has no critic's observations. `is_real` is the mask of the transitions, in
    minibatches of whole environments.
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
    is_real: Any = None


def _extended(name: str, doc: str, *fields: str) -> Any:
    """Return a named tuple class with the fields of `MiniBatch` and more; subclassing cannot add fields."""
    made: Any = NamedTuple(name, [(field, Any) for field in (*MiniBatch._fields, *fields)])  # type: ignore[misc]
    made.__doc__ = doc
    return made


LabelMiniBatch = _extended("LabelMiniBatch", "`MiniBatch` with the labels.", "action_labels")
SarsaMiniBatch = _extended(
    "SarsaMiniBatch", "`MiniBatch` with the next observations of the same episode.", "next_obs", "next_critic_obs"
)


def column_shapes(obs_shape: Any, critic_obs_shape: Any, actions_shape: Any, num_rewards: int) -> dict[str, Any]:
    """Return the row shapes of all columns; None for `critic_observations` if the critic reads `observations`."""
    is_none = isinstance(critic_obs_shape, tuple | list) and [*critic_obs_shape] == [None]
    critic = None if critic_obs_shape is None or is_none else row_shapes("critic_obs_shape", critic_obs_shape)
    actions, rewards = row_shapes("actions_shape", actions_shape), row_shapes("", num_rewards)
    flag = row_shapes("", 1, np.uint8)
    distribution = tree.map_structure(lambda shape: row_shapes("", shape.sizes), actions)
    return {
        "observations": row_shapes("obs_shape", obs_shape),
        "critic_observations": critic,
        "actions": actions,
        "actions_log_prob": row_shapes("", 1),
        **dict.fromkeys(("rewards", "values", "final_values", "advantages", "returns"), rewards),
        **dict.fromkeys(("dones", "truncated", "mask", "cuts"), flag),
        **dict.fromkeys(("mu", "sigma"), distribution),
    }
