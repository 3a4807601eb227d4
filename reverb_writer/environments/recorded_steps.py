"""The steps that are recorded of an environment: one for each observation, the terminal one included.

    key           at time t                                                   in an episode's last step
    ------------  ----------------------------------------------------------  -------------------------------
    observation   the observation                                             the final observation
    action        the action taken on it                                      zeros
    reward        its reward                                                  0
    discount      0 if the action led to a terminal state, else that of the   0
                  environment, mostly 1
    is_first      whether it is the first of its episode                      False
    is_last       False                                                       True
    terminated    False                                                       whether its state is terminal
    truncated     False                                                       whether a limit or the actor ended it
    seed          of the reset that began the episode; -1 if it had none      the same
    extras        data of the policy that chose the action                    zeros

So an episode of E environment steps has E + 1 steps, and the next step holds the observation that an action led to.
`terminated` and `truncated` have the names that `rw.to_transitions` and `rw.slices` read; both may be set. `seed` is
recorded with `seeds=True`, `extras` with `extras=fn`. Episodes that the actor ends, with `reset` or `close`, are
truncated. A reset without a step after it records nothing. docs/steps.md draws the three ends.

Source: RLDS (reward and discount beside the action that led to them, a last step without a transition); Gymnasium
(`terminated` and `truncated`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tree

from reverb_writer.errors import SpecError, StructureError
from reverb_writer.leaves import host_array

FALSE, TRUE = np.False_, np.True_
ZERO = np.float32(0)


_NO_FLAGS = dict.fromkeys(("is_first", "is_last", "terminated", "truncated"), FALSE)


def recorded_step(observation: Any, action: Any, reward: Any, discount: Any, **others: Any) -> dict[str, Any]:
    """Return a step with these fields and `others`; of several environments if all leaves are [N, ...]."""
    own = {"observation": observation, "action": action, "reward": reward, "discount": discount}
    return {**own, **_NO_FLAGS, **others}


class Recording:
    """Passes steps to an observer, and keeps what a recorder knows of its episodes once the observer has them.

    An interrupt may come before the observer has taken a step or after it, and the recorder must know which: else the
    last observation of an episode would be that before an action that was recorded. An observer of this package tells;
    of another function, a call that raises counts as not taken.

    Attributes:
        state: what the recorder knows; it changes by one assignment.
    """

    def __init__(self, observer: Callable[..., Any], state: Any) -> None:
        """Begin with a state."""
        self.observer, self.state = observer, state
        self._open_call: tuple[int | None, Any] | None = None  # steps taken before a call, and the state after it

    def write(self, step: Any, after: Any, **how: Any) -> None:
        """Pass a step on; `after` is the state once it is taken."""
        self._open_call = self._num_taken(), after
        try:
            self.observer(step, **how)
        except BaseException:
            self.settle()
            raise
        self.state = after
        self._open_call = None

    def settle(self) -> None:
        """Find out whether the step of a call that did not come to its end was taken."""
        if self._open_call is not None:
            num_before, after = self._open_call
            if self._num_taken() != num_before:
                self.state = after
            self._open_call = None

    def _num_taken(self) -> int | None:
        return getattr(self.observer, "num_steps", None)


class PolicyExtras:
    """Copies what a function returns before each step, and has zeros of the same shapes for an episode's last step."""

    def __init__(self, read: Callable[[], Any], num_envs: int | None = None) -> None:
        """Take a function that returns a nest, with leaves [N, ...] for `num_envs` = N environments."""
        if not callable(read):
            raise SpecError(
                f"`extras` must be a function without arguments that returns a nest, got {type(read).__name__}."
            )
        self._read, self._num_envs = read, num_envs
        self.zeros: Any = None

    def read(self, resetting: Any = None) -> Any:
        """Return what belongs to the action that is about to be taken, as arrays of its own.

        For the environments, [N] bool, that this step is `resetting`, the row is zeros: their action has no effect.
        """
        nest = tree.map_structure(lambda leaf: host_array(leaf).copy(), self._read())
        if self._num_envs is not None:
            for path, leaf in tree.flatten_with_path(nest):
                if leaf.shape[:1] != (self._num_envs,):
                    raise StructureError(
                        f"`extras`, leaf `{'/'.join(map(str, path))}` has shape {leaf.shape}, expected "
                        f"({self._num_envs}, ...): one row an environment."
                    )
        if self.zeros is None:
            self.zeros = tree.map_structure(np.zeros_like, nest)
        if resetting is not None and resetting.any():
            for leaf in tree.flatten(nest):
                leaf[resetting] = 0
        return nest
