"""What a batch of transitions holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from reverb_writer.array_api import Array

__all__ = ["NStepTransitions", "Transitions"]


class Transitions(NamedTuple):
    """Transitions: in a state that shows `observation`, `action` gave `reward` and led to `next_observation`.

    Leaves are [B, T - 1, ...], or [N - 1, ...] of slices. A target of values is
    `reward + gamma * discount * value(next_observation)`.

    Attributes:
        observation: nest.
        action: nest, taken on the observation.
        reward: of the action; a nest if the steps have one.
        discount: 0 where the environment terminated with this action, else 1, times the stored discount if there is
            one. So it is 1 at truncations and cuts. 0 where `mask` is False.
        next_observation: nest like `observation`.
        mask: bool [B, T - 1] or [N - 1], True for transitions. False where the first row of a pair is a boundary step
            or padding, or the two rows are of different episodes or slices; what the other leaves hold there has no
            meaning.
        continues: bool [B, T - 1] or [N - 1], True where the next transition of the row follows this one in the same
            episode.
        extras: the other fields of the step in which the action was taken, by name, such as `policy_info` or `seed`.
    """

    observation: Any
    action: Any
    reward: Any
    discount: Any
    next_observation: Any
    mask: Array
    continues: Array
    extras: Mapping[str, Any]


class NStepTransitions(Transitions):
    """What `n_step` returns: `Transitions` that overlap. `continues` is False everywhere."""

    __slots__ = ()
