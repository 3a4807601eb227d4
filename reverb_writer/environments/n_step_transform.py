"""Fold the steps of an environment into transitions over n steps, for an observer.

    gamma = 0.5, discounts 1, n = 3           each line is a transition; they are passed on in this order

    observation   s0    s1    s2    s3   s4   from   to   reward                    discount
    reward           2     3     5     7      s0     s1   2                         1
                  |-----|                     s0     s2   2 + 3/2                   1/2
                  |-----------|               s0     s3   2 + 3/2 + 5/4             1/4
                  |-----------------|         s1     s4   3 + 5/2 + 7/4             1/4
                        |----------------|    s2     s4   5 + 7/2                   1/2     the episode is over:
                              |----------|    s3     s4   7                         1       all that remain
                                    |----|

The learner multiplies the value of `next_observation` by gamma times `discount`: the last gamma is not in `discount`.

Source: Acme, `NStepTransitionAdder`; docs/compatibility.md lists the differences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import tree

from reverb_writer.arguments import check_fraction, integer
from reverb_writer.errors import StructureError
from reverb_writer.steps import BOUNDARY_MARKS

__all__ = ["NStepTransform"]

_NEEDED = ("observation", "action", "reward", "discount")
_MARKERS = frozenset({"step_type", "next_step_type", "is_first", "is_last", "is_terminal", "terminated", "truncated"})


class _Start(NamedTuple):
    """The first step of transitions, with the rewards and discounts so far: a number or an array for each leaf."""

    step: Mapping[str, Any]
    rewards: list[Any]
    discounts: list[Any]


class NStepTransform:
    """Fold steps into transitions over n of them, and pass those on to an observer.

    Takes steps as `reverb_writer.environments` records them, or any dict or named tuple (such as `Trajectory`) with
    `observation`, `action`, `reward` and `discount`, where reward and discount are results of the action, and only the
    observation of an episode's last step counts. Passes on dicts of `observation`, `action`, `reward`, `discount`,
    `next_observation` and the other fields of the first of the n steps, without markers. Used from one thread at a
    time.

    Example:
        observer = rw.TrajectoryObserver("localhost:8000", "replay", sequence_length=1)
        env = rw.environments.record(env, rw.environments.NStepTransform(observer, n_step=3, discount=0.99))
    """

    def __init__(self, observer: Any, n_step: int, discount: float) -> None:
        """Begin with no episode.

        Args:
            observer: called with each transition and `end_of_episode`, such as a `TrajectoryObserver`. With
                `sequence_length=1` a transition is an item.
            n_step: n, maximum of steps in a transition, >= 1; the first and the last transitions of an episode have
                fewer.
            discount: gamma, in [0, 1].

        Raises:
            SpecError: a number out of range.
        """
        self._observer = observer
        self._n = integer("n_step", n_step, minimum=1)
        self._gamma = check_fraction("discount", discount)
        self._starts: list[_Start] = []
        self._before: Mapping[str, Any] | None = None
        self._num_passed = 0

    def __call__(self, step: Any, *, end_of_episode: bool | None = None) -> None:
        """Add a step, and pass on the transition to its observation; at the end of an episode, all that remain.

        Args:
            step: a dict or a named tuple; kept without copying while a transition needs it.
            end_of_episode: whether it is the last of its episode; None to read `is_last` or `step_type`.

        Raises:
            StructureError: it lacks a field, or has different numbers of rewards and discounts. Nothing changed.
            StructureError, ReplayTimeoutError, ClosedError: as the observer raises. Nothing changed, except that
                transitions of a last step may have been passed on; a call with the same step passes on the others.
        """
        fields = _fields(step)
        is_last = _is_last(fields) if end_of_episode is None else bool(end_of_episode)
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


def _fields(step: Any) -> Mapping[str, Any]:
    fields = step._asdict() if hasattr(step, "_asdict") else step
    missing = [name for name in _NEEDED if not isinstance(fields, Mapping) or name not in fields]
    if missing:
        raise StructureError(f"a step for n-step transitions has no {missing}; it needs {[*_NEEDED]}.")
    return dict(fields)


def _is_last(fields: Mapping[str, Any]) -> bool:
    for name, last in BOUNDARY_MARKS:
        if name in fields:
            return int(fields[name]) == last
    raise StructureError("a step for n-step transitions needs `is_last` or `step_type`, or pass `end_of_episode`.")


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
        **{name: value for name, value in step.items() if name not in _MARKERS},
        "reward": _packed(start.rewards, step["reward"], nest),
        "discount": _packed(start.discounts, step["discount"], nest),
        "next_observation": end["observation"],
    }


def _packed(values: list[Any], like: Any, nest: Any) -> Any:
    """Put values into `nest`, in the dtypes of the leaves of `like`."""
    dtypes = [np.asarray(leaf).dtype for leaf in tree.flatten(like)]
    dtypes *= len(values) if len(dtypes) < len(values) else 1
    return tree.unflatten_as(nest, [np.asarray(value, dtype)[()] for value, dtype in zip(values, dtypes, strict=True)])
