"""Fold the steps of one environment into transitions over n steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import tree

from reverb_writer.environments.n_step_fields import as_step, is_boundary, without_markers
from reverb_writer.errors import StructureError


class _Start(NamedTuple):
    """The first step of transitions, with the rewards and discounts so far: a number or an array for each leaf."""

    step: Mapping[str, Any]
    rewards: list[Any]
    discounts: list[Any]


class SingleNStep:
    """Fold the steps of one environment; see `NStepTransform`. Rewards and discounts may be nests."""

    def __init__(self, observer: Any, n: int, gamma: float) -> None:
        """Begin with no episode."""
        self._observer, self._n, self._gamma = observer, n, gamma
        self._starts: list[_Start] = []
        self._before: Mapping[str, Any] | None = None
        self._num_passed = 0

    def __call__(self, step: Any, *, end_of_episode: bool | None = None, env_mask: None = None) -> None:
        """Add a step, and pass on the transition to its observation; at the end of an episode, all that remain."""
        if env_mask is not None:
            raise StructureError(
                "`env_mask` is for steps of several environments. Pass `num_envs` to `NStepTransform`."
            )
        fields = as_step(step)
        is_last = bool(is_boundary(fields) if end_of_episode is None else end_of_episode)
        starts = self._starts
        if self._before is not None:
            rewards, discounts = _leaves(self._before)
            starts = [
                _Start(
                    start.step,
                    [
                        total + self._gamma * so_far * reward
                        for total, so_far, reward in zip(start.rewards, start.discounts, rewards, strict=True)
                    ],
                    [
                        self._gamma * so_far * discount
                        for so_far, discount in zip(start.discounts, discounts, strict=True)
                    ],
                )
                for start in starts[max(0, len(starts) + 1 - self._n) :]
            ]
            starts.append(_Start(self._before, [r + 0 * d for r, d in zip(rewards, discounts, strict=True)], discounts))
            transitions = [_transition(start, fields) for start in (starts if is_last else starts[:1])]
            for index in range(self._num_passed, len(transitions)):
                self._observer(transitions[index], end_of_episode=is_last and index == len(transitions) - 1)
                self._num_passed = index + 1
        self._num_passed = 0
        self._starts = [] if is_last else starts
        self._before = None if is_last else fields

    def reset(self) -> None:
        """Forget the episode; transitions that were passed on stay."""
        self._starts, self._before, self._num_passed = [], None, 0


def _leaves(step: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return rewards and discounts as floats or arrays; if only one of them is a nest, the other is repeated."""
    rewards, discounts = ([*map(_as_float, tree.flatten(step[name]))] for name in ("reward", "discount"))
    if not tree.is_nested(step["discount"]):
        discounts *= len(rewards)
    if not tree.is_nested(step["reward"]):
        rewards *= len(discounts)
    if len(rewards) != len(discounts):
        raise StructureError(
            f"{len(rewards)} rewards and {len(discounts)} discounts, expected as many of one as of the other."
        )
    return rewards, discounts


def _as_float(leaf: Any) -> Any:
    array = np.asarray(leaf, np.float64)
    return array if array.ndim else float(array)


def _transition(start: _Start, end: Mapping[str, Any]) -> dict[str, Any]:
    step = start.step
    nest = step["discount"] if tree.is_nested(step["discount"]) else step["reward"]
    return {
        **without_markers(step),
        "reward": _packed(start.rewards, step["reward"], nest),
        "discount": _packed(start.discounts, step["discount"], nest),
        "next_observation": end["observation"],
    }


def _packed(values: list[Any], like: Any, nest: Any) -> Any:
    """Put values into `nest`, in the dtypes of the leaves of `like`."""
    dtypes = [np.asarray(leaf).dtype for leaf in tree.flatten(like)]
    dtypes *= len(values) if len(dtypes) < len(values) else 1
    return tree.unflatten_as(nest, [np.asarray(value, dtype)[()] for value, dtype in zip(values, dtypes, strict=True)])
