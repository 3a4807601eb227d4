"""The steps that environments become: one for each observation, the terminal one too.

    key           at time t                                                   in an episode's last step
    ------------  ----------------------------------------------------------  -------------------------------
    observation   what is observed                                            the final observation
    action        what is done then                                           zeros
    reward        what comes of it                                            0
    discount      0 if the action led to a terminal state, else the           0
                  environment's own, mostly 1
    is_first      whether nothing came before                                 False
    is_last       False                                                       True
    terminated    False                                                       whether its state is terminal
    truncated     False                                                       whether it was cut off
    seed          of the reset that began the episode; -1 if it had none      the same

So an episode of E environment steps has E + 1 steps, and the learner finds the observation that an action led to in the
next step. `terminated` and `truncated` are where `reverb_writer.slices` looks for them, and may both be set. `seed` is
there if asked for. What is cut off by the actor, with `reset` or `close`, is truncated. A reset that no step follows is
no episode, and leaves nothing.

Source: RLDS (reward and discount beside the action that led to them, a last step without a transition); Gymnasium
(`terminated` and `truncated`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["FALSE", "TRUE", "ZERO", "last_step"]

FALSE, TRUE = np.False_, np.True_
ZERO = np.float32(0)


def last_step(observation: Any, action: Any, reward: Any, discount: Any, terminated: Any, truncated: Any) -> Any:
    """Return the step that ends an episode; all but the observation and the flags are given as zeros."""
    return {
        "observation": observation,
        "action": action,
        "reward": reward,
        "discount": discount,
        "is_first": FALSE,
        "is_last": TRUE,
        "terminated": terminated,
        "truncated": truncated,
    }
