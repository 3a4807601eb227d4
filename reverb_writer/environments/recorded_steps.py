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

from typing import Any

import numpy as np

FALSE, TRUE = np.False_, np.True_
ZERO = np.float32(0)


def recorded_step(
    observation: Any,
    action: Any,
    reward: Any,
    discount: Any,
    *,
    is_first: Any = FALSE,
    is_last: Any = FALSE,
    terminated: Any = FALSE,
    truncated: Any = FALSE,
    **others: Any,
) -> dict[str, Any]:
    """Return a step with these fields and `others`; of several environments if all leaves are [N, ...]."""
    return {
        "observation": observation,
        "action": action,
        "reward": reward,
        "discount": discount,
        "is_first": is_first,
        "is_last": is_last,
        "terminated": terminated,
        "truncated": truncated,
        **others,
    }
