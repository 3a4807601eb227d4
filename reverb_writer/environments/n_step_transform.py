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

from typing import Any

from reverb_writer.arguments import check_fraction, integer
from reverb_writer.environments.single_n_step import SingleNStep
from reverb_writer.environments.vector_n_step import VectorNStep


class NStepTransform:
    """Fold steps into transitions over n of them, and pass those on to an observer.

    Takes steps as `reverb_writer.environments` records them, or any dict or named tuple (such as `Trajectory`) with
    `observation`, `action`, `reward` and `discount`, where reward and discount are results of the action, and only the
    observation of an episode's last step counts. Passes on dicts of `observation`, `action`, `reward`, `discount`,
    `next_observation` and the other fields of the first of the n steps, without markers. Used from one thread at a
    time.

    In front of a `VectorObserver`, steps have leaves [N, ...], and each environment has its own episodes.

    Attributes:
        num_envs: N, or None for steps of one environment.

    Example:
        observer = rw.TrajectoryObserver("localhost:8000", "replay", sequence_length=1)
        env = rw.environments.record(env, rw.environments.NStepTransform(observer, n_step=3, discount=0.99))
    """

    def __init__(self, observer: Any, n_step: int, discount: float, *, num_envs: int | None = None) -> None:
        """Begin with no episode.

        Args:
            observer: called with each transition and `end_of_episode`, such as a `TrajectoryObserver`. With
                `sequence_length=1` a transition is an item. With `num_envs`, it is also called with `env_mask`.
            n_step: n, maximum of steps in a transition, >= 1; the first and the last transitions of an episode have
                fewer.
            discount: gamma, in [0, 1].
            num_envs: N, environments that step together, >= 1; None for the observer's `num_envs`, if it has one.

        Raises:
            SpecError: a number out of range.
        """
        n, gamma = integer("n_step", n_step, minimum=1), check_fraction("discount", discount)
        num_envs = getattr(observer, "num_envs", None) if num_envs is None else num_envs
        self.num_envs = None if num_envs is None else integer("num_envs", num_envs, minimum=1)
        self._fold = (
            SingleNStep(observer, n, gamma) if self.num_envs is None else VectorNStep(observer, n, gamma, self.num_envs)
        )

    def __call__(self, step: Any, *, end_of_episode: Any = None, env_mask: Any = None) -> None:
        """Add a step, and pass on the transition to its observation; at the end of an episode, all that remain.

        Args:
            step: a dict or a named tuple; kept without copying while a transition of one environment needs it.
            end_of_episode: whether it is the last of its episode, with `num_envs` [N] booleans; None to read `is_last`
                or `step_type`.
            env_mask: [N] booleans, which environments have a step here; None for all. With `num_envs` only.

        Raises:
            StructureError: it lacks a field, or has different numbers of rewards and discounts. Nothing changed.
            StructureError, ReplayTimeoutError, ClosedError: as the observer raises. Nothing changed, except that some
                of the transitions may have been passed on; a call with the same step passes on the others.
        """
        self._fold(step, end_of_episode=end_of_episode, env_mask=env_mask)

    def reset(self) -> None:
        """Forget the episode, or those of all environments; transitions that were passed on stay."""
        self._fold.reset()
